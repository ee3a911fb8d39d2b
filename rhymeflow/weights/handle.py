"""Where the weights in shared memory are: what messages carry. Maps nothing until it is opened."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

from rhymeflow.weights.manifest import Manifest

if TYPE_CHECKING:
    from rhymeflow.weights.shared_memory import SharedMemoryWeightReader


@dataclass(frozen=True, slots=True)
class SharedMemoryWeightHandle:
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
