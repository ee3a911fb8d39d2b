"""What changed from one version of the weights to the next: one buffer of plain bytes.

    words    magic; base version, base checksum; version, checksum
    digests  of each tensor of the version, in the manifest's order
    listed   of each tensor: 0 if its changes are not listed here, else 1 more than their number
    counts   uint32, of each listed tensor and each block of 65,536 units of it: how many
    places   uint16: the changed units, from the first of their block
    values   uint16: what they are now

A unit has 16 bits; words, digests and the table are uint64. A tensor of which more than `MOST` of
the units changed is not listed: it is taken whole. (Putting in so many changes takes longer than
copying; and at four times that the list is as large as the tensor.)

A base and its changes make the version to the last bit, NaN payloads and the signs of zeros
included. The base is known by version and checksum, so changes are never put into anything else.
The bytes mean the same in any process and on any machine of this byte order.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from functools import cached_property
from typing import Any, NamedTuple

import numpy as np

from rhymeflow.weights.manifest import Manifest, TensorSpec
from rhymeflow.weights.proof import ProvedWeights, units_of

MOST = 1 / 8
"""Share of a tensor's units beyond which it is not listed."""

_MAGIC = 0x52484D44454C5432  # "RHMDELT2": the last digit is this arrangement's version
_WORDS = 5
_BLOCK = 1 << 16
_UNIT = 2


class Listed(NamedTuple):
    """Changed 16-bit units of one tensor, in order, as `kernels.put_changes` takes them."""

    counts: np.ndarray
    """Of them, in each block of 65,536 units, [blocks] uint32."""
    places: np.ndarray
    """Of each, from the first unit of its block, [n] uint16."""
    values: np.ndarray
    """What each is now, [n] uint16."""


class Found(NamedTuple):
    """How one tensor differs from what it was."""

    changed: int
    listed: Listed | None
    """None: it is to be taken whole."""


class Finder:
    """Compares tensors of a manifest with what they were."""

    def __init__(self, manifest: Manifest) -> None:
        largest = max((int(_units(spec) * MOST) for spec in manifest), default=0) + _BLOCK
        # Touched, and so taken from the machine, only as far as tensors change.
        self._places = np.empty(largest, np.uint16)
        self._values = np.empty(largest, np.uint16)

    def find(self, new: np.ndarray, old: np.ndarray) -> Found:
        """What of these bytes, [n] uint8, is not as in the `old` ones."""
        from rhymeflow.weights.kernels import find_changes  # loads numba

        is_even = len(new) % _UNIT == 0
        new_U, old_U = units_of(new), units_of(old)
        most = int(len(new_U) * MOST) if is_even else 0
        counts = np.zeros(-(-len(new_U) // _BLOCK), np.uint32)
        changed = int(find_changes(new_U, old_U, counts, self._places, self._values, most))
        if changed > most:
            return Found(changed, None)
        places, values = self._places[:changed].copy(), self._values[:changed].copy()
        return Found(changed, Listed(counts, places, values))


def pack(
    base: ProvedWeights, made: ProvedWeights, digests: Sequence[int], found: Sequence[Found]
) -> list[np.ndarray]:
    """The buffer, as parts that follow one another, [n] uint8."""
    listed = [each.listed for each in found if each.listed is not None]
    entries = [0 if each.listed is None else each.changed + 1 for each in found]
    words = np.array([_MAGIC, *base, *made, *digests, *entries], np.uint64)
    parts = [words, *(part for column in zip(*listed, strict=True) for part in column)]
    return [part.view(np.uint8) for part in parts]


def shares(manifest: Manifest, found: Sequence[Found], size: int) -> dict[str, float]:
    """How much of the weights changed, by names of metrics; `size`: bytes of the buffer."""
    whole = sum(
        spec.num_bytes for spec, each in zip(manifest, found, strict=True) if each.listed is None
    )
    num_bytes = max(1, sum(spec.num_bytes for spec in manifest))
    return {
        "params/changed_share": 2 * sum(each.changed for each in found) / num_bytes,
        "params/whole_share": whole / num_bytes,
        "params/delta_bytes": float(size + whole),
    }


class Changes:
    """The buffer, read in place, [n] uint8 from an address that is a multiple of 8."""

    def __init__(self, manifest: Manifest, buffer: np.ndarray) -> None:
        count = len(manifest)
        words = buffer[: (_WORDS + 2 * count) * 8].view(np.uint64)
        assert int(words[0]) == _MAGIC, "these are no changes of this Rhymeflow's weights"
        self.buffer = buffer
        self.base = ProvedWeights(int(words[1]), int(words[2]))
        self.made = ProvedWeights(int(words[3]), int(words[4]))
        self.digests, self._entries = words[_WORDS:].reshape(2, count).tolist()
        self._manifest = manifest

    @property
    def whole(self) -> set[str]:
        """The tensors that are to be taken whole."""
        pairs = zip(self._manifest, self._entries, strict=True)
        return {spec.name for spec, entries in pairs if entries == 0}

    @cached_property
    def listed(self) -> dict[str, Listed]:
        """The changes of the others, by name; those that did not change at all are left out."""
        sizes = [max(0, entries - 1) for entries in self._entries]
        blocks = [
            -(-_units(spec) // _BLOCK) if entries else 0
            for spec, entries in zip(self._manifest, self._entries, strict=True)
        ]
        start = (_WORDS + 2 * len(self._manifest)) * 8
        middle = start + 4 * sum(blocks)
        last = middle + 2 * sum(sizes)
        counts = self.buffer[start:middle].view(np.uint32)
        places = self.buffer[middle:last].view(np.uint16)
        values = self.buffer[last : last + 2 * sum(sizes)].view(np.uint16)
        found, block, first = {}, 0, 0
        for spec, size, of_blocks in zip(self._manifest, sizes, blocks, strict=True):
            if size:
                part = slice(first, first + size)
                found[spec.name] = Listed(
                    counts[block : block + of_blocks], places[part], values[part]
                )
            block, first = block + of_blocks, first + size
        return found


def copied(manifest: Manifest, buffers: Iterable[np.ndarray]) -> list[Changes]:
    """These changes in memory of this process, ready to be put in."""
    found = [Changes(manifest, buffer.copy()) for buffer in buffers]
    for each in found:
        each.listed  # noqa: B018 - is made now, not while the puller waits for it
    return found


def whole_in(steps: Iterable[Changes]) -> set[str]:
    """The tensors that one of the steps takes whole."""
    return set().union(*(step.whole for step in steps))


class Link(NamedTuple):
    """A publication, and what can be had of its changes."""

    made: ProvedWeights
    base: ProvedWeights | None
    """None: none can be had."""
    num_bytes: int
    buffer: Any
    """The changes, or what names them."""


def chain(
    manifest: Manifest, newest_first: Iterable[Link], have: ProvedWeights
) -> list[Link] | None:
    """What leads from `have` to the first of these, in order.

    None if it is not there, or larger than the weights.
    """
    links: list[Link] = []
    left = sum(spec.num_bytes for spec in manifest)
    for link in newest_first:
        if link.made == have:
            return links[::-1]
        if link.base is None or (left := left - link.num_bytes) < 0:
            return None
        links.append(link)
        if link.base == have:
            return links[::-1]
    return None


def _units(spec: TensorSpec) -> int:
    return -(-spec.num_bytes // _UNIT)
