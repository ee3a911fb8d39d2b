"""The order in which prompts are requested.

`at(number)` is a pure function of (rows, shares, seed, shuffle, number), so one integer resumes it.
The order is by hashes, so it does not depend on the version of a random number generator."""

from __future__ import annotations

import struct
from collections.abc import Iterable, Sequence
from functools import lru_cache, partial

import xxhash

from rhymeflow.data.prompts import Prompt


class PromptStream:
    """An endless sequence of prompts: each row once per epoch, in the source's order or, with
    `shuffle`, in a different order each epoch."""

    def __init__(self, source: Sequence[Prompt], seed: int, shuffle: bool) -> None:
        assert len(source) > 0, "no prompts"
        self._source, self._shuffle = source, shuffle
        self._order = lru_cache(1)(partial(order, len(source), seed))

    def at(self, number: int) -> tuple[int, Prompt]:
        """Return (epoch, prompt) of a request; epochs and requests count from 0."""
        assert number >= 0
        epoch, position = divmod(number, len(self._source))
        return epoch, self._source[self._order(epoch)[position] if self._shuffle else position]


def order(size: int, seed: int, epoch: int) -> list[int]:
    """Return the rows 0 to `size` - 1 in the order of an epoch."""
    return _by_hash(size, f"prompt order {seed} {epoch} ")


def _by_hash(size: int, salt: str) -> list[int]:
    """Sort rows by a 64-bit hash of salt and row; equal hashes keep the rows' order."""
    key = salt.encode()
    hashes = [xxhash.xxh3_64_intdigest(key + struct.pack("<Q", row)) for row in range(size)]
    return sorted(range(size), key=hashes.__getitem__)


BLOCK = 100  # prompts per block; every block has each kind's share


class MixedStream:
    """An endless sequence of prompts of several kinds, each with its own epochs. `kinds[i]` has the
    prompts of a kind, at least one, and `shares[i]` is its relative share."""

    def __init__(
        self, kinds: Iterable[Sequence[Prompt]], shares: Sequence[float], seed: int, shuffle: bool
    ) -> None:
        self._seed, self._counts = seed, counts(shares)
        self._streams = [PromptStream(prompts, seed, shuffle) for prompts in kinds]
        self._kinds_of = lru_cache(1)(self._mixed)

    def at(self, number: int) -> tuple[int, Prompt]:
        """Return (epoch of its kind, prompt) of a request; all count from 0."""
        assert number >= 0
        block, index = divmod(number, BLOCK)
        kinds = self._kinds_of(block)
        kind, before = kinds[index], kinds[:index].count(kinds[index])
        return self._streams[kind].at(block * self._counts[kind] + before)

    def _mixed(self, block: int) -> list[int]:
        """Return the kind of each prompt of a block."""
        kinds = [kind for kind, count in enumerate(self._counts) for _ in range(count)]
        return [kinds[slot] for slot in _by_hash(BLOCK, f"mix {self._seed} {block} ")]


def counts(shares: Sequence[float]) -> list[int]:
    """Return how many prompts of a block are of each kind: at least 1, else near its share."""
    total = sum(shares)
    exact = [share / total * BLOCK for share in shares]
    rounded = [max(1, int(each)) for each in exact]
    while sum(rounded) < BLOCK:
        most_below = max(range(len(rounded)), key=lambda kind: exact[kind] - rounded[kind])
        rounded[most_below] += 1
    while sum(rounded) > BLOCK:  # since some kinds were raised to 1
        most_above = max(
            (kind for kind, count in enumerate(rounded) if count > 1),
            key=lambda kind: rounded[kind] - exact[kind],
        )
        rounded[most_above] -= 1
    return rounded
