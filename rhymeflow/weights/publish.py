"""Publishes weights: the learner's side of `base.py`. They are hashed where they are."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path

import numpy as np
from torch import Tensor

from rhymeflow.config import Config
from rhymeflow.core.types import Version
from rhymeflow.utils import progress, shared_memory
from rhymeflow.weights.base import SPARE_VERSIONS, BytesOf, WeightHandle
from rhymeflow.weights.changes import Difference, Finder, pack, shares
from rhymeflow.weights.manifest import Manifest, Slab, require_names, require_spec
from rhymeflow.weights.on_device import Hash, Staging, as_ints, hash_of, is_on_host
from rhymeflow.weights.proof import ProvedWeights, bytes_of, combine


class WeightStore:
    """The learner's side."""

    handle: WeightHandle
    """By which readers open it."""

    def __init__(self, manifest: Manifest, keep: int) -> None:
        """`keep` is the number of last publications to which changes are kept; 0: none."""
        self._manifest, self._keep, self._finder = manifest, keep, Finder(manifest)
        self._staging: Staging | None = None  # of a device; memory of the host needs none
        self._last: ProvedWeights | None = None
        self.metrics: Mapping[str, float] = {}
        """How much the last publication changed. Empty if no changes are kept."""

    def publish(self, version: Version, tensors: Mapping[str, Tensor]) -> int:
        """Publish `version` for readers; return its checksum.

        The tensors, on any device, must not change until this returns, so they are not copied
        there: the next step begins later anyway, when the version is reported. Digests are theirs,
        so that readers detect errors in the copy.

        Raises `ManifestMismatch` if they are not the manifest's tensors.
        """
        require_names(self._manifest, tensors)
        base = self._last if self._keep else None
        old, room = self._begin()
        hashes, differences = list[Hash](), list[Difference]()
        # Look each tensor up once: the mapping may gather it from ranks.
        for spec in self._manifest:
            tensor = tensors[spec.name]
            require_spec(spec, tensor)
            into = room(spec)
            hashes.append(self._copy(tensor, into))
            progress.advance()
            if base is not None:
                differences.append(self._finder.find(into, old(spec)))
        digests = as_ints(hashes)
        weights = ProvedWeights(version, combine(self._manifest, digests))
        changes = [] if base is None else pack(base, weights, digests, differences)
        self._end(weights, digests, base, changes)
        if base is not None:
            self.metrics = shares(self._manifest, differences, sum(map(len, changes)))
        self._last = weights
        return weights.checksum

    def _copy(self, tensor: Tensor, into: np.ndarray) -> Hash:
        """Copy a tensor's bytes to the host; return its digest."""
        tensor = tensor.detach().contiguous()
        if is_on_host(tensor):
            np.copyto(into, bytes_of(tensor))
        else:
            self._staging = self._staging or Staging(tensor.device)
            self._staging.catch_up()
        found = hash_of(tensor, Slab(0, len(into)))  # on a GPU, beside the copy
        if self._staging is not None:
            self._staging.copy_out(tensor, into)
        return found

    def _begin(self) -> tuple[BytesOf, BytesOf]:
        """Return functions that return a tensor's bytes: of the last publication, to be read, and
        of the next, to be filled before those of another are asked for."""
        raise NotImplementedError

    def _end(
        self,
        weights: ProvedWeights,
        digests: list[int],
        base: ProvedWeights | None,
        changes: Sequence[np.ndarray],
    ) -> None:
        """Publish what was written, with `changes` from `base` (parts of one buffer), if any."""
        raise NotImplementedError

    def close(self) -> None:
        """Free the store's memory; readers keep what they have."""
        raise NotImplementedError


def make_store(config: Config, manifest: Manifest, run_dir: Path) -> WeightStore:
    """Create an empty store of `weights.transport`.

    On one machine it is named after the run's directory, and memory left by a killed learner is
    freed first: a run has one learner at a time.
    """
    from rhymeflow.weights.objects import ObjectWeightStore
    from rhymeflow.weights.shared_memory import SharedMemoryWeightStore

    keep = config.schedule.bound + SPARE_VERSIONS if config.weights.transport == "delta" else 0
    if config.runtime == "ray":
        return ObjectWeightStore(manifest, keep=keep)
    prefix = shared_memory.prefix_for(run_dir, "w")
    shared_memory.free_left(prefix)
    return SharedMemoryWeightStore(manifest, keep=keep, prefix=prefix)
