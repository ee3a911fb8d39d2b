"""Rows that are exported, of what `query.whole_groups` says; made one by one.

    trajectories   one row a response, with all that is stored of it
    sft            {prompt, completion}, as `rhymeflow sft` and TRL read them
    preferences    {prompt, chosen, rejected}, as TRL reads them

Of `sft` and `preferences` the prompt is what the policy was given, with the system message and the
examples before it; a completion is text where the prompt is text and nothing was answered in
between, else messages; what an environment answered is never the assistant's.
"""

from __future__ import annotations

import heapq
from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass

from rhymeflow.config import DataConfig
from rhymeflow.core.types import CUT, TrajectoryId
from rhymeflow.data.encode import messages_of
from rhymeflow.data.prompts import Message, Prompt
from rhymeflow.export.turns import TurnReader, turns_of
from rhymeflow.observe import query
from rhymeflow.observe.query import Record
from rhymeflow.store.reader import StoredSegment, TrajectoryReader

GROUPS_AT_ONCE = 64
"""Are read in one transaction, and held in memory."""

UNFINISHED = "unfinished"
"""What a response is called that no ending has reached yet, as in `summary.json`."""
ENDINGS = ("consumed", "filtered", "aborted", UNFINISHED)
NO_TEXT = "whose text was deleted (run.keep_tokens) or never made"
UNREADABLE = "whose answers of the environment are no messages"
UNEQUAL = "without a better or worse one in their group"

_OF_TRAJECTORY = (
    *("group", "member", "row", "epoch", "prompt", "response", "columns", "reward", "components"),
    *("ending", "ending_reason", "reason", "length", "step", "first_version", "last_version"),
    "staleness",
)

Text = str | list[Message]


@dataclass(frozen=True)
class Filters:
    """Which responses are wanted; the defaults want all."""

    min_reward: float | None = None
    steps: tuple[float, float] | None = None
    """Trained on in one of these steps, the first and the last included; steps count from 1."""
    endings: tuple[str, ...] = ()
    best: int | None = None
    """The so many with the greatest rewards of each row of the data."""

    def want(self, response: Record) -> bool:
        """Whether it is wanted, `best` aside."""
        reward, step = response["reward"], response["step"]
        if self.min_reward is not None and (reward is None or reward < self.min_reward):
            return False
        if self.endings and response["ending"] not in self.endings:
            return False
        return self.steps is None or (step is not None and self.steps[0] <= step <= self.steps[1])


def groups(reader: TrajectoryReader) -> Iterator[Record]:
    """Groups that had begun when this began, each with what is known of its responses."""
    ((last,),) = reader.query("SELECT COALESCE(MAX(group_id), -1) FROM groups")
    for start in range(0, last + 1, GROUPS_AT_ONCE):
        chosen = range(start, min(start + GROUPS_AT_ONCE, last + 1))
        for group in query.whole_groups(reader, chosen):
            for each in group["members"]:
                each |= {"group": group["group"], "ending": _ending(group, each)}
            yield group


def _ending(group: Record, member: Record) -> str:
    """One of `ENDINGS`: of a consumed group, members that were not needed are aborted."""
    if member["step"] is not None:
        return "consumed"
    ending: str = group["ending"] or UNFINISHED
    return "aborted" if ending == "consumed" else ending


class Choice:
    """Takes responses by `filters`, those that are of use, and counts the others by the reason.
    `is_text_needed`: whether one without its text, or cut short, is of no use."""

    def __init__(
        self, reader: TrajectoryReader, filters: Filters, *, is_text_needed: bool = False
    ) -> None:
        self.left_out: Counter[str] = Counter()
        self.seen = 0
        self._reader, self._filters, self._is_text_needed = reader, filters, is_text_needed
        self._best = None if filters.best is None else self._best_of_rows(filters.best)

    def groups(self, *, may_be_cut: bool = False) -> Iterator[tuple[Record, list[Record]]]:
        """Each group, with those of its responses that are taken; `may_be_cut`: also if they were
        cut short."""
        for group in groups(self._reader):
            taken = []
            for each in group["members"]:
                why = self._why_not(each, may_be_cut)
                if why is None and self._best is not None and _name(each) not in self._best:
                    why = "not wanted"
                if why is None:
                    taken.append(each)
                else:
                    self.left_out[why] += 1
            self.seen += len(group["members"])
            yield group, taken

    def _why_not(self, each: Record, may_be_cut: bool) -> str | None:
        if not self._filters.want(each):
            return "not wanted"
        if not self._is_text_needed:
            return None
        if each["reason"] is None:
            return "not complete"
        if each["text"] is None:
            return NO_TEXT
        return "cut short" if each["reason"] in CUT and not may_be_cut else None

    def _best_of_rows(self, number: int) -> set[TrajectoryId]:
        """Of equal rewards those of newer groups, which a better policy made."""
        heaps: dict[int, list[tuple[float, int, int]]] = {}
        for group in groups(self._reader):
            heap = heaps.setdefault(group["row"], [])
            for each in group["members"]:
                if each["reward"] is not None and self._why_not(each, False) is None:
                    heapq.heappush(heap, (each["reward"], each["group"], -each["member"]))
                    if len(heap) > number:
                        heapq.heappop(heap)
        return {TrajectoryId(g, -m) for heap in heaps.values() for _, g, m in heap}


class Rows:
    """Makes rows of a run's responses. `turns`: of a run whose responses have turns; `None`: none
    of them has."""

    def __init__(
        self, reader: TrajectoryReader, data: DataConfig, choice: Choice, turns: TurnReader | None
    ) -> None:
        self._reader, self._data, self._choice, self._turns = reader, data, choice, turns

    def trajectories(self, *, with_tokens: bool) -> Iterator[Record]:
        """One row a response; `with_tokens`: its tokens and what goes with each, too."""
        for group, taken in self._choice.groups():
            for each in taken:
                row = _trajectory(group, each)
                segments = self._segments(each) if self._turns or with_tokens else []
                if self._turns is not None:
                    row["turns"] = self._turns.shown(turns_of(segments))
                if with_tokens:
                    prompt = self._reader.prompt_tokens(each["group"])
                    row |= {"prompt_tokens": prompt} | _tokens(segments)
                yield row

    def sft(self) -> Iterator[Record]:
        """One row a complete response, whatever its reward."""
        for group, taken in self._choice.groups():
            for each in taken:
                said = self._said(group, each)
                if said is None:
                    self._choice.left_out[UNREADABLE] += 1
                else:
                    yield {"prompt": said[0], "completion": said[1]}

    def preferences(self) -> Iterator[Record]:
        """One row a group that has rewards that differ: its best complete response, its worst."""
        left_out = self._choice.left_out
        for group, taken in self._choice.groups(may_be_cut=True):
            rewarded = [each for each in taken if each["reward"] is not None]
            left_out["without reward"] += len(taken) - len(rewarded)
            pair = _extremes(rewarded)
            if pair is None:
                left_out[UNEQUAL] += len(rewarded)
                continue
            chosen, rejected = (self._said(group, each) for each in pair)
            if chosen is None or rejected is None:
                left_out[UNREADABLE] += len(rewarded)
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
        """What the policy was given, and what followed; `None`: it is no text."""
        begun, prompt = _begun(self._given(group), self._data.assistant_prefix)
        is_chat = not isinstance(prompt, str)
        if self._turns is None:
            text = begun + response["text"]
            return prompt, [{"role": "assistant", "content": text}] if is_chat else text
        said = self._turns.messages(turns_of(self._segments(response)), is_chat=is_chat)
        if not said:  # no messages, or deleted since it was looked at
            return None
        said[0] = said[0] | {"content": begun + said[0]["content"]}
        return prompt, said

    def _given(self, group: Record) -> Text:
        """The prompt as the chat template was given it, or as text."""
        prompt: Text = group["prompt"]
        if isinstance(prompt, str) and not self._data.chat_template:
            return prompt
        return messages_of(Prompt(group["row"], prompt, group["columns"]), self._data)


def _name(response: Record) -> TrajectoryId:
    return TrajectoryId(response["group"], response["member"])


def _begun(prompt: Text, prefix: str | None) -> tuple[str, Text]:
    """What the response had been begun with before the policy went on, and the prompt before it."""
    begun = prefix or ""
    if not isinstance(prompt, str) and prompt[-1]["role"] == "assistant":
        return prompt[-1]["content"] + begun, prompt[:-1]
    return begun, prompt


def _extremes(members: list[Record]) -> tuple[Record, Record] | None:
    """The best response that is complete, and the worst; `None` if no reward is less."""
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
    """Values for each token; `None` where tokens were deleted, as log-probability of an answer."""
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
