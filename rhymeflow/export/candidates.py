"""The responses of a run without their contents, and which of them are exported.

Holds true: groups come in ascending order, each whole; no read transaction outlives a part of the
run, and no more than a part is held in memory, but for the choice of `best`; groups that begin
while it is read are left to the next time. Each response is taken, or counted under the one reason
for which it is left out.
"""

from __future__ import annotations

import heapq
from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass
from typing import NamedTuple

from rhymeflow.core.types import FinishReason, GroupId, TrajectoryId, Version
from rhymeflow.store.reader import TrajectoryReader

GROUPS_AT_ONCE = 512
"""A part of the run."""

UNFINISHED = "unfinished"
"""What a response is called that no ending has reached yet, as in `summary.json`."""

NO_TEXT = "whose text was deleted (run.keep_tokens) or never made"

ENDINGS = ("consumed", "filtered", "aborted", UNFINISHED)

_CANDIDATES = """SELECT r.group_id, r.member, g.row, r.first_version, r.reason, r.reward, r.trained,
        r.ending, t.text IS NOT NULL
    FROM responses r JOIN groups g USING (group_id)
    LEFT JOIN trajectories t USING (group_id, member)
    WHERE r.group_id BETWEEN ? AND ? ORDER BY r.group_id, r.member"""


class Candidate(NamedTuple):
    """A response of which a token was stored."""

    group: GroupId
    member: int
    row: int
    """Of its prompt in the data."""
    first_version: Version
    """The least version of its tokens."""
    reason: FinishReason | None
    """`None`: it is not complete."""
    reward: float | None
    trained: Version | None
    """The batch it was trained on in."""
    ending: str | None
    """What became of it; of a consumed group, members that were not needed are `aborted`."""
    has_text: bool

    @property
    def trajectory(self) -> TrajectoryId:
        """Its name."""
        return TrajectoryId(self.group, self.member)

    @property
    def is_cut(self) -> bool:
        """Whether it was ended before the policy had ended it."""
        return self.reason in ("length", "finished_early")


@dataclass(frozen=True)
class Filters:
    """Which responses are wanted; the defaults want all."""

    min_reward: float | None = None
    """This reward or a greater one."""
    steps: tuple[float, float] | None = None
    """Trained on in one of these steps, the first and the last included; steps count from 1."""
    endings: tuple[str, ...] = ()
    """Some of `ENDINGS`; none: any."""
    best: int | None = None
    """The so many with the greatest rewards of each row of the data."""

    def want(self, candidate: Candidate) -> bool:
        """Whether it is wanted, `best` aside."""
        reward, trained = candidate.reward, candidate.trained
        if self.min_reward is not None and (reward is None or reward < self.min_reward):
            return False
        if self.endings and (candidate.ending or UNFINISHED) not in self.endings:
            return False
        if self.steps is not None:
            return trained is not None and self.steps[0] <= trained + 1 <= self.steps[1]
        return True


def groups(reader: TrajectoryReader) -> Iterator[list[Candidate]]:
    """The responses of each group that had any when this began."""
    ((last,),) = reader.query("SELECT COALESCE(MAX(group_id), -1) FROM groups")
    for start in range(0, last + 1, GROUPS_AT_ONCE):
        end = min(start + GROUPS_AT_ONCE - 1, last)
        found: dict[GroupId, list[Candidate]] = {}
        for row in reader.query(_CANDIDATES, start, end):
            found.setdefault(row[0], []).append(Candidate(*row))
        yield from found.values()


class Choice:
    """Takes responses by `filters`, those that are of use, and counts the others by the reason.

    `is_text_needed`: whether one without its text, or cut short, is of no use.
    """

    def __init__(
        self, reader: TrajectoryReader, filters: Filters, *, is_text_needed: bool = False
    ) -> None:
        self.left_out: Counter[str] = Counter()
        """Responses by why they were left out."""
        self.seen = 0
        """Responses that were looked at."""
        self._filters, self._is_text_needed = filters, is_text_needed
        self._best = None if filters.best is None else self._best_of_rows(reader, filters.best)

    def of_group(self, members: list[Candidate], *, may_be_cut: bool = False) -> list[Candidate]:
        """Return those of a group that are taken; `may_be_cut`: also if they were cut short."""
        taken = []
        for each in members:
            why = self._why_not(each, may_be_cut)
            if why is None and self._best is not None and each.trajectory not in self._best:
                why = "not wanted"
            if why is None:
                taken.append(each)
            else:
                self.left_out[why] += 1
        self.seen += len(members)
        return taken

    def _why_not(self, each: Candidate, may_be_cut: bool) -> str | None:
        if not self._filters.want(each):
            return "not wanted"
        if not self._is_text_needed:
            return None
        if each.reason is None:
            return "not complete"
        if not each.has_text:
            return NO_TEXT
        return "cut short" if each.is_cut and not may_be_cut else None

    def _best_of_rows(self, reader: TrajectoryReader, number: int) -> set[TrajectoryId]:
        """Of equal rewards those of newer groups, which a better policy made."""
        heaps: dict[int, list[tuple[float, int, int]]] = {}
        for members in groups(reader):
            for each in members:
                if each.reward is None or self._why_not(each, False) is not None:
                    continue
                heap = heaps.setdefault(each.row, [])
                heapq.heappush(heap, (each.reward, each.group, -each.member))
                if len(heap) > number:
                    heapq.heappop(heap)
        return {TrajectoryId(g, -m) for heap in heaps.values() for _, g, m in heap}


__all__ = ["ENDINGS", "UNFINISHED", "Candidate", "Choice", "Filters", "groups"]
