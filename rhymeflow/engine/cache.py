"""Keys and values of running sequences, in shelves of slots of one capacity.

A sequence has a slot on the shelf with the least capacity that holds it, and moves to the next one
when it outgrows it: a token is copied at most a few times, memory stays within twice what is
needed, and sequences of nearly one length lie side by side. That is what lets a decode step attend
shelf by shelf in a few matrix products without copying keys and values and without paying the
longest sequence's length for all.

Holds true: the slots of a shelf that are in use are its first ones (a freed one is filled by the
last); what lies beyond a sequence's length is finite (zero, or left over), so masking it with
weight 0 is exact. Knows nothing of tokens, requests or attention.
"""

from __future__ import annotations

import torch
from torch import Tensor

FIRST_CAPACITY = 256
"""Tokens per slot of the smallest shelf; it doubles from shelf to shelf. Finer steps mean less
padding but more calls: a shelf in use costs a decode step of 30 layers about 3 ms, as much as all
the padding of 32 sequences of 40 to 256 tokens on one shelf."""

FIRST_SLOTS = 4
"""Slots a shelf begins with; it doubles."""


class Slot:
    """A sequence's place. `length` tokens of it are kept when it moves."""

    __slots__ = ("index", "length", "shelf")

    def __init__(self, shelf: Shelf, index: int, length: int) -> None:
        self.shelf = shelf
        self.index = index
        self.length = length


class Shelf:
    """Slots of one capacity: `kv` is [layers, 2 (keys, values), slots, G, capacity, D].

    `flat_keys` and `flat_values` are views of it, per layer [slots * G * capacity, D].
    """

    def __init__(self, capacity: int, empty: Tensor) -> None:
        self.capacity = capacity
        self.slots: list[Slot] = []
        self._set(empty)

    def add(self, length: int) -> Slot:
        """Take the first free slot, doubling the shelf if there is none."""
        layers, two, num_slots, *rest = self.kv.shape
        if len(self.slots) == num_slots:
            grown = self.kv.new_zeros(layers, two, max(FIRST_SLOTS, 2 * num_slots), *rest)
            grown[:, :, :num_slots] = self.kv
            self._set(grown)
        slot = Slot(self, len(self.slots), length)
        self.slots.append(slot)
        return slot

    def remove(self, slot: Slot) -> None:
        """Free a slot; the last one in use takes its place."""
        last = self.slots.pop()
        if last is not slot:
            self.kv[:, :, slot.index, :, : last.length] = self.kv[
                :, :, last.index, :, : last.length
            ]
            last.index = slot.index
            self.slots[last.index] = last

    def _set(self, kv: Tensor) -> None:
        self.kv = kv
        keys, values = kv.flatten(2, 4).unbind(1)
        self.flat_keys, self.flat_values = keys.unbind(0), values.unbind(0)


class KVCache:
    """All shelves of one model."""

    def __init__(
        self,
        *,
        num_layers: int,
        num_kv_heads: int,
        head_dim: int,
        dtype: torch.dtype,
        device: torch.device,
    ) -> None:
        self._sizes = (num_layers, num_kv_heads, head_dim)
        self._dtype, self._device = dtype, device
        self.shelves: dict[int, Shelf] = {}

    def reserve(self, slot: Slot | None, length: int) -> Slot:
        """Return a slot for `length` tokens with the content of `slot`: itself, or a larger one."""
        if slot is not None and length <= slot.shelf.capacity:
            slot.length = max(slot.length, length)
            return slot
        new = self._shelf(capacity_for(length)).add(length)
        if slot is not None:
            self.copy(slot, new, slot.length)
            self.release(slot)
        return new

    def copy(self, source: Slot, target: Slot, length: int) -> None:
        """Copy the first `length` tokens."""
        target.shelf.kv[:, :, target.index, :, :length] = source.shelf.kv[
            :, :, source.index, :, :length
        ]

    def gather(self, slot: Slot, start: int, places: list[int]) -> None:
        """Move the tokens at `places`, all of them at `start` or later, to `start` and on."""
        kv = slot.shelf.kv[:, :, slot.index]
        kv[:, :, :, start : start + len(places)] = kv[:, :, :, places]

    def release(self, slot: Slot) -> None:
        """Give a slot back."""
        slot.shelf.remove(slot)

    def _shelf(self, capacity: int) -> Shelf:
        if capacity not in self.shelves:
            layers, kv_heads, head_dim = self._sizes
            empty = torch.zeros(
                layers, 2, 0, kv_heads, capacity, head_dim, dtype=self._dtype, device=self._device
            )
            self.shelves[capacity] = Shelf(capacity, empty)
        return self.shelves[capacity]


def capacity_for(length: int) -> int:
    """The least shelf capacity that holds `length` tokens."""
    capacity = FIRST_CAPACITY
    while capacity < length:
        capacity *= 2
    return capacity


__all__ = ["KVCache", "Shelf", "Slot", "capacity_for"]
