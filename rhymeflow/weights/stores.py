"""Which weight store a configuration asks for. Knows nothing of how any of them works."""

from __future__ import annotations

from rhymeflow.config import Config
from rhymeflow.weights.base import WeightStore
from rhymeflow.weights.delta import DeltaWeightStore
from rhymeflow.weights.manifest import Manifest
from rhymeflow.weights.shared_memory import SharedMemoryWeightStore

SPARE_VERSIONS = 2
"""Beyond the staleness bound: an instance may be that much behind, and one version more while the
next is published."""


def make_store(config: Config, manifest: Manifest, prefix: str = "rhymeflow") -> WeightStore:
    """An empty store of `weights.transport`. `prefix`: of the names of its memory.

    Raises:
        UserError: the machine has too little shared memory.
    """
    if config.weights.transport == "delta":
        return DeltaWeightStore.make(
            manifest, keep=config.schedule.bound + SPARE_VERSIONS, prefix=prefix
        )
    return SharedMemoryWeightStore.create(manifest, prefix)
