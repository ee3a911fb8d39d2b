"""The weight store: the latest weights of one machine, in shared memory, by version.

Holds true:
- pulls run concurrently with each other and with a publication; a pull during one gets the version
  published before, whole;
- publications exclude each other, by a lock that the operating system drops when its holder dies;
- readers hold nothing, so one that dies or hangs blocks no other process;
- every pull is proved (law 5): the checksum is taken over the tensors that were written to, and is
  the one that the publisher took over the tensors it published.

Why a reader never returns a torn copy: it takes publication n from slot n % 2 if that slot says
begun == ended == n. The next to write there, n + 2, sets `begun` before it touches a byte. So if
`begun` is still n after the copy, no byte had changed before the copy was done; otherwise the
puller begins again (`base.Overtaken`).
"""

from __future__ import annotations

import fcntl
import os
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from typing import NamedTuple

import numpy as np
from torch import Tensor

from rhymeflow.core.types import Version
from rhymeflow.utils import progress, shared_memory
from rhymeflow.weights import slots
from rhymeflow.weights.base import (
    Overtaken,
    Pulled,
    TensorChunk,
    Update,
    VersionUnavailable,
)
from rhymeflow.weights.handle import SharedMemoryWeightHandle
from rhymeflow.weights.manifest import Manifest, TensorSpec, require_names, require_spec
from rhymeflow.weights.proof import bytes_of, combine, digest, require_equal
from rhymeflow.weights.slots import Memory, Slot


class SharedMemoryWeightStore:
    """The writing side: `create` in the process that owns the memory, `attach` in others."""

    def __init__(self, mapped: Memory, *, is_owner: bool) -> None:
        """Use `create` or `attach`."""
        self._memory = mapped
        self._is_owner = is_owner

    @classmethod
    def create(cls, manifest: Manifest, prefix: str = "rhymeflow") -> SharedMemoryWeightStore:
        """Make shared memory for two copies of the layout, with nothing published.

        `prefix`: of its name.

        Raises:
            UserError: the machine has too little shared memory.
        """
        return cls(slots.create(manifest, prefix), is_owner=True)

    @classmethod
    def attach(cls, handle: SharedMemoryWeightHandle) -> SharedMemoryWeightStore:
        """Publish in memory that another process owns."""
        return cls(slots.attach(handle, writable=True), is_owner=False)

    @property
    def handle(self) -> SharedMemoryWeightHandle:
        """What `SharedMemoryWeightReader` and `attach` take, in any process of this machine."""
        return self._memory.handle

    def publish(self, version: Version, tensors: Mapping[str, Tensor]) -> int:
        """Publish `tensors` as `version`; return their checksum.

        The tensors may be on any device and must not change until this returns. Each is looked up
        once, in the manifest's order, so that a mapping may make them one after the other.

        Raises:
            ManifestMismatch: they are not the manifest's tensors.
        """
        manifest = self._memory.handle.manifest
        require_names(manifest, tensors)
        with self._publishing():
            publication = self._memory.published + 1
            slot = self._begin(publication)
            digests = []
            for spec in manifest:
                tensor = tensors[spec.name]  # once: it may be gathered from many ranks for this
                require_spec(spec, tensor)
                digests.append(self._put(slot, spec, bytes_of(tensor)))
                progress.advance()
            made = Pulled(version, combine(manifest, digests))
            slot.end(*made, digests)
            self._complete(publication, made, digests)
            self._memory.publish(publication)
        return made.checksum

    @property
    def metrics(self) -> Mapping[str, float]:
        """None; see `base.WeightStore`."""
        return {}

    def _begin(self, publication: int) -> Slot:
        """The slot that it is written to; what that held is gone."""
        slot = self._memory.slot(publication)
        slot.begin(publication)
        return slot

    def _put(self, slot: Slot, spec: TensorSpec, source: np.ndarray) -> int:
        """Write one tensor; return its digest.

        The digest is of the source: what goes wrong in the copy is found by the reader.
        """
        np.copyto(slot.bytes_of(spec), source)
        return digest(source)

    def _complete(self, publication: int, made: Pulled, digests: list[int]) -> None:
        """Whatever else is to be there before the publication can be pulled."""

    def close(self) -> None:
        """Give the memory back, if this process created it; readers keep what they have mapped."""
        if self._is_owner:
            self._is_owner = False
            shared_memory.free(self._memory.handle.name)

    @contextmanager
    def _publishing(self) -> Iterator[None]:
        descriptor = shared_memory.open_for_locking(self._memory.handle.name)
        try:
            fcntl.flock(descriptor, fcntl.LOCK_EX)
            yield
        finally:
            os.close(descriptor)


class SharedMemoryWeightReader:
    """The reading side, in any process of this machine; cannot write. A `base.WeightReader`."""

    def __init__(self, handle: SharedMemoryWeightHandle) -> None:
        """Map the memory; `SharedMemoryWeightHandle.open` says what it raises."""
        self._memory = slots.attach(handle, writable=False)
        self._pulling: Pull | None = None

    @property
    def handle(self) -> SharedMemoryWeightHandle:
        """What names the memory; see `base.WeightReader`."""
        return self._memory.handle

    @property
    def manifest(self) -> Manifest:
        """The tensors there are."""
        return self._memory.handle.manifest

    @property
    def version(self) -> Version | None:
        """The version a pull would bring now; None before the first is published."""
        while publication := self._memory.published:
            slot = self._memory.slot(publication)
            version = slot.version
            if slot.begun == publication:
                return version
        return None

    def pull(self, have: Version | None, want: Version | None) -> Iterator[TensorChunk]:
        """Every tensor whole, in place; see `base.WeightReader`.

        The version before the newest is there until the publication after begins.
        """
        publication = self._find(want)
        slot = self._memory.slot(publication)
        self._pulling = Pull(publication, Pulled(slot.version, slot.checksum), None)
        for spec in self.manifest:
            yield TensorChunk(spec.name, 0, slot.bytes_of(spec))

    def prepare(self, have: Pulled | None, want: Version) -> bool:
        """Nothing needs to be fetched; see `base.WeightReader`."""
        return True

    def changes(self, have: Pulled, want: Version | None) -> Update | None:
        """They are not known; see `base.WeightReader`."""
        return None

    def prove(self, digests: Mapping[str, int]) -> Pulled:
        """Compare with what the learner published; see `base.WeightReader`."""
        assert self._pulling is not None, "nothing was pulled"
        publication, made, published = self._pulling
        if published is None:
            slot = self._memory.slot(publication)
            published = slot.digests()
            if slot.begun != publication:
                raise Overtaken(f"publication {publication} was being written over")
        self._pulling = None
        require_equal(self.manifest, made, published, digests)
        return made

    def _find(self, version: Version | None) -> int:
        """The newest publication, or the one of `version`."""
        while True:
            newest = self._memory.published
            held = {}
            for publication in range(newest, max(newest - 2, 0), -1):
                slot = self._memory.slot(publication)
                if slot.begun == slot.ended == publication:
                    held[publication] = slot.version
            # If nothing was published meanwhile, nothing has touched the newest slot either.
            if self._memory.published == newest:
                break
        for publication, found in held.items():
            if version is None or found == version:
                return publication
        wanted = "any version" if version is None else f"version {version}"
        raise VersionUnavailable(
            f"the weight store does not hold {wanted}; it holds {sorted(held.values())}"
        )


class Pull(NamedTuple):
    """A pull that is not proved yet."""

    publication: int
    made: Pulled
    """What it makes, if it is proved."""
    digests: list[int] | None
    """Of each tensor that was published; None: they stand in the slot, which was read from."""
