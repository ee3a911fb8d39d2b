"""Which weight store a configuration asks for."""

from __future__ import annotations

from pathlib import Path

from rhymeflow.config import Config
from rhymeflow.utils import shared_memory
from rhymeflow.weights.base import WeightStore
from rhymeflow.weights.manifest import Manifest
from rhymeflow.weights.objects import ObjectWeightStore
from rhymeflow.weights.shared_memory import SharedMemoryWeightStore

SPARE_VERSIONS = 2
"""Beyond the staleness bound: an instance may be that much behind, and one version more while the
next is published."""


def make_store(config: Config, manifest: Manifest, run_dir: Path) -> WeightStore:
    """An empty store of `weights.transport`.

    On one machine it is named after the run's directory, and what a learner that was killed left
    is removed first: there is one learner at a time.
    """
    keep = config.schedule.bound + SPARE_VERSIONS if config.weights.transport == "delta" else 0
    if config.runtime == "ray":
        return ObjectWeightStore(manifest, keep=keep)
    prefix = shared_memory.prefix_for(run_dir, "w")
    shared_memory.free_left(prefix)
    return SharedMemoryWeightStore(manifest, keep=keep, prefix=prefix)
