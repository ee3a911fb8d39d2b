"""The changes from one version of the weights to the next, as one buffer of bytes.

    words    magic; base version, base checksum; version, checksum
    digests  of each tensor of the version, in the manifest's order
    entries  of each tensor: 0 if its changes are not listed, else their number plus 1
    counts   uint32: number of changes in each block of 65,536 units of each listed tensor
    places   uint16: index of each changed unit in its block
    values   uint16: its new value

A unit has 16 bits; words, digests and entries are uint64. If a share of more than `MAX_LISTED` of a
tensor's units changed, they are not listed and the tensor is copied whole. (Applying more changes
takes longer than copying; at four times as many, the list is as large as the tensor.)

A base and its changes give the version to the last bit, NaN payloads and signs of zeros included.
The base is identified by version and checksum, so changes are never applied to other weights. The
bytes mean the same on any machine of this byte order."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from functools import cached_property
from typing import Any, NamedTuple

import numpy as np

from rhymeflow.weights.manifest import Manifest, Slab, TensorSpec
from rhymeflow.weights.proof import ProvedWeights, units_of

MAX_LISTED = 1 / 8  # greatest share of a tensor's units that are listed

_MAGIC = 0x52484D44454C5432  # "RHMDELT2": the last digit is the format's version
_WORDS = 5
BLOCK = 1 << 16  # units per block, so that a unit's index in its block fits 16 bits
_UNIT = 2


class Listed(NamedTuple):
    """Changed 16-bit units of one tensor, in order, as `kernels.put_changes` takes them."""

    counts: np.ndarray  # number of changes in each block of 65,536 units, [blocks] uint32
    places: np.ndarray  # index of each changed unit in its block, [n] uint16
    values: np.ndarray  # new value of each changed unit, [n] uint16

    def within(self, slab: Slab, first: int) -> Listed:
        """Return those of a slab; they are of a part that begins at byte `first` of the tensor."""
        from rhymeflow.weights.kernels import changes_within  # loads numba

        sizes = (each // _UNIT for each in (first, slab.start, slab.length))
        into = np.zeros_like(self.counts), *(np.empty_like(each) for each in self[1:])
        found, kept = changes_within(*self, *sizes, slab.runs, slab.stride // _UNIT, into)
        source, start = (self, found) if slab.runs == 1 else (into, 0)
        return Listed(into[0], *(each[start : start + kept] for each in source[1:]))


class Difference(NamedTuple):
    """How a tensor differs from its last version."""

    changed: int  # number of changed units
    listed: Listed | None  # none: it is copied whole


class Finder:
    """Compares a manifest's tensors with their last versions."""

    def __init__(self, manifest: Manifest) -> None:
        # As `find_changes` needs. The pages are touched, and so allocated, only as tensors change.
        room = max((int(_units(spec) * MAX_LISTED) for spec in manifest), default=0) + BLOCK
        self._places = np.empty(room, np.uint16)
        self._values = np.empty(room, np.uint16)

    def find(self, new: np.ndarray, old: np.ndarray) -> Difference:
        """Return the differences of these bytes, [n] uint8, from the `old` ones."""
        from rhymeflow.weights.kernels import find_changes  # loads numba

        is_even = len(new) % _UNIT == 0  # else a last half unit could not be put
        new_U, old_U = units_of(new), units_of(old)
        most = int(len(new_U) * MAX_LISTED) if is_even else 0
        counts = np.zeros(-(-len(new_U) // BLOCK), np.uint32)
        changed = int(find_changes(new_U, old_U, counts, self._places, self._values, most))
        if changed > most:
            return Difference(changed, None)
        places, values = self._places[:changed].copy(), self._values[:changed].copy()
        return Difference(changed, Listed(counts, places, values))


def pack(
    base: ProvedWeights,
    weights: ProvedWeights,
    digests: Sequence[int],
    differences: Sequence[Difference],
) -> list[np.ndarray]:
    """Return the buffer as consecutive parts, [n] uint8."""
    listed = [each.listed for each in differences if each.listed is not None]
    entries = [0 if each.listed is None else each.changed + 1 for each in differences]
    words = np.array([_MAGIC, *base, *weights, *digests, *entries], np.uint64)
    parts = [words, *(part for column in zip(*listed, strict=True) for part in column)]
    return [part.view(np.uint8) for part in parts]


def amounts(manifest: Manifest, differences: Sequence[Difference]) -> tuple[int, int]:
    """Return how many bytes changed, and how many are those of tensors that are copied whole."""
    pairs = zip(manifest, differences, strict=True)
    whole = sum(spec.num_bytes for spec, each in pairs if each.listed is None)
    return _UNIT * sum(each.changed for each in differences), whole


class Changes:
    """A buffer, [n] uint8 at an address that is a multiple of 8, read in place."""

    def __init__(self, manifest: Manifest, buffer: np.ndarray) -> None:
        count = len(manifest)
        words = buffer[: (_WORDS + 2 * count) * 8].view(np.uint64)
        assert int(words[0]) == _MAGIC, "not a buffer of changes of this version of Rhymeflow"
        self.buffer = buffer
        self.base = ProvedWeights(int(words[1]), int(words[2]))
        self.weights = ProvedWeights(int(words[3]), int(words[4]))
        self.digests, self._entries = words[_WORDS:].reshape(2, count).tolist()
        self._manifest = manifest

    @property
    def whole(self) -> set[str]:
        """Names of the tensors that are copied whole."""
        pairs = zip(self._manifest, self._entries, strict=True)
        return {spec.name for spec, entries in pairs if entries == 0}

    @cached_property
    def listed(self) -> dict[str, Listed]:
        """Changes of the other tensors by name, without unchanged ones."""
        sizes = [max(0, entries - 1) for entries in self._entries]
        blocks = [
            -(-_units(spec) // BLOCK) if entries else 0
            for spec, entries in zip(self._manifest, self._entries, strict=True)
        ]
        counts_start = (_WORDS + 2 * len(self._manifest)) * 8
        places_start = counts_start + 4 * sum(blocks)
        values_start = places_start + 2 * sum(sizes)
        counts = self.buffer[counts_start:places_start].view(np.uint32)
        places = self.buffer[places_start:values_start].view(np.uint16)
        values = self.buffer[values_start : values_start + 2 * sum(sizes)].view(np.uint16)
        listed, block, first = {}, 0, 0
        for spec, size, num_blocks in zip(self._manifest, sizes, blocks, strict=True):
            if size:
                part = slice(first, first + size)
                listed[spec.name] = Listed(
                    counts[block : block + num_blocks], places[part], values[part]
                )
            block, first = block + num_blocks, first + size
        return listed


def copied(manifest: Manifest, buffers: Iterable[np.ndarray]) -> list[Changes]:
    """Copy buffers of changes into this process's memory, ready to be applied."""
    steps = [Changes(manifest, buffer.copy()) for buffer in buffers]
    for step in steps:
        step.listed  # noqa: B018 - computed now, not while the puller waits
    return steps


def whole_in(steps: Iterable[Changes]) -> set[str]:
    """Return the names of the tensors that any step copies whole."""
    return set().union(*(step.whole for step in steps))


class Link(NamedTuple):
    """The changes to a publication, if they are available."""

    weights: ProvedWeights
    base: ProvedWeights | None  # where the changes start; None: they are not available
    num_bytes: int
    buffer: Any  # the changes, or a reference to them


def chain(
    manifest: Manifest, newest_first: Iterable[Link], have: ProvedWeights
) -> list[Link] | None:
    """Return the links from `have` to the first of these, in order of application; None if a link
    is missing, or together they are larger than the weights."""
    links: list[Link] = []
    bytes_left = sum(spec.num_bytes for spec in manifest)
    for link in newest_first:
        if link.weights == have:
            return links[::-1]
        if link.base is None or (bytes_left := bytes_left - link.num_bytes) < 0:
            return None
        links.append(link)
        if link.base == have:
            return links[::-1]
    return None


def _units(spec: TensorSpec) -> int:
    return -(-spec.num_bytes // _UNIT)
