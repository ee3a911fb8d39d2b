"""Drafts from history for the requests that vLLM will decode next, and what comes of them.

Holds true: a request has a handle of the drafter's from the first iteration in which it is ready to
decode until it leaves, or another needs its place; the drafter knows which request it drafts for
(prompt and member); what is handed on can be run: it is in the vocabulary, linear, and no longer
than the response may become. Knows no vLLM.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Hashable, Iterable, Mapping
from dataclasses import dataclass

from rhymeflow.engine.base import Request
from rhymeflow.engine.drafter import Drafter, begin, runnable


@dataclass(frozen=True, slots=True)
class Iteration:
    """What an iteration did."""

    rows: int
    """Tokens that it ran."""
    drafted: Mapping[Hashable, int]
    """By request, tokens of these that were a draft."""
    generated: Mapping[Hashable, list[int]]
    """By request, the tokens it has more."""
    seconds: float


class Drafting:
    """One engine's drafter and its handles. An iteration calls `propose`, then `observe`."""

    def __init__(
        self,
        drafter: Drafter,
        *,
        vocabulary: int,
        max_sequences: int,
        clock: Callable[[], float] = time.perf_counter,
    ) -> None:
        self._drafter, self._vocabulary, self._max_sequences = drafter, vocabulary, max_sequences
        self._clock = clock
        self._handles: dict[Hashable, int] = {}
        self._asked: list[Hashable] = []
        self._kv_tokens = 0

    def propose(
        self, ready: list[Request], *, other_rows: int, kv_tokens: int
    ) -> dict[Hashable, list[int]]:
        """Return drafts by request id, of those that get one."""
        self._asked, self._kv_tokens = [request.id for request in ready], kv_tokens
        if not ready:
            return {}
        handles = self._handles_of(ready)
        # One token comes in any case.
        most = [r.sampling.max_new_tokens - len(r.tokens) - 1 for r in ready]
        drafts = self._drafter.propose(handles, most, other_rows=other_rows, kv_tokens=kv_tokens)
        found = {}
        for request, limit, draft in zip(ready, most, drafts, strict=True):
            if draft.tokens and limit:
                found[request.id] = runnable(draft, limit, self._vocabulary).tokens
        return {key: tokens for key, tokens in found.items() if tokens}

    def observe(self, iteration: Iteration) -> None:
        """Learn from what became of it."""
        known = [key for key in self._asked if iteration.generated.get(key)]
        if not known:
            return
        own_rows = sum(1 + iteration.drafted.get(key, 0) for key in known)
        self._drafter.observe(
            [self._handles[key] for key in known],
            [iteration.generated[key] for key in known],
            rows=iteration.rows,
            kv_tokens=self._kv_tokens,
            seconds=iteration.seconds,
            other_rows=iteration.rows - own_rows,
        )

    def end(self, ids: Iterable[Hashable]) -> None:
        """These leave the engine."""
        for key in ids:
            if (handle := self._handles.pop(key, None)) is not None:
                self._drafter.end(handle)

    def _handles_of(self, ready: list[Request]) -> list[int]:
        new = [request for request in ready if request.id not in self._handles]
        # Requests that vLLM preempted wait for room, and others decode in their place.
        surplus = len(self._handles) + len(new) - self._max_sequences
        if surplus > 0:
            decoding = {request.id for request in ready}
            self.end([key for key in self._handles if key not in decoding][:surplus])
        for request in new:
            self._handles[request.id] = begin(self._drafter, request)
        return [self._handles[request.id] for request in ready]
