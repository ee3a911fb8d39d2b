"""`rhymeflow export`: what a run generated, as rows to a file that other programs read.

trajectories   one row a response, with all that is stored of it
sft            {prompt, completion}, as `rhymeflow sft` and TRL read them
preferences    {prompt, chosen, rejected}, as TRL reads them
"""

from __future__ import annotations

import heapq
from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

from rhymeflow.core.types import CUT, TrajectoryId
from rhymeflow.data.encode import messages_of
from rhymeflow.data.prompts import Message, Prompt
from rhymeflow.errors import UserError
from rhymeflow.export import formats
from rhymeflow.export.turns import TurnReader, turns_of
from rhymeflow.observe import query
from rhymeflow.observe.query import Record
from rhymeflow.store.damage import open_undamaged
from rhymeflow.store.previous_run import section_in_force, store_of
from rhymeflow.store.reader import StoredSegment, TrajectoryReader

GROUPS_AT_ONCE = 64
"""Read in one transaction, and held in memory."""

UNFINISHED = "unfinished"
"""The ending of a response whose group has none yet, as in `summary.json`."""
NO_TEXT = "whose text was deleted (run.keep_tokens) or never made"
UNREADABLE = "whose answers of the environment are no messages"
UNEQUAL = "without a better or worse one in their group"

_OF_TRAJECTORY = (
    *("group", "member", "row", "epoch", "prompt", "response", "columns", "reward", "components"),
    *("ending", "ending_reason", "reason", "length", "step", "first_version", "last_version"),
    "staleness",
)
_COMPONENTS = "SELECT DISTINCT key FROM trajectories, json_each(components) WHERE group_id >= 0"

Text = str | list[Message]


@dataclass(frozen=True)
class Export:
    """What was written, and what was left out, by reason."""

    path: Path
    rows: int
    responses: int
    left_out: dict[str, int]
    notes: dict[str, int]
    """Rows of `trajectories` by what they lack."""

    def line(self) -> str:
        """The report in one line."""
        text = f"{self.path}: {self.rows:,} rows of {self.responses:,} responses"
        for title, counts in (("left out", self.left_out), ("among them", self.notes)):
            if counts:
                text += f"; {title}: {_counted(counts)}"
        return text


def _counted(counts: dict[str, int]) -> str:
    return ", ".join(f"{number:,} {what}" for what, number in counts.items())


@dataclass(frozen=True)
class Filters:
    """Which responses to export; by default all."""

    min_reward: float | None = None
    steps: tuple[float, float] | None = None
    """First and last of the steps that trained on it; steps count from 1."""
    endings: tuple[str, ...] = ()
    best: int | None = None
    """This many of each row of the data, those with the greatest rewards."""

    def want(self, response: Record) -> bool:
        """Whether the response passes all filters but `best`."""
        reward, step = response["reward"], response["step"]
        if self.min_reward is not None and (reward is None or reward < self.min_reward):
            return False
        if self.endings and response["ending"] not in self.endings:
            return False
        return self.steps is None or (step is not None and self.steps[0] <= step <= self.steps[1])


def export(
    run_dir: Path,
    output: Path,
    *,
    what: str = "trajectories",
    kind: str | None = None,
    filters: Filters | None = None,
    with_tokens: bool = False,
    force: bool = False,
) -> Export:
    """Write rows of the run in `run_dir` to `output`.

    `what`: `trajectories`, `sft` or `preferences`. `kind`: one of `formats.FORMATS`; `None`: what
    the name of `output` says. `with_tokens`: with trajectories, values for each token too. `force`:
    replace what is there.

    Raises:
        UserError: there is no run, options do not go together, nothing would be written, or what is
            needed for it is missing.
    """
    filters = filters or Filters()
    if with_tokens and what != "trajectories":
        raise UserError(f"--tokens: goes with --what trajectories; given {what}")
    if filters.best is not None and what == "preferences":
        raise UserError("--best: a pair is the best and the worst of its group already")
    kind = formats.format_of(output, kind, force)
    with open_undamaged(store_of(run_dir)) as reader:
        rows = Rows(reader, what, filters, with_tokens=with_tokens)
        components = []
        if what == "trajectories":
            components = [name for (name,) in reader.query(_COMPONENTS)]
        number = formats.write(output, kind, iter(rows), components, str(run_dir))
    left_out = {why: count for why, count in rows.left_out.items() if count}
    if not number:
        why = _counted(left_out) or "there is no response"
        raise UserError(f"{run_dir}: no row of {what} to write: {why}")
    return Export(output, number, rows.seen, left_out, dict(rows.notes))


def groups(reader: TrajectoryReader) -> Iterator[Record]:
    """The groups that had begun at the call, with all that is stored of their responses."""
    ((last,),) = reader.query("SELECT COALESCE(MAX(group_id), -1) FROM groups")
    for start in range(0, last + 1, GROUPS_AT_ONCE):
        chosen = range(start, min(start + GROUPS_AT_ONCE, last + 1))
        for group in query.whole_groups(reader, chosen):
            for each in group["members"]:
                each |= {"group": group["group"], "ending": _ending(group, each)}
            yield group


def _ending(group: Record, member: Record) -> str:
    """The ending of a response: aborted, if its group was consumed without it."""
    if member["step"] is not None:
        return "consumed"
    ending: str = group["ending"] or UNFINISHED
    return "aborted" if ending == "consumed" else ending


class Rows:
    """Makes rows of the responses that pass the filters, and counts the others by reason."""

    def __init__(
        self, reader: TrajectoryReader, what: str, filters: Filters, *, with_tokens: bool = False
    ) -> None:
        self.left_out: Counter[str] = Counter()
        self.notes: Counter[str] = Counter()
        """Of `trajectories`: rows by what they lack."""
        self.seen = 0
        self._reader, self._what, self._filters = reader, what, filters
        self._with_tokens = with_tokens
        self._data = section_in_force(reader, "data")
        self._turns = _turn_reader(reader)
        self._best = None if filters.best is None else self._best_of_rows(filters.best)

    def __iter__(self) -> Iterator[Record]:
        make = {
            "trajectories": self._trajectories, "sft": self._sft, "preferences": self._preferences
        }  # fmt: skip
        return make[self._what]()

    def groups(self) -> Iterator[tuple[Record, list[Record]]]:
        """Each group, with its responses that are exported."""
        for group in groups(self._reader):
            taken = []
            for each in group["members"]:
                why = self._why_not(each)
                if why is None and self._best is not None and _name(each) not in self._best:
                    why = "not wanted"
                if why is None:
                    taken.append(each)
                else:
                    self.left_out[why] += 1
            self.seen += len(group["members"])
            yield group, taken

    def _why_not(self, each: Record) -> str | None:
        """The reason to leave a response out. SFT rows and pairs need its text; SFT rows need a
        complete one."""
        if not self._filters.want(each):
            return "not wanted"
        if self._what == "trajectories":
            return None
        if each["reason"] is None:
            return "not complete"
        if each["text"] is None:
            return NO_TEXT
        return "cut short" if each["reason"] in CUT and self._what == "sft" else None

    def _best_of_rows(self, number: int) -> set[TrajectoryId]:
        """The best responses of each row; of equal rewards those of newer groups."""
        heaps: dict[int, list[tuple[float, int, int]]] = {}
        for group in groups(self._reader):
            heap = heaps.setdefault(group["row"], [])
            for each in group["members"]:
                if each["reward"] is not None and self._why_not(each) is None:
                    heapq.heappush(heap, (each["reward"], each["group"], -each["member"]))
                    if len(heap) > number:
                        heapq.heappop(heap)
        return {TrajectoryId(g, -m) for heap in heaps.values() for _, g, m in heap}

    def _trajectories(self) -> Iterator[Record]:
        for group, taken in self.groups():
            for each in taken:
                row = _trajectory(group, each)
                segments = self._segments(each) if self._turns or self._with_tokens else []
                if self._turns is not None:
                    row["turns"] = self._turns.shown(turns_of(segments))
                if self._with_tokens:
                    prompt = self._reader.prompt_tokens(each["group"])
                    row |= {"prompt_tokens": prompt} | _tokens(segments)
                self._note(row)
                yield row

    def _note(self, row: Record) -> None:
        if row["ending"] == "aborted":
            self.notes["aborted"] += 1
        if row["reason"] is None:
            self.notes["not complete"] += 1
        elif row["response"] is None:
            self.notes[NO_TEXT] += 1
        if row.get("tokens", ()) is None:
            self.notes["without tokens (run.keep_tokens)"] += 1

    def _sft(self) -> Iterator[Record]:
        """A row per complete response, whatever its reward."""
        for group, taken in self.groups():
            for each in taken:
                said = self._said(group, each)
                if said is None:
                    self.left_out[UNREADABLE] += 1
                else:
                    yield {"prompt": said[0], "completion": said[1]}

    def _preferences(self) -> Iterator[Record]:
        """A row per group whose rewards differ: its best complete response and its worst."""
        for group, taken in self.groups():
            rewarded = [each for each in taken if each["reward"] is not None]
            self.left_out["without reward"] += len(taken) - len(rewarded)
            pair = _extremes(rewarded)
            if pair is None:
                self.left_out[UNEQUAL] += len(rewarded)
                continue
            chosen, rejected = (self._said(group, each) for each in pair)
            if chosen is None or rejected is None:
                self.left_out[UNREADABLE] += len(rewarded)
                continue
            yield {
                "prompt": chosen[0],
                "chosen": chosen[1],
                "rejected": rejected[1],
                "chosen_reward": pair[0]["reward"],
                "rejected_reward": pair[1]["reward"],
                "group": group["group"],
                "chosen_member": pair[0]["member"],
                "rejected_member": pair[1]["member"],
            }

    def _segments(self, response: Record) -> list[StoredSegment]:
        with self._reader.one_state():
            return self._reader.segments(_name(response))

    def _said(self, group: Record, response: Record) -> tuple[Text, Text] | None:
        """The prompt, with system message and examples, and the completion: text where the prompt
        is text and there is one turn, else messages. `None`: it cannot be read as messages."""
        begun, prompt = _begun(self._given(group), self._data.assistant_prefix)
        is_chat = not isinstance(prompt, str)
        if self._turns is None:
            text = begun + response["text"]
            return prompt, [{"role": "assistant", "content": text}] if is_chat else text
        said = self._turns.messages(turns_of(self._segments(response)), is_chat=is_chat)
        if not said:  # no messages, or deleted meanwhile
            return None
        said[0] = said[0] | {"content": begun + said[0]["content"]}
        return prompt, said

    def _given(self, group: Record) -> Text:
        """The prompt as messages for the chat template, or as text."""
        prompt: Text = group["prompt"]
        if isinstance(prompt, str) and not self._data.chat_template:
            return prompt
        return messages_of(Prompt(group["row"], prompt, group["columns"]), self._data)


def _turn_reader(reader: TrajectoryReader) -> TurnReader | None:
    """`None`: responses of the run have a single turn."""
    environment = section_in_force(reader, "environment")
    if not (environment.classes or environment.tools):
        return None
    from rhymeflow.models.tokenizer import load_tokenizer  # loads transformers

    return TurnReader(load_tokenizer(section_in_force(reader, "model")))


def _name(response: Record) -> TrajectoryId:
    return TrajectoryId(response["group"], response["member"])


def _begun(prompt: Text, prefix: str | None) -> tuple[str, Text]:
    """The text with which the response was begun for the policy, and the prompt before it."""
    begun = prefix or ""
    if not isinstance(prompt, str) and prompt[-1]["role"] == "assistant":
        return prompt[-1]["content"] + begun, prompt[:-1]
    return begun, prompt


def _extremes(members: list[Record]) -> tuple[Record, Record] | None:
    """The best complete response, and the worst of all; `None` if it is not better."""
    whole = [each for each in members if each["reason"] not in CUT]
    if not whole:
        return None
    best = max(whole, key=lambda each: (each["reward"], -each["member"]))
    worst = min(members, key=lambda each: (each["reward"], each["member"]))
    return (best, worst) if worst["reward"] < best["reward"] else None


def _trajectory(group: Record, member: Record) -> Record:
    step = member["step"]
    age = None if step is None else step - 1 - member["first_version"]
    said = group | member | {"response": member["text"], "staleness": age}
    return {name: said[name] for name in _OF_TRAJECTORY}


def _tokens(segments: list[StoredSegment]) -> Record:
    """Lists with an entry per token; `None` if tokens were deleted. Tokens of an environment have
    `None` for their log-probability."""
    names = ("tokens", "logprobs", "versions", "observed")
    if any(not segment.tokens for segment in segments):
        return dict.fromkeys(names)
    found: Record = {name: [] for name in names}
    for segment in segments:
        is_observed = segment.is_observed
        found["tokens"] += segment.tokens
        found["logprobs"] += [None] * segment.length if is_observed else segment.logprobs
        found["versions"] += [segment.version] * segment.length
        found["observed"] += [is_observed] * segment.length
    return found
