"""Which tokens run in the next iteration.

- Requests start in the order they came; urgent ones have a queue of their own. A request runs until
  it finishes, is interrupted or makes way. Those that made way start next, the one that has run
  longest first.
- At most `max_num_seqs` run at a time, at most `urgent_places` of them urgent while others wait.
- They have at most `kv_capacity` tokens in the cache, unless a single one has more. If the next
  tokens do not fit, those that started last make way and lose their cache. A request starts if it
  fits and leaves room for others to grow.
- One iteration prefills at most `max_prefill_tokens` tokens, in chunks; each sequence that is ready
  to decode decodes in every iteration.
- Of running sequences with the same prompt (a group), or the same long beginning of one, one
  computes it and the others copy it, unless it was computed under older weights, or given back
  because of its length.
- Every iteration runs at least one token while there is work."""

from __future__ import annotations

from collections import deque
from collections.abc import Iterable
from dataclasses import dataclass, field
from typing import NamedTuple

import numpy as np

from rhymeflow.engine.native.sequence import Sequence
from rhymeflow.histospec.draft import NONE, Draft
from rhymeflow.utils.prefixes import Prefixes

URGENT_SHARE = 0.5
"""Share of the running sequences that urgent requests may displace: they are decoded at once, and
training continues during an evaluation of any size."""
MIN_SHARED = 32
"""Least tokens with which differing prompts begin alike that are copied and not computed again."""
WATERMARK = 0.01
"""Least share of the cache that a request leaves free when it starts beside others."""


class SequenceWork(NamedTuple):
    """Run the `num_new` tokens of the sequence after the cached ones; its draft comes last."""

    sequence: Sequence
    num_new: int
    draft: Draft = NONE


class PrefixCopy(NamedTuple):
    """Copy the first `length` cached tokens of `donor`, whose prompt begins with the same."""

    donor: Sequence
    sequence: Sequence
    length: int


@dataclass(slots=True)
class IterationPlan:
    """One iteration: first the copies, then the work."""

    prefix_copies: list[PrefixCopy] = field(default_factory=list)
    work: list[SequenceWork] = field(default_factory=list)
    evicted: list[Sequence] = field(default_factory=list)  # sequences that made way
    dropped: list[Sequence] = field(default_factory=list)
    """Sequences whose cached tokens are given up. The caller releases their slots first."""
    room: int = 0  # tokens that the cache still has room for after the work

    def rows(self) -> tuple[int, int, int]:
        """Return the rows of sequences that decode, drafts included; those of prompts, and of a
        cache that is computed anew; and the tokens in the cache before."""
        decoded = sum(item.num_new for item in self.work if item.num_new == 1 or item.draft.tokens)
        every = sum(item.num_new for item in self.work)
        return decoded, every - decoded, sum(item.sequence.cached for item in self.work)


class Scheduler:
    """The engine's queue and its running sequences."""

    def __init__(self, *, max_num_seqs: int, max_prefill_tokens: int, kv_capacity: int) -> None:
        assert max_num_seqs > 0
        assert max_prefill_tokens > 0
        self.max_num_seqs, self.kv_capacity = max_num_seqs, kv_capacity
        self.urgent_places = max(1, int(max_num_seqs * URGENT_SHARE))
        self.max_prefill_tokens = max_prefill_tokens
        self.waiting: deque[Sequence] = deque()
        self.urgent: deque[Sequence] = deque()  # waiting urgent sequences; `waiting` has the others
        self.running: list[Sequence] = []

    def submit(self, sequence: Sequence) -> None:
        """Put a sequence at the end of its queue."""
        (self.urgent if sequence.request.is_urgent else self.waiting).append(sequence)

    def plan(self) -> IterationPlan:
        """Admit sequences while there is room; return what runs now. Copies count as done: `cached`
        is raised here. After the work the caller calls `advance`."""
        plan = IterationPlan()
        if self.urgent:
            self._admit_urgent(plan)
        self._make_room(plan)
        if not plan.dropped:
            self._admit(plan)
        beginning = [each for each in self.running if each.cached < len(each.prompt) - 1]
        held_back = self._share(beginning, plan) if beginning else set()
        budget = self.max_prefill_tokens
        for sequence in self.running:
            if sequence in held_back:
                continue
            num_new = sequence.remaining
            if num_new > 1:
                num_new = min(num_new, budget)
                budget -= num_new
            if num_new:
                plan.work.append(SequenceWork(sequence, num_new))
        return plan

    def advance(self, work: Iterable[SequenceWork]) -> None:
        """Record that the work has run: its tokens, drafts included, are cached."""
        for sequence, num_new, _draft in work:
            sequence.cached += num_new

    def remove(self, sequences: Iterable[Sequence]) -> None:
        """Remove finished or interrupted sequences, waiting or running."""
        removed = set(sequences)
        self.running = [sequence for sequence in self.running if sequence not in removed]
        if not removed.isdisjoint(self.waiting):
            self.waiting = deque(sequence for sequence in self.waiting if sequence not in removed)
        if not removed.isdisjoint(self.urgent):
            self.urgent = deque(sequence for sequence in self.urgent if sequence not in removed)

    def _admit_urgent(self, plan: IterationPlan) -> None:
        """Start urgent sequences up to `urgent_places`; if none is free, the last started of the
        others makes way."""
        others = [sequence for sequence in self.running if not sequence.request.is_urgent]
        free = self.urgent_places - (len(self.running) - len(others))
        for _ in range(min(free, len(self.urgent))):
            if len(self.running) == self.max_num_seqs:
                last = others.pop()
                self.running.remove(last)
                self.waiting.appendleft(last)
                plan.evicted.append(last)
            self.running.append(self.urgent.popleft())

    def _make_room(self, plan: IterationPlan) -> None:
        """Drop caches until all that runs can be cached, with the next token of each. Of waiting
        sequences, some made way for urgent ones and kept theirs: those go first."""
        held = [each for each in self.waiting if each.cached]
        used = sum(each.held for each in held)
        plan.room = self.kv_capacity - used - sum(each.needed for each in self.running)
        while plan.room < 0 and (held or len(self.running) > 1):
            if held:
                last = held.pop()
                plan.room += last.held
            else:
                last = self._last_started()
                self.running.remove(last)
                (self.urgent if last.request.is_urgent else self.waiting).appendleft(last)
                plan.evicted.append(last)
                plan.room += last.needed
            last.cached = 0
            plan.dropped.append(last)

    def _last_started(self) -> Sequence:
        """Return the running sequence that makes way first; an urgent one is the last to."""
        others = [each for each in self.running if not each.request.is_urgent]
        return (others or self.running)[-1]

    def _admit(self, plan: IterationPlan) -> None:
        """Start sequences, in order, while there is room for them and for what runs to grow."""
        margin = int(WATERMARK * self.kv_capacity)
        while (self.waiting or self.urgent) and len(self.running) < self.max_num_seqs:
            queue = self.waiting or self.urgent
            more = queue[0].needed - queue[0].held
            if self.running and more + max(margin, len(self.running)) > plan.room:
                return
            plan.room -= more
            self.running.append(queue.popleft())

    def _share(self, beginning: list[Sequence], plan: IterationPlan) -> set[Sequence]:
        """Plan copies of cached beginnings of prompts to sequences without the whole of theirs;
        return those that wait."""
        donors, in_progress = Prefixes[Sequence](), Prefixes[Sequence]()
        for sequence in self.running:
            if _shareable(sequence):
                donors.add(_tokens(sequence)[: sequence.cached], sequence)
        held_back = set()
        # Begun sequences come first, so none waits for a sequence that itself waits.
        for sequence in sorted(beginning, key=lambda sequence: sequence.cached == 0):
            tokens = _tokens(sequence)
            if sequence.cached == 0:
                donor, common = _limited(*donors.longest(tokens[:-1]), sequence)
                _, promised = _limited(*in_progress.longest(tokens[:-1]), sequence)
                if promised - common >= (MIN_SHARED if common else 1):
                    held_back.add(sequence)
                    continue
                if donor is not None:
                    plan.prefix_copies.append(PrefixCopy(donor, sequence, common))
                    sequence.cached = common
            if not sequence.is_mixed and sequence.cached < len(tokens) - 1:
                in_progress.add(tokens, sequence)
        return held_back


def _tokens(sequence: Sequence) -> np.ndarray:
    """Return the prompt as an array, which is made once."""
    if sequence.prompt_tokens is None:
        sequence.prompt_tokens = np.array(sequence.prompt, dtype=np.int64)
    return sequence.prompt_tokens


def _shareable(sequence: Sequence) -> bool:
    """Return whether others can copy what it has cached of its prompt."""
    if sequence.is_mixed or not sequence.cached:
        return False
    has_whole = sequence.cached >= len(sequence.prompt) - 1 and sequence.has_prompt
    return has_whole or sequence.held == sequence.cached


def _limited(
    other: Sequence | None, common: int, sequence: Sequence
) -> tuple[Sequence | None, int]:
    """Leave out a beginning that is too short, or of which the other has given a part back; that of
    an equal prompt, but its last token, is neither."""
    if other is None:
        return None, 0
    if common == len(sequence.prompt) - 1 and len(other.prompt) == len(sequence.prompt):
        return other, common
    is_whole = other.held == other.cached
    return (other, common) if common >= MIN_SHARED and is_whole else (None, 0)
