"""Caches of responses whose turn is over, kept until the next one comes or their room is needed.

Who has waited longest loses its cache first; a cache is used again only for the very tokens it is
of, under the weights it is of.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Hashable

from rhymeflow.engine.base import Request
from rhymeflow.engine.native.cache import KVCache
from rhymeflow.engine.native.sequence import Sequence


class KeptCaches:
    """Sequences that do not run and hold a slot of `cache`, by request id; at most so many."""

    def __init__(self, cache: KVCache, max_sequences: int) -> None:
        self._cache, self._max_sequences = cache, max_sequences
        self._sequences: OrderedDict[Hashable, Sequence] = OrderedDict()
        self.num_tokens = 0

    def put(self, sequence: Sequence) -> None:
        """Its turn is over: keep its slot."""
        assert sequence.slot is not None
        self._sequences[sequence.request.id] = sequence
        self.num_tokens += sequence.cached

    def take(self, request: Request, ids: list[int]) -> Sequence | None:
        """The sequence whose cache a request of these tokens can go on with, which is given up."""
        kept = self._sequences.pop(request.id, None)
        if kept is None:
            return None
        self.num_tokens -= kept.cached
        kept.cached = min(kept.cached, len(ids) - 1)  # at least one is run, to sample after it
        if ids[: kept.cached] == kept.ids[: kept.cached]:
            return kept
        self._cache.release(kept.slot)
        return None

    def fit(self, room: int) -> None:
        """Give up as many as do not fit into so many tokens, or are too many."""
        while self._sequences and (
            self.num_tokens > room or len(self._sequences) > self._max_sequences
        ):
            _, sequence = self._sequences.popitem(last=False)
            self.num_tokens -= sequence.cached
            self._cache.release(sequence.slot)

    def clear(self) -> None:
        """The weights have changed."""
        self.fit(-1)
