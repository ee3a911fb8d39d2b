"""The KV cache: keys and values of sequences, in size classes of slots with the same capacity.

A sequence moves to the next class when it outgrows its slot: a token is copied at most a few times,
memory stays within twice what is needed, and sequences of similar length lie side by side and are
attended to in a few products. A full slot first gives back the positions that no layer sees any
more. The used slots of a class come first; values beyond a sequence's length are finite, so masking
them with weight 0 is exact."""

from __future__ import annotations

import math
from collections import OrderedDict
from collections.abc import Hashable
from dataclasses import dataclass, replace
from typing import Any, NamedTuple

import torch
from torch import Tensor

from rhymeflow.engine.base import Request
from rhymeflow.engine.native.sequence import Sequence
from rhymeflow.models.attention import Reach, Shape

FIRST_CAPACITY = 256
"""Tokens per slot of the smallest size class; it doubles from class to class. Finer steps save
padding but cost calls: about 3 ms per class and decode step of 30 layers, as much as all the
padding of 32 sequences of 40 to 256 tokens in one size class."""

FIRST_SLOTS = 4  # initial slots of a size class; doubled whenever all are used


STEP = 32  # positions are given back in multiples of this, so that sums over keys keep their order


@dataclass(slots=True, eq=False)
class Slot:
    """A sequence's place in a size class, for its tokens from position `start` on; when another
    slot is freed, the first `length` of them may be moved."""

    size_class: SizeClass
    index: int
    length: int
    start: int = 0


class SizeClass:
    """Slots of one capacity: `kv` is [layers, 2 (keys, values), slots, G, capacity, D]. `flat_keys`
    and `flat_values` are views of it, per layer [slots * G * capacity, D]."""

    def __init__(self, capacity: int, empty: Tensor, reach: Reach) -> None:
        self.capacity = capacity
        self.shape = Shape(len(empty), empty.shape[3], empty.shape[5], reach)
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
    """One sequence's part of the packed row: `num_new` tokens after `cached` ones in its slot. With
    `parents`, the last `len(parents)` tokens are a draft tree, whose root is the token before them.
    `parents` has, for each, the index in the tree of its parent, or -1 if that is the root."""

    slot: Slot
    cached: int
    num_new: int
    parents: list[int] | None = None


class KVCache:
    """All size classes of one model."""

    def __init__(self, shape: Shape, dtype: torch.dtype, device: torch.device) -> None:
        self._shape, self._dtype, self._device = shape, dtype, device
        self.size_classes: dict[int, SizeClass] = {}

    def reserve(self, slot: Slot | None, cached: int, num_new: int) -> Slot:
        """Return `slot`, or another with its content, with room for `num_new` tokens after the
        first `cached` of the sequence."""
        end = cached + num_new
        if slot is None:
            return self._size_class(capacity_for(end)).add(end)
        if not cached:
            slot.start = 0
        if end - slot.start > slot.size_class.capacity:
            slot = self._with_room(slot, cached, end)
        slot.length = max(slot.length, end - slot.start)
        return slot

    def _with_room(self, slot: Slot, cached: int, end: int) -> Slot:
        """Give back what no later token sees, and keep the rest where there is room up to `end`."""
        first = max(slot.start, self.first_kept(cached))
        kv = slot.size_class.kv[:, :, slot.index, :, first - slot.start : cached - slot.start]
        size_class = self._size_class(capacity_for(end - first))
        new = slot
        if size_class is slot.size_class:
            kv = kv.clone()  # source and target overlap
        else:
            new = size_class.add(end - first)
        new.size_class.kv[:, :, new.index, :, : cached - first] = kv
        if new is not slot:
            self.release(slot)
        new.start, new.length = first, end - first
        return new

    def first_kept(self, cached: int) -> int:
        """Return the first position that is kept if the next token is at position `cached`."""
        unit = math.lcm(STEP, self._shape.reach.chunk or 1)
        return self._shape.reach.first(cached) // unit * unit

    def copied(self, source: Slot, slot: Slot | None, length: int) -> Slot:
        """Return a slot with what `source` has of the first `length` tokens, in place of `slot`."""
        if slot is not None:
            self.release(slot)
        rows = length - source.start
        new = self._size_class(capacity_for(rows)).add(rows)
        new.start = source.start
        copied = source.size_class.kv[:, :, source.index, :, :rows]
        new.size_class.kv[:, :, new.index, :, :rows] = copied
        return new

    def gather(self, slot: Slot, start: int, positions: list[int]) -> None:
        """Move the tokens at `positions`, all at `start` or later, to `start` onwards."""
        kv, start = slot.size_class.kv[:, :, slot.index], start - slot.start
        rows = [position - slot.start for position in positions]
        kv[:, :, :, start : start + len(rows)] = kv[:, :, :, rows]

    def release(self, slot: Slot) -> None:
        """Free a slot."""
        slot.size_class.remove(slot)

    def _size_class(self, capacity: int) -> SizeClass:
        if capacity not in self.size_classes:
            layers, kv_heads, head_dim, reach = self._shape
            shape = layers, 2, 0, kv_heads, capacity, head_dim
            empty = torch.zeros(shape, dtype=self._dtype, device=self._device)
            self.size_classes[capacity] = SizeClass(capacity, empty, reach)
        return self.size_classes[capacity]


def capacity_for(length: int) -> int:
    """Return the capacity of the smallest size class that holds `length` tokens."""
    capacity = FIRST_CAPACITY
    while capacity < length:
        capacity *= 2
    return capacity


def _common(ids: list[int], others: list[int]) -> int:
    """Return how many of the first tokens are the same, without the last of `others`: at least that
    is run, to sample after it."""
    most = min(len(ids), len(others) - 1)
    if ids[:most] == others[:most]:
        return most
    return next(n for n in range(most) if ids[n] != others[n])


class KeptCaches:
    """Sequences between two turns, by request id, that keep their slot until the next turn comes or
    the room is needed. At most `max_sequences`; the oldest are dropped first. A cache is reused
    only for the tokens and the weights that it was computed from."""

    def __init__(self, cache: KVCache, max_sequences: int) -> None:
        self._cache, self._max_sequences = cache, max_sequences
        self._sequences: OrderedDict[Hashable, Sequence] = OrderedDict()
        self.num_tokens = 0

    def put(self, sequence: Sequence) -> None:
        """Keep the slot of a sequence whose turn is over."""
        assert sequence.slot is not None
        self._sequences[sequence.request.id] = sequence
        self.num_tokens += sequence.held

    def take(self, request: Request, ids: list[int]) -> Sequence | None:
        """Return a sequence whose cache these tokens can continue: the request's, which is removed,
        or for another conversation of an agent's response a copy of what it begins with."""
        kept = self._sequences.pop(request.id, None)
        if kept is None:
            return self._begun(request, ids) if request.row_prompt is not None else None
        self.num_tokens -= kept.held
        kept.cached = min(kept.cached, _common(kept.ids, ids))
        if kept.cached and kept.slot.start <= self._cache.first_kept(kept.cached):
            return kept
        self._cache.release(kept.slot)
        return None

    def _begun(self, request: Request, ids: list[int]) -> Sequence | None:
        """Return a copy of the longest beginning of an agent's conversation that another one of the
        same response has; None: there is none."""
        response: Any = request.id  # with the number of its conversation
        keys: list[Any] = [*self._sequences]
        others = [self._sequences[each] for each in keys if each[0] == response[0]]
        lengths = [min(each.cached, _common(each.ids, ids)) for each in others]
        length = max(lengths, default=0)
        other = others[lengths.index(length)] if length else None
        if other is None or other.slot.start > self._cache.first_kept(length):
            return None
        return replace(other, slot=self._cache.copied(other.slot, None, length), cached=length)

    def fit(self, room: int) -> None:
        """Drop the oldest until the others fit into `room` tokens and `max_sequences`."""
        while self._sequences and (
            self.num_tokens > room or len(self._sequences) > self._max_sequences
        ):
            _, sequence = self._sequences.popitem(last=False)
            self.num_tokens -= sequence.held
            self._cache.release(sequence.slot)

    def clear(self) -> None:
        """Drop all of them: the weights have changed."""
        self.fit(-1)  # too little room even for sequences without tokens
