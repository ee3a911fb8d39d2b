"""The order in which prompts are requested.

Holds true: `at(number)` is a pure function of (number of prompts, seed, shuffle, number), so a run
is resumed by one integer; each epoch has every row exactly once; the order is made of hashes
written out here, so it does not change with the version of any random number library.
"""

from __future__ import annotations

import struct

import xxhash

from rhymeflow.data.prompts import Prompt, PromptSource


class PromptStream:
    """An endless sequence of prompts: epoch after epoch, each in an order of its own.

    Args:
        source: at least one prompt.
        seed: of the run; two seeds give unrelated orders.
        shuffle: `False` keeps the source's order in every epoch.
    """

    def __init__(self, source: PromptSource, seed: int, shuffle: bool) -> None:
        assert len(source) > 0, "no prompts"
        self._source = source
        self._seed = seed
        self._shuffle = shuffle
        self._epoch = -1
        self._order: list[int] = []

    def at(self, number: int) -> tuple[int, Prompt]:
        """Return (epoch, prompt) of the request with this number; both count from 0."""
        assert number >= 0
        epoch, position = divmod(number, len(self._source))
        if not self._shuffle:
            return epoch, self._source[position]
        if epoch != self._epoch:  # remembered, not state: the same epoch gives the same order
            self._epoch, self._order = epoch, order(len(self._source), self._seed, epoch)
        return epoch, self._source[self._order[position]]


def order(size: int, seed: int, epoch: int) -> list[int]:
    """Sort rows by a 64-bit hash of (seed, epoch, row); equal hashes keep the rows' order."""
    key = f"prompt order {seed} {epoch} ".encode()
    hashes = [xxhash.xxh3_64_intdigest(key + struct.pack("<Q", row)) for row in range(size)]
    return sorted(range(size), key=hashes.__getitem__)
