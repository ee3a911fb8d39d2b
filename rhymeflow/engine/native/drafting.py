"""Drafts for the sequences that are ready to decode, and what the drafter learns in return.

A sequence has a handle of the drafter's from the first iteration in which it is ready until it
leaves its place. The drafter's own time is counted apart.
"""

from __future__ import annotations

import time

from rhymeflow.engine.drafter import Drafter, begin, runnable
from rhymeflow.engine.native.scheduler import Work
from rhymeflow.engine.native.sequence import Sequence


class Drafting:
    """One engine's drafter and the handles of its sequences.

    An iteration calls `start`, `propose` and, once the tokens are appended, `observe`.
    """

    def __init__(self, drafter: Drafter, *, vocabulary: int) -> None:
        self._drafter = drafter
        self._vocabulary = vocabulary
        self._started = 0.0
        self._kv_tokens = 0

    def start(self) -> None:
        """An iteration begins."""
        self._started = time.perf_counter()

    def propose(self, work: list[Work], kv_tokens: int) -> list[Work]:
        """Return the work with drafts added to that of sequences that are ready to decode."""
        self._kv_tokens = kv_tokens
        places = [i for i, item in enumerate(work) if item.sequence.remaining == 1]
        if not places:
            return work
        before = time.perf_counter()
        ready = [work[i].sequence for i in places]
        max_tokens = [sequence.tokens_left - 1 for sequence in ready]
        drafts = self._drafter.propose(
            [self._handle(sequence) for sequence in ready],
            max_tokens,
            other_rows=sum(item.num_new for item in work) - len(ready),
            kv_tokens=kv_tokens,
        )
        self._started += time.perf_counter() - before
        drafted = list(work)
        for place, most, draft in zip(places, max_tokens, drafts, strict=True):
            if draft.tokens:
                draft = runnable(draft, most, self._vocabulary)
                drafted[place] = Work(work[place].sequence, 1 + len(draft.tokens), draft)
        return drafted

    def observe(self, sequences: list[Sequence], generated: list[list[int]], rows: int) -> None:
        """Tell the drafter what was generated for sequences that have a handle."""
        seconds = time.perf_counter() - self._started
        known = [i for i, sequence in enumerate(sequences) if sequence.handle is not None]
        if known:
            self._drafter.observe(
                [self._handle(sequences[i]) for i in known],
                [generated[i] for i in known],
                rows=rows,
                kv_tokens=self._kv_tokens,
                seconds=seconds,
            )

    def end(self, sequences: list[Sequence]) -> None:
        """These leave the engine, or make way for others."""
        for sequence in sequences:
            if sequence.handle is not None:
                self._drafter.end(sequence.handle)
                sequence.handle = None

    def _handle(self, sequence: Sequence) -> int:
        if sequence.handle is None:
            sequence.handle = begin(self._drafter, sequence.request)
        return sequence.handle
