"""`rhymeflow export`: writes a run's responses as rows to a file for other programs.

trajectories   one row for each response, with all that is stored of it
sft            {prompt, completion}, as `rhymeflow sft` and TRL read them
preferences    {prompt, chosen, rejected}, as TRL reads them"""

from __future__ import annotations

import heapq
from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import NamedTuple

from rhymeflow.core.types import CUT, TrajectoryId
from rhymeflow.data.encode import messages_of
from rhymeflow.data.prompts import Message, Prompt
from rhymeflow.data.text import special_tokens
from rhymeflow.errors import UserError
from rhymeflow.export import formats
from rhymeflow.export.turns import TurnReader, turns_of
from rhymeflow.observe import query
from rhymeflow.observe.query import Record
from rhymeflow.store.damage import open_undamaged
from rhymeflow.store.previous_run import section_in_force, store_of
from rhymeflow.store.reader import StoredSegment, TrajectoryReader

GROUPS_AT_ONCE = 64  # groups that are read in one transaction and held in memory

UNFINISHED = "unfinished"  # the ending of a response whose group has none yet, as in `summary.json`
NO_TEXT = "whose text was deleted (run.keep_tokens) or never made"
UNREADABLE = "whose answers of the environment are no messages"
NO_PAIR = "without a better or worse one in their group"

_OF_TRAJECTORY = (
    *("group", "member", "row", "epoch", "prompt", "response", "columns", "reward", "components"),
    *("ending", "ending_reason", "reason", "length", "step", "first_version", "last_version"),
    "staleness",
)
_COMPONENTS = "SELECT DISTINCT key FROM trajectories, json_each(components) WHERE group_id >= 0"

Text = str | list[Message]


class _Example(NamedTuple):
    """What the policy read and what it wrote, as a row of `sft` has them."""

    prompt: Text
    completion: Text


@dataclass(frozen=True)
class Export:
    """The counts of an export: rows written, and responses left out, by reason."""

    path: Path
    rows: int
    responses: int
    left_out: dict[str, int]
    notes: dict[str, int]  # counts of rows of `trajectories` by what they lack

    def line(self) -> str:
        """Return the report in one line."""
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
    """First and last step, from 1, of those that trained on a response."""
    endings: tuple[str, ...] = ()
    best: int | None = None
    """How many responses to each row of the data, those with the highest rewards."""

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

    `what`: `trajectories`, `sft` or `preferences`. `kind`: one of `formats.FORMATS`; `None`: the
    one that the suffix of `output` means. `with_tokens`: add token values to trajectories. `force`:
    replace an existing output. Raises `UserError` if there is no run, options conflict, there is no
    row to write, or a package is missing."""
    filters = filters or Filters()
    if with_tokens and what != "trajectories":
        raise UserError(f"--tokens: goes with --what trajectories; given {what}")
    if filters.best is not None and what == "preferences":
        raise UserError("--best: a pair is the best and the worst of its group already")
    kind = formats.format_of(output, kind, force)
    if output.exists() and output.resolve().parent == run_dir.resolve():
        raise UserError(f"--output {output}: is among the run's own files; name another")
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
    """Yield the groups that existed at the call, with all that is stored of their responses."""
    ((last,),) = reader.query("SELECT COALESCE(MAX(group_id), -1) FROM groups")
    for start in range(0, last + 1, GROUPS_AT_ONCE):
        chosen = range(start, min(start + GROUPS_AT_ONCE, last + 1))
        for group in query.whole_groups(reader, chosen):
            for member in group["members"]:
                member |= {"group": group["group"], "ending": _ending(group, member)}
            yield group


def _ending(group: Record, member: Record) -> str:
    """Return a response's ending: aborted if its group was consumed without it."""
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
        self.notes: Counter[str] = Counter()  # see `Export`
        self.seen = 0
        self._reader, self._what, self._filters = reader, what, filters
        self._with_tokens = with_tokens
        self._data = section_in_force(reader, "data")
        self._turns = _turn_reader(reader)
        self._ends = _ends_in_text(reader)
        self._best = None if filters.best is None else self._best_of_rows(filters.best)

    def __iter__(self) -> Iterator[Record]:
        make = {
            "trajectories": self._trajectories, "sft": self._sft, "preferences": self._preferences
        }  # fmt: skip
        return make[self._what]()

    def groups(self) -> Iterator[tuple[Record, list[Record]]]:
        """Yield each group with its exported responses; count the others."""
        for group in groups(self._reader):
            exported = []
            for member in group["members"]:
                why = self._why_not(member)
                if why is None and self._best is not None and _id_of(member) not in self._best:
                    why = "not wanted"
                if why is None:
                    exported.append(member)
                else:
                    self.left_out[why] += 1
            self.seen += len(group["members"])
            yield group, exported

    def _why_not(self, response: Record) -> str | None:
        """Return why to leave a response out, or None. Only complete responses with text become SFT
        rows or pairs, and those cut short do not become SFT rows."""
        if not self._filters.want(response):
            return "not wanted"
        if self._what == "trajectories":
            return None
        if response["reason"] is None:
            return "not complete"
        if response["text"] is None:
            return NO_TEXT
        return "cut short" if response["reason"] in CUT and self._what == "sft" else None

    def _best_of_rows(self, number: int) -> set[TrajectoryId]:
        """Return the `number` best responses to each row; of equals, those of newer groups."""
        heaps: dict[int, list[tuple[float, int, int]]] = {}
        for group in groups(self._reader):
            heap = heaps.setdefault(group["row"], [])
            for member in group["members"]:
                if member["reward"] is not None and self._why_not(member) is None:
                    heapq.heappush(heap, (member["reward"], member["group"], -member["member"]))
                    if len(heap) > number:
                        heapq.heappop(heap)
        return {TrajectoryId(g, -m) for heap in heaps.values() for _, g, m in heap}

    def _trajectories(self) -> Iterator[Record]:
        for group, exported in self.groups():
            for response in exported:
                row = _trajectory(group, response)
                segments = self._segments(response) if self._turns or self._with_tokens else []
                if self._turns is not None:
                    row["turns"] = self._turns.shown(turns_of(segments))
                if self._with_tokens:
                    prompt = self._reader.prompt_tokens(response["group"])
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
        """Yield a row for each complete response, whatever its reward."""
        for group, exported in self.groups():
            for response in exported:
                example = self._example(group, response)
                if example is None:
                    self.left_out[UNREADABLE] += 1
                else:
                    yield example._asdict()

    def _preferences(self) -> Iterator[Record]:
        """Yield a row for each group whose rewards differ: its best and its worst response."""
        for group, exported in self.groups():
            rewarded = [response for response in exported if response["reward"] is not None]
            self.left_out["without reward"] += len(exported) - len(rewarded)
            pair = _extremes(rewarded)
            if pair is None:
                self.left_out[NO_PAIR] += len(rewarded)
                continue
            best, worst = pair
            chosen, rejected = self._example(group, best), self._example(group, worst)
            if chosen is None or rejected is None:
                self.left_out[UNREADABLE] += len(rewarded)
                continue
            yield {
                "prompt": chosen.prompt,
                "chosen": chosen.completion,
                "rejected": rejected.completion,
                "chosen_reward": best["reward"],
                "rejected_reward": worst["reward"],
                "group": group["group"],
                "chosen_member": best["member"],
                "rejected_member": worst["member"],
            }

    def _segments(self, response: Record) -> list[StoredSegment]:
        with self._reader.one_state():
            return self._reader.segments(_id_of(response))

    def _example(self, group: Record, response: Record) -> _Example | None:
        """Return the prompt, with system message and examples, and the completion: text if the
        prompt is text and there is one turn, else messages. `None`: it cannot be read as them."""
        prefix, prompt = _split_prefix(self._prompt(group), self._data.assistant_prefix)
        is_chat = not isinstance(prompt, str)
        if self._turns is None:
            text = response["text"]
            end = next(filter(text.endswith, self._ends), "")
            text = prefix + text.removesuffix(end)
            return _Example(prompt, [{"role": "assistant", "content": text}] if is_chat else text)
        messages = self._turns.messages(turns_of(self._segments(response)), is_chat=is_chat)
        if not messages:  # unreadable, or the tokens have been deleted
            return None
        messages[0] = messages[0] | {"content": prefix + messages[0]["content"]}
        return _Example(prompt, messages)

    def _prompt(self, group: Record) -> Text:
        """Return the prompt as messages for the chat template, or as text."""
        prompt: Text = group["prompt"]
        if isinstance(prompt, str) and not self._data.chat_template:
            return prompt
        return messages_of(Prompt(group["row"], prompt, group["columns"]), self._data)


def _turn_reader(reader: TrajectoryReader) -> TurnReader | None:
    """Make the reader of turns; `None`: the run's responses have a single turn."""
    environment = section_in_force(reader, "environment")
    if not environment.is_used:
        return None
    from rhymeflow.environments.template import settle
    from rhymeflow.models.tokenizer import load_tokenizer  # loads transformers

    tokenizer = load_tokenizer(section_in_force(reader, "model"))
    settle(tokenizer, section_in_force(reader, "data"), has_turns=True)
    return TurnReader(tokenizer)


def _ends_in_text(reader: TrajectoryReader) -> list[str]:
    """Return the special tokens, one of which may end the text of a response that has them."""
    if section_in_force(reader, "rollout").skip_special_tokens:
        return []
    from rhymeflow.models.tokenizer import load_tokenizer  # loads transformers

    return special_tokens(load_tokenizer(section_in_force(reader, "model")))


def _id_of(response: Record) -> TrajectoryId:
    return TrajectoryId(response["group"], response["member"])


def _split_prefix(prompt: Text, prefix: str | None) -> tuple[str, Text]:
    """Return the beginning of the response that the policy was given, and the prompt before it."""
    prefix = prefix or ""
    if not isinstance(prompt, str) and prompt[-1]["role"] == "assistant":
        return prompt[-1]["content"] + prefix, prompt[:-1]
    return prefix, prompt


def _extremes(members: list[Record]) -> tuple[Record, Record] | None:
    """Return the best response that was not cut short, and the worst of all if that is worse."""
    whole = [member for member in members if member["reason"] not in CUT]
    if not whole:
        return None
    best = max(whole, key=lambda member: (member["reward"], -member["member"]))
    worst = min(members, key=lambda member: (member["reward"], member["member"]))
    return (best, worst) if worst["reward"] < best["reward"] else None


def _trajectory(group: Record, member: Record) -> Record:
    step = member["step"]
    age = None if step is None else step - 1 - member["first_version"]
    values = group | member | {"response": member["text"], "staleness": age}
    return {name: values[name] for name in _OF_TRAJECTORY}


def _tokens(segments: list[StoredSegment]) -> Record:
    """Return lists with an entry per token; `None` if tokens were deleted. The log-probability of
    an environment's token is `None`."""
    names = ("tokens", "logprobs", "versions", "observed")
    if any(not segment.tokens for segment in segments):
        return dict.fromkeys(names)
    values: Record = {name: [] for name in names}
    for segment in segments:
        is_observed = segment.is_observed
        values["tokens"] += segment.tokens
        values["logprobs"] += [None] * segment.length if is_observed else segment.logprobs
        values["versions"] += [segment.version] * segment.length
        values["observed"] += [is_observed] * segment.length
    return values
