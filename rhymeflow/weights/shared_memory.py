"""The weight store of one machine: the two newest versions, in shared memory.

    header   one cache line: magic, number of the last publication (0: none yet)
    slot     begun, ended, version, checksum, one digest per tensor; then the tensors' bytes
    slot

Publication n is in slot n % 2, so writing n + 1 leaves n untouched. A slot holds all of n if
begun == ended == n: the writer sets `begun` before it touches a byte, `ended` after the last, and
only then the header's number. Each word is one aligned 8-byte store, so it is read old or new,
never half. There are no locks: one process writes, and readers only read.

Why a reader never returns a torn copy: n + 2, the next publication in n's slot, sets `begun` first.
So if `begun` is still n after the copy, no byte changed during the copy; otherwise the puller
begins again (`base.Overtaken`).

With `keep`, the changes from each publication to the next (`changes.py`) are in separate memory
that is never overwritten; if it is freed, it stays until its reader unmaps it. They are applied
only to the weights from which they start, identified by version and checksum: a restarted learner
publishes its version again, and if that differs (on GPUs it may), instances pull it whole."""

from __future__ import annotations

import mmap
from collections.abc import Sequence
from functools import partial
from typing import TYPE_CHECKING

import numpy as np

from rhymeflow.core.types import Version
from rhymeflow.utils import shared_memory
from rhymeflow.weights.base import (
    BytesOf,
    Overtaken,
    RowsSource,
    SharedMemoryWeightHandle,
    Update,
    VersionUnavailable,
    WeightReader,
)
from rhymeflow.weights.changes import Changes, Link, chain, copied, whole_in
from rhymeflow.weights.manifest import Manifest, TensorSpec, slot_bytes
from rhymeflow.weights.proof import ProvedWeights
from rhymeflow.weights.publish import New, WeightStore

if TYPE_CHECKING:
    from rhymeflow.learner.ranks import Ranks

_MAGIC = 0x52484D464C4F5731  # "RHMFLOW1": the last digit is the format's version
_WORD = 8
_SLOT_WORDS = 4


class _Slot:
    def __init__(self, words: np.ndarray, data: np.ndarray) -> None:
        self._words, self._data = words, data

    @property
    def begun(self) -> int:
        return int(self._words[0])

    def holds(self, publication: int) -> bool:
        """Return whether the slot has all of this publication."""
        return self.begun == int(self._words[1]) == publication

    @property
    def weights(self) -> ProvedWeights:
        return ProvedWeights(int(self._words[2]), int(self._words[3]))

    @property
    def digests(self) -> list[int]:
        return [int(word) for word in self._words[_SLOT_WORDS:]]

    def bytes_of(self, spec: TensorSpec) -> np.ndarray:
        return self._data[spec.offset : spec.offset + spec.num_bytes]

    def begin(self, publication: int) -> None:
        """Mark the slot as being written, which invalidates its content."""
        self._words[0] = publication

    def end(self, weights: ProvedWeights, digests: Sequence[int]) -> None:
        self._words[2:_SLOT_WORDS] = np.array(weights, np.uint64)
        self._words[_SLOT_WORDS:] = np.array(digests, np.uint64)
        self._words[1] = self._words[0]


class _Memory:
    def __init__(self, manifest: Manifest, buffer: mmap.mmap) -> None:
        whole = np.frombuffer(buffer, np.uint8)
        self.header = whole[: shared_memory.LINE].view(np.uint64)
        num_bytes = (_SLOT_WORDS + len(manifest)) * _WORD
        self._slots = []
        for start, end in _slot_ranges(manifest):
            words = whole[start : start + num_bytes].view(np.uint64)
            data = whole[start + shared_memory.whole_lines(num_bytes) : end]
            self._slots.append(_Slot(words, data))

    @property
    def published(self) -> int:
        return int(self.header[1])

    def slot(self, publication: int) -> _Slot:
        return self._slots[publication % 2]


class SharedMemoryWeightStore(WeightStore):
    """The learner's side; its process owns the memory."""

    def __init__(
        self,
        manifest: Manifest,
        *,
        keep: int = 0,
        prefix: str = "rhymeflow",
        ranks: Ranks | None = None,
    ) -> None:
        """Create shared memory for two copies of the weights; its names begin with `prefix`."""
        super().__init__(manifest, keep, ranks)
        self._name = shared_memory.new_name(prefix)
        self.handle = SharedMemoryWeightHandle(self._name, self._rows, keep > 0)
        size, what = _slot_ranges(self._rows)[-1][1], "two copies of the weights"
        advice = "for a container, --shm-size sets it"
        buffer = shared_memory.create(self._name, size, what=what, advice=advice)
        self._memory = _Memory(self._rows, buffer)
        self._memory.header[0] = _MAGIC
        self._kept: dict[int, str] = {}
        self._is_open = True

    def _begin(self) -> tuple[BytesOf, BytesOf]:
        publication = self._memory.published + 1
        slot = self._memory.slot(publication)
        slot.begin(publication)
        return self._memory.slot(publication - 1).bytes_of, slot.bytes_of

    def _end(self, new: New) -> None:
        publication = self._memory.published + 1
        self._memory.slot(publication).end(new.weights, new.digests)
        if new.base is not None and self._is_open:
            self._keep_changes(publication, new.changes)
        self._memory.header[1] = publication

    def close(self) -> None:
        """Free the memory; readers keep what they have mapped."""
        for publication in list(self._kept):
            shared_memory.free(self._kept.pop(publication))
        if self._is_open:
            self._is_open = False
            shared_memory.free(self._name)

    def _keep_changes(self, publication: int, changes: Sequence[np.ndarray]) -> None:
        name = _name_of_changes(self._name, publication)
        what, advice = "what changed in the weights", "weights.transport: shared_memory needs none"
        size = sum(map(len, changes))
        buffer = np.frombuffer(shared_memory.create(name, size, what=what, advice=advice), np.uint8)
        np.concatenate(changes, out=buffer)
        self._kept[publication] = name
        while len(self._kept) > self._keep:
            shared_memory.free(self._kept.pop(min(self._kept)))


class SharedMemoryWeightReader(WeightReader):
    """One puller's side, in any process of this machine."""

    def __init__(self, handle: SharedMemoryWeightHandle) -> None:
        """Map the memory; `SharedMemoryWeightHandle.open` says what it raises."""
        super().__init__(handle)
        self._name, self._has_changes = handle.name, handle.has_changes
        buffer = shared_memory.attach(handle.name, writable=False)
        self._memory = _Memory(handle.manifest, buffer)
        is_ours = int(self._memory.header[0]) == _MAGIC
        assert is_ours, f"{handle.name} is not a weight store of this version of Rhymeflow"

    def prepare(self, have: ProvedWeights | None, want: Version) -> bool:
        """Copy the needed changes into this process; see `base.WeightReader`."""
        return have is None or not self._has_changes or super().prepare(have, want)

    def _fetch(self, have: ProvedWeights | None, want: Version | None) -> Update:
        by_changes = None if have is None else self._changes_since(have, want)
        publication, steps = by_changes or (self._find(want), None)
        slot = self._memory.slot(publication)
        weights, digests = slot.weights, partial(self._digests, publication)
        if steps is not None and not steps:  # the puller has it already
            assert have is not None
            weights = have
        elif steps:
            weights = steps[-1].weights
            if not whole_in(steps):  # nothing is read from the slot, which may be overwritten
                digests = partial(list, steps[-1].digests)
        source = RowsSource(self.manifest, slot.bytes_of, steps)
        return Update(self.manifest, weights, digests, [source])

    def _digests(self, publication: int) -> list[int]:
        slot = self._memory.slot(publication)
        digests = slot.digests
        if slot.begun != publication:
            raise Overtaken(f"publication {publication} was overwritten")
        return digests

    def _find(self, version: Version | None) -> int:
        """Return the newest publication, or the newer of the last two that has `version`."""
        while True:
            newest = self._memory.published
            held = {}
            for publication in range(newest, max(newest - 2, 0), -1):
                slot = self._memory.slot(publication)
                if slot.holds(publication):
                    held[publication] = slot.weights.version
            # If nothing was published in the meantime, nothing has touched the newest slot.
            if self._memory.published == newest:
                break
        for publication, held_version in held.items():
            if version is None or held_version == version:
                return publication
        wanted = "any version" if version is None else f"version {version}"
        raise VersionUnavailable(
            f"the weight store does not hold {wanted}; it holds {sorted(held.values())}"
        )

    def _changes_since(
        self, have: ProvedWeights, want: Version | None
    ) -> tuple[int, list[Changes]] | None:
        """Return the newest publication of `want`, and the steps from `have` to it, or None."""
        target, links = 0, list[Link]()
        for publication in range(self._memory.published, 0, -1):
            link = self._link(publication)
            if link is None:
                break
            if links or want is None or link.weights.version == want:
                target = target or publication
                links.append(link)
        path = chain(self.manifest, links, have)
        if path is None:
            return None
        steps = copied(self.manifest, [link.buffer for link in path])
        if whole_in(steps) and not self._memory.slot(target).holds(target):
            return None
        return target, steps

    def _link(self, publication: int) -> Link | None:
        name = _name_of_changes(self._name, publication)
        try:
            mapped = shared_memory.attach(name, writable=False)
        except FileNotFoundError:
            return None
        buffer = np.frombuffer(mapped, np.uint8)
        changes = Changes(self.manifest, buffer)
        return Link(changes.weights, changes.base, buffer.nbytes, buffer)


def _slot_ranges(manifest: Manifest) -> list[tuple[int, int]]:
    size = shared_memory.whole_lines((_SLOT_WORDS + len(manifest)) * _WORD) + slot_bytes(manifest)
    first = shared_memory.LINE
    return [(first, first + size), (first + size, first + 2 * size)]


def _name_of_changes(store: str, publication: int) -> str:
    return f"{store}.{publication % 10_000}"
