"""The weight store: the latest weights of one machine, in shared memory, by version.

Holds true:
- pulls run concurrently with each other and with a push; a pull during a push gets the version
  published before, whole;
- pushes exclude each other, by a lock that the operating system drops when its holder dies;
- readers hold nothing, so one that dies or hangs blocks nobody;
- every pull is proved (law 5): the checksum is taken over the tensors that were written to, and is
  the one that the pusher took over the tensors it pushed.

Why a reader never returns a torn copy: it takes publication n from slot n % 2 if that slot says
begun == ended == n. The next to write there, n + 2, sets `begun` before it touches a byte. So if
`begun` is still n after the copy, no byte had changed before the copy was done; otherwise the
reader takes the newest publication and begins again.
"""

from __future__ import annotations

import fcntl
import os
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from typing import NamedTuple

import numpy as np
import torch
from torch import Tensor

from rhymeflow.core.types import Version
from rhymeflow.utils import shared_memory
from rhymeflow.weights import slots
from rhymeflow.weights.manifest import Manifest, TensorSpec, bytes_of, combine, digest, require
from rhymeflow.weights.slots import Memory, SharedMemoryWeightHandle, Slot

# A reader is overtaken once per two pushes; more often than this means that pushes never pause.
_MAX_OVERTAKEN = 1000


class ChecksumMismatch(RuntimeError):  # noqa: N818 - it is what happened
    """The weights that arrived are not the weights that were pushed."""


class VersionUnavailable(LookupError):  # noqa: N818 - it is what happened
    """The version asked for is not in the weight store (not yet, or no longer)."""


class Pulled(NamedTuple):
    """What a pull brought: proved weights of `version`."""

    version: Version
    checksum: int


class SharedMemoryWeightStore:
    """The writing side: `create` in the process that owns the memory, `attach` in others."""

    def __init__(self, mapped: Memory, *, is_owner: bool) -> None:
        """Use `create` or `attach`."""
        self._memory = mapped
        self._is_owner = is_owner

    @classmethod
    def create(cls, manifest: Manifest) -> SharedMemoryWeightStore:
        """Make shared memory for two copies of the layout, with nothing published.

        Raises:
            UserError: the machine has too little shared memory.
        """
        return cls(slots.create(manifest), is_owner=True)

    @classmethod
    def attach(cls, handle: SharedMemoryWeightHandle) -> SharedMemoryWeightStore:
        """Push to memory that another process owns."""
        return cls(slots.attach(handle, writable=True), is_owner=False)

    @property
    def handle(self) -> SharedMemoryWeightHandle:
        """What `SharedMemoryWeightReader` and `attach` take, in any process of this machine."""
        return self._memory.handle

    def push(self, version: Version, tensors: Mapping[str, Tensor]) -> int:
        """Publish `tensors` as `version`; return their checksum.

        The tensors may be on any device and must not change until this returns.

        Raises:
            LayoutMismatch: they are not the layout's tensors.
        """
        manifest = self.handle.manifest
        require(manifest, tensors)
        with self._pushing():
            publication = self._memory.published + 1
            slot = self._memory.slot(publication)
            slot.begin(publication)
            digests = []
            for spec in manifest:
                # The digest is of the source: what goes wrong in the copy is found by the reader.
                source = bytes_of(tensors[spec.name])
                digests.append(digest(source))
                np.copyto(slot.bytes_of(spec), source)
            checksum = combine(manifest, digests)
            slot.end(version, checksum, digests)
            self._memory.publish(publication)
        return checksum

    def close(self) -> None:
        """Give the memory back, if this process created it; readers keep what they have mapped."""
        if self._is_owner:
            self._is_owner = False
            shared_memory.free(self.handle.name)

    @contextmanager
    def _pushing(self) -> Iterator[None]:
        descriptor = os.open(shared_memory.path_of(self.handle.name), os.O_RDONLY)
        try:
            fcntl.flock(descriptor, fcntl.LOCK_EX)
            yield
        finally:
            os.close(descriptor)


class SharedMemoryWeightReader:
    """The reading side, in any process of this machine; cannot write."""

    def __init__(self, handle: SharedMemoryWeightHandle) -> None:
        """Map the memory.

        Raises:
            FileNotFoundError: the process that created it is gone.
        """
        self._memory = slots.attach(handle, writable=False)

    @property
    def version(self) -> Version | None:
        """The version a pull would bring now; `None` before the first push."""
        while publication := self._memory.published:
            slot = self._memory.slot(publication)
            version = slot.version
            if slot.begun == publication:
                return version
        return None

    def pull(self, into: Mapping[str, Tensor], version: Version | None = None) -> Pulled:
        """Copy the newest weights, or exactly `version`, into these tensors in place, proved.

        The version before the newest is there until the push after begins. After an error the
        tensors hold anything.

        Raises:
            LayoutMismatch: `into` are not the layout's tensors.
            VersionUnavailable: nothing is published, or not `version`.
            ChecksumMismatch: what arrived is not what was pushed.
        """
        require(self._memory.handle.manifest, into)
        for _ in range(_MAX_OVERTAKEN):
            publication = self._find(version)
            slot = self._memory.slot(publication)
            found, expected = slot.version, slot.checksum
            digests = [self._copy(spec, slot, into[spec.name]) for spec in self._manifest]
            published = slot.digests()
            if slot.begun != publication:
                continue  # overtaken: a push has begun here
            self._prove(found, expected, published, digests)
            return Pulled(found, expected)
        raise RuntimeError(f"overtaken by pushes {_MAX_OVERTAKEN} times during one pull")

    @property
    def _manifest(self) -> Manifest:
        return self._memory.handle.manifest

    def _find(self, version: Version | None) -> int:
        """The newest publication, or the one of `version`."""
        while True:
            newest = self._memory.published
            held = {}
            for publication in range(newest, max(newest - 2, 0), -1):
                slot = self._memory.slot(publication)
                if slot.begun == slot.ended == publication:
                    held[publication] = slot.version
            # If nothing was published meanwhile, no push has touched the newest slot either.
            if self._memory.published == newest:
                break
        for publication, found in held.items():
            if version is None or found == version:
                return publication
        wanted = "any version" if version is None else f"version {version}"
        raise VersionUnavailable(
            f"the weight store does not hold {wanted}; it holds {sorted(held.values())}"
        )

    @staticmethod
    def _copy(spec: TensorSpec, slot: Slot, target: Tensor) -> int:
        """Copy one tensor into place; return the digest of what then stands there."""
        source = slot.bytes_of(spec)
        if target.device.type == "cpu" and target.is_contiguous():
            np.copyto(bytes_of(target), source)
        elif spec.num_bytes:
            staged = torch.from_numpy(source.copy()).view(target.dtype).reshape(spec.shape)
            target.detach().copy_(staged)
        return digest(bytes_of(target))

    def _prove(
        self, version: Version, expected: int, published: list[int], found: list[int]
    ) -> None:
        if combine(self._manifest, found) == expected:
            return
        differing = [
            spec.name for spec, a, b in zip(self._manifest, published, found, strict=True) if a != b
        ]
        raise ChecksumMismatch(
            f"pull of version {version}: the checksum is not the published one; "
            f"{len(differing)} of {len(found)} tensors differ, first "
            f"{differing[0] if differing else 'none: the published checksum itself is damaged'}"
        )
