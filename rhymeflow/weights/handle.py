"""Where the weights are: what messages carry. Maps nothing until it is opened."""

from __future__ import annotations

from typing import TYPE_CHECKING

import msgspec

from rhymeflow.weights.manifest import Manifest

if TYPE_CHECKING:
    from rhymeflow.weights.delta import DeltaWeightReader
    from rhymeflow.weights.objects import ObjectWeightReader
    from rhymeflow.weights.shared_memory import SharedMemoryWeightReader


class SharedMemoryWeightHandle(msgspec.Struct, frozen=True, tag="shared_memory"):
    """A `base.WeightHandle` for processes of the machine that holds the memory of this name."""

    name: str
    manifest: Manifest

    def open(self) -> SharedMemoryWeightReader:
        """Map the memory.

        Raises:
            FileNotFoundError: the process that created it is gone.
        """
        from rhymeflow.weights.shared_memory import SharedMemoryWeightReader

        return SharedMemoryWeightReader(self)


class DeltaWeightHandle(msgspec.Struct, frozen=True, tag="delta"):
    """The same for weights beside which there is what changed from version to version."""

    memory: SharedMemoryWeightHandle

    @property
    def manifest(self) -> Manifest:
        """The tensors there are."""
        return self.memory.manifest

    def open(self) -> DeltaWeightReader:
        """Map the memory; see `SharedMemoryWeightHandle.open`."""
        from rhymeflow.weights.delta import DeltaWeightReader

        return DeltaWeightReader(self)


class ObjectWeightHandle(msgspec.Struct, frozen=True, tag="objects"):
    """A `base.WeightHandle` for processes of the cluster of which `owner` is one."""

    owner: str
    manifest: Manifest

    def open(self) -> ObjectWeightReader:
        """Be able to ask the owner; does not look whether it is there."""
        from rhymeflow.weights.objects import ObjectWeightReader

        return ObjectWeightReader(self)


AnyWeightHandle = SharedMemoryWeightHandle | DeltaWeightHandle | ObjectWeightHandle
"""What messages may carry."""
