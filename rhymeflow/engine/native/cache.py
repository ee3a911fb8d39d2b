"""The KV cache: keys and values of sequences, in size classes of slots with the same capacity.

A sequence moves to the next class when it outgrows its slot: a token is copied at most a few times,
memory stays within twice what is needed, and sequences of similar length lie side by side and are
attended to in a few products. The used slots of a class come first; values beyond a sequence's
length are finite, so masking them with weight 0 is exact.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Hashable
from dataclasses import dataclass
from typing import NamedTuple

import torch
from torch import Tensor

from rhymeflow.engine.base import Request
from rhymeflow.engine.native.sequence import Sequence
from rhymeflow.models.attention import Shape

FIRST_CAPACITY = 256
"""Tokens per slot of the smallest size class; it doubles from class to class. Finer steps save
padding but cost calls: about 3 ms per class and decode step of 30 layers, as much as all the
padding of 32 sequences of 40 to 256 tokens in one size class."""

FIRST_SLOTS = 4
"""Initial slots of a size class; doubled whenever all are used."""


@dataclass(slots=True, eq=False)
class Slot:
    """A sequence's place in a size class; when it moves, its first `length` tokens are copied."""

    size_class: SizeClass
    index: int
    length: int


class SizeClass:
    """Slots of one capacity: `kv` is [layers, 2 (keys, values), slots, G, capacity, D].

    `flat_keys` and `flat_values` are views of it, per layer [slots * G * capacity, D].
    """

    def __init__(self, capacity: int, empty: Tensor) -> None:
        self.capacity = capacity
        self.shape = Shape(len(empty), empty.shape[3], empty.shape[5])
        self.slots: list[Slot] = []
        self._set(empty)

    def add(self, length: int) -> Slot:
        """Take the first free slot, doubling the size class if there is none."""
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
            moved = self.kv[:, :, last.index, :, : last.length]
            self.kv[:, :, slot.index, :, : last.length] = moved
            last.index = slot.index
            self.slots[last.index] = last

    def _set(self, kv: Tensor) -> None:
        self.kv = kv
        keys, values = kv.flatten(2, 4).unbind(1)
        self.flat_keys, self.flat_values = keys.unbind(0), values.unbind(0)


class CacheSpan(NamedTuple):
    """One sequence's part of the packed row: `num_new` tokens after `cached` ones.

    With `parents`, the last `len(parents)` tokens are a draft tree, whose root is the token before
    them. `parents` has, for each, the index in the tree of its parent, or -1 if that is the root.
    """

    slot: Slot
    cached: int
    num_new: int
    parents: list[int] | None = None


class KVCache:
    """All size classes of one model."""

    def __init__(self, shape: Shape, dtype: torch.dtype, device: torch.device) -> None:
        self._shape, self._dtype, self._device = shape, dtype, device
        self.size_classes: dict[int, SizeClass] = {}

    def reserve(self, slot: Slot | None, length: int) -> Slot:
        """Return `slot` if it holds `length` tokens, else a larger one with its content."""
        if slot is not None and length <= slot.size_class.capacity:
            slot.length = max(slot.length, length)
            return slot
        new = self._size_class(capacity_for(length)).add(length)
        if slot is not None:
            self.copy(slot, new, slot.length)
            self.release(slot)
        return new

    def copy(self, source: Slot, target: Slot, length: int) -> None:
        """Copy the first `length` tokens."""
        copied = source.size_class.kv[:, :, source.index, :, :length]
        target.size_class.kv[:, :, target.index, :, :length] = copied

    def gather(self, slot: Slot, start: int, positions: list[int]) -> None:
        """Move the tokens at `positions`, all at `start` or later, to `start` onwards."""
        kv = slot.size_class.kv[:, :, slot.index]
        kv[:, :, :, start : start + len(positions)] = kv[:, :, :, positions]

    def release(self, slot: Slot) -> None:
        """Free a slot."""
        slot.size_class.remove(slot)

    def _size_class(self, capacity: int) -> SizeClass:
        if capacity not in self.size_classes:
            layers, kv_heads, head_dim = self._shape
            shape = layers, 2, 0, kv_heads, capacity, head_dim
            empty = torch.zeros(shape, dtype=self._dtype, device=self._device)
            self.size_classes[capacity] = SizeClass(capacity, empty)
        return self.size_classes[capacity]


def capacity_for(length: int) -> int:
    """Return the capacity of the smallest size class that holds `length` tokens."""
    capacity = FIRST_CAPACITY
    while capacity < length:
        capacity *= 2
    return capacity


class KeptCaches:
    """Sequences between two turns, by request id, that keep their slot until the next turn comes or
    the room is needed. At most `max_sequences`; the oldest are dropped first.

    A cache is reused only for the tokens and the weights that it was computed from.
    """

    def __init__(self, cache: KVCache, max_sequences: int) -> None:
        self._cache, self._max_sequences = cache, max_sequences
        self._sequences: OrderedDict[Hashable, Sequence] = OrderedDict()
        self.num_tokens = 0

    def put(self, sequence: Sequence) -> None:
        """Keep the slot of a sequence whose turn is over."""
        assert sequence.slot is not None
        self._sequences[sequence.request.id] = sequence
        self.num_tokens += sequence.cached

    def take(self, request: Request, ids: list[int]) -> Sequence | None:
        """Remove the request's sequence; return it if these tokens can continue its cache."""
        kept = self._sequences.pop(request.id, None)
        if kept is None:
            return None
        self.num_tokens -= kept.cached
        kept.cached = min(kept.cached, len(ids) - 1)  # run at least one, to sample after it
        if ids[: kept.cached] == kept.ids[: kept.cached]:
            return kept
        self._cache.release(kept.slot)
        return None

    def fit(self, room: int) -> None:
        """Drop the oldest until the others fit into `room` tokens and `max_sequences`."""
        while self._sequences and (
            self.num_tokens > room or len(self._sequences) > self._max_sequences
        ):
            _, sequence = self._sequences.popitem(last=False)
            self.num_tokens -= sequence.cached
            self._cache.release(sequence.slot)

    def clear(self) -> None:
        """Drop all of them: the weights have changed."""
        self.fit(-1)  # too little room even for sequences without tokens
