"""Which tokens run in the next iteration.

- Requests start in the order they came, urgent ones in an order of their own. A started one runs
  until it finishes, is interrupted or makes way for an urgent one; then it is the next to start,
  and of several the one that has run longest.
- At most `max_num_seqs` run at a time; of urgent ones `urgent_places`, and more only while nothing
  else waits.
- One iteration prefills at most `max_prefill_tokens` tokens, in chunks; each sequence that is ready
  to decode decodes in every iteration.
- Of running sequences with one prompt (a group's) one computes it and the others copy it, unless it
  was computed under older weights.
- Every iteration runs at least one token while there is work.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Iterable
from dataclasses import dataclass, field
from typing import NamedTuple

from rhymeflow.engine.native.sequence import Sequence
from rhymeflow.histospec.draft import NONE, Draft

URGENT_SHARE = 0.5
"""Share of the places that urgent requests may take from others: so they are decoded at once, and
training continues beside an evaluation of any size."""


class SequenceWork(NamedTuple):
    """Run the next `num_new` tokens of the sequence that are not cached; the last are its draft."""

    sequence: Sequence
    num_new: int
    draft: Draft = NONE


class PrefixCopy(NamedTuple):
    """Copy the first `length` cached tokens of `donor`, which begins with the same prompt."""

    donor: Sequence
    sequence: Sequence
    length: int


@dataclass(slots=True)
class IterationPlan:
    """One iteration: first the copies, then the work."""

    prefix_copies: list[PrefixCopy] = field(default_factory=list)
    work: list[SequenceWork] = field(default_factory=list)
    evicted: list[Sequence] = field(default_factory=list)
    """Gave their places to urgent ones."""


class Scheduler:
    """The engine's queue and its running sequences."""

    def __init__(self, *, max_num_seqs: int, max_prefill_tokens: int) -> None:
        assert max_num_seqs > 0
        assert max_prefill_tokens > 0
        self.max_num_seqs = max_num_seqs
        self.urgent_places = max(1, int(max_num_seqs * URGENT_SHARE))
        self.max_prefill_tokens = max_prefill_tokens
        self.waiting: deque[Sequence] = deque()
        self.urgent: deque[Sequence] = deque()
        """Those that wait and are urgent."""
        self.running: list[Sequence] = []

    def submit(self, sequence: Sequence) -> None:
        """Put a sequence at the end of its queue."""
        (self.urgent if sequence.request.is_urgent else self.waiting).append(sequence)

    def plan(self) -> IterationPlan:
        """Admit what there is room for and say what runs now.

        A copy counts as done: `cached` is raised here. After the work the caller calls `advance`.
        """
        plan = IterationPlan()
        if self.urgent:
            self._admit_urgent(plan)
        while (self.waiting or self.urgent) and len(self.running) < self.max_num_seqs:
            self.running.append((self.waiting or self.urgent).popleft())
        unready = [sequence for sequence in self.running if sequence.remaining > 1]
        held = self._share(unready, plan) if unready else set()
        budget = self.max_prefill_tokens
        for sequence in self.running:
            if sequence in held:
                continue
            num_new = sequence.remaining
            if num_new > 1:
                num_new = min(num_new, budget)
                budget -= num_new
            if num_new:
                plan.work.append(SequenceWork(sequence, num_new))
        return plan

    def advance(self, work: Iterable[SequenceWork]) -> None:
        """The work was run: its tokens are in the cache, drafts included."""
        for sequence, num_new, _draft in work:
            sequence.cached += num_new

    def remove(self, sequences: Iterable[Sequence]) -> None:
        """Forget sequences that are finished or interrupted, waiting or running."""
        gone = set(sequences)
        self.running = [sequence for sequence in self.running if sequence not in gone]
        if not gone.isdisjoint(self.waiting):
            self.waiting = deque(sequence for sequence in self.waiting if sequence not in gone)
        if not gone.isdisjoint(self.urgent):
            self.urgent = deque(sequence for sequence in self.urgent if sequence not in gone)

    def _admit_urgent(self, plan: IterationPlan) -> None:
        """Start as many as have places; what started last makes way where none is free."""
        others = [sequence for sequence in self.running if not sequence.request.is_urgent]
        free = self.urgent_places - (len(self.running) - len(others))
        for _ in range(min(free, len(self.urgent))):
            if len(self.running) == self.max_num_seqs:
                last = others.pop()
                self.running.remove(last)
                self.waiting.appendleft(last)
                plan.evicted.append(last)
            self.running.append(self.urgent.popleft())

    def _share(self, unready: list[Sequence], plan: IterationPlan) -> set[Sequence]:
        """Plan copies of prompts in the cache; return the sequences that wait for theirs."""
        donors: dict[tuple[int, ...], Sequence] = {}
        for sequence in self.running:
            if sequence.cached >= len(sequence.prompt) - 1 and not sequence.is_mixed:
                donors.setdefault(sequence.prompt, sequence)
        makers: set[tuple[int, ...]] = set()
        held = set()
        # Those that have begun come first, so none waits for a sequence that itself waits.
        for sequence in sorted(unready, key=lambda sequence: sequence.cached == 0):
            length = len(sequence.prompt) - 1
            if sequence.cached >= length or length == 0:
                continue
            donor = donors.get(sequence.prompt)
            if donor is not None and sequence.cached == 0:
                plan.prefix_copies.append(PrefixCopy(donor, sequence, length))
                sequence.cached = length
            elif sequence.prompt in makers and sequence.cached == 0:
                held.add(sequence)
            elif not sequence.is_mixed:
                makers.add(sequence.prompt)
        return held
