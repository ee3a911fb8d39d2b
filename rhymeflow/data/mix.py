"""The order in which prompts of several kinds are requested, where each kind has a share.

Holds true: `at(number)` is a pure function of (rows of each kind, shares, seed, shuffle, number),
so a run is resumed by one integer; of each `BLOCK` prompts every kind has its share, rounded to
whole prompts and at least one; each kind goes through its own rows, epoch after epoch.
"""

from __future__ import annotations

import struct
from collections.abc import Sequence

import xxhash

from rhymeflow.data.prompts import Prompt, PromptSource
from rhymeflow.data.stream import PromptStream

BLOCK = 100


class MixedStream:
    """An endless sequence of prompts.

    Args:
        source: all prompts.
        kinds: of each kind the rows that are of it, at least one.
        shares: of each kind, how many of the prompts are to be of it, relative to the others.
        seed: of the run.
        shuffle: `False` keeps each kind's order in every epoch.
    """

    def __init__(
        self,
        source: PromptSource,
        kinds: Sequence[Sequence[int]],
        shares: Sequence[float],
        seed: int,
        shuffle: bool,
    ) -> None:
        assert len(kinds) == len(shares) <= BLOCK
        self._seed, self._counts = seed, counts(shares)
        self._streams = [PromptStream(_Rows(source, rows), seed, shuffle) for rows in kinds]
        self._block = -1
        self._order: list[int] = []

    def at(self, number: int) -> tuple[int, Prompt]:
        """Return (epoch of its kind, prompt) of the request with this number, from 0."""
        assert number >= 0
        block, place = divmod(number, BLOCK)
        if block != self._block:  # remembered, not state: the same block gives the same order
            self._block, self._order = block, self._ordered(block)
        kind = self._order[place]
        before = self._order[:place].count(kind)
        return self._streams[kind].at(block * self._counts[kind] + before)

    def _ordered(self, block: int) -> list[int]:
        """The kinds of a block's prompts."""
        kinds = [kind for kind, count in enumerate(self._counts) for _ in range(count)]
        key = f"mix {self._seed} {block} ".encode()
        hashes = [xxhash.xxh3_64_intdigest(key + struct.pack("<Q", slot)) for slot in range(BLOCK)]
        return [kinds[slot] for slot in sorted(range(BLOCK), key=hashes.__getitem__)]


def counts(shares: Sequence[float]) -> list[int]:
    """Of each kind, its prompts in a block: whole numbers, at least 1, as near as may be."""
    total = sum(shares)
    exact = [share / total * BLOCK for share in shares]
    found = [max(1, int(each)) for each in exact]
    while sum(found) < BLOCK:
        short = max(range(len(found)), key=lambda kind: exact[kind] - found[kind])
        found[short] += 1
    while sum(found) > BLOCK:  # those that got one for nothing took it from the largest
        large = max(
            (kind for kind, count in enumerate(found) if count > 1),
            key=lambda kind: found[kind] - exact[kind],
        )
        found[large] -= 1
    return found


class _Rows:
    """Some rows of a source, in their order."""

    def __init__(self, source: PromptSource, rows: Sequence[int]) -> None:
        self._source, self._rows = source, rows

    def __len__(self) -> int:
        return len(self._rows)

    def __getitem__(self, place: int, /) -> Prompt:
        return self._source[self._rows[place]]
