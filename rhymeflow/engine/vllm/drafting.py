"""Drafts from history for the requests that vLLM will decode next, and what comes of them.

A request has a handle of the drafter's from the first iteration in which it is ready to decode
until it leaves, or another needs its place. What is handed on can be run: it is in the vocabulary,
linear, and no longer than the response may become.
"""

from __future__ import annotations

from collections.abc import Hashable, Iterable, Mapping

from rhymeflow.engine.base import Request
from rhymeflow.engine.drafter import Drafter, begin, runnable


class Drafting:
    """One engine's drafter and its handles. An iteration calls `propose`, then `observe`."""

    def __init__(self, drafter: Drafter, *, vocabulary: int, max_sequences: int) -> None:
        self._drafter, self._vocabulary, self._max_sequences = drafter, vocabulary, max_sequences
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

    def observe(
        self,
        drafted: Mapping[Hashable, int],
        generated: Mapping[Hashable, list[int]],
        *,
        rows: int,
        seconds: float,
    ) -> None:
        """Learn from an iteration of `rows` tokens: by request, its drafted tokens that were among
        them, and the tokens that it has more."""
        known = [key for key in self._asked if generated.get(key)]
        if not known:
            return
        own_rows = sum(1 + drafted.get(key, 0) for key in known)
        self._drafter.observe(
            [self._handles[key] for key in known],
            [generated[key] for key in known],
            rows=rows,
            kv_tokens=self._kv_tokens,
            seconds=seconds,
            other_rows=rows - own_rows,
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
