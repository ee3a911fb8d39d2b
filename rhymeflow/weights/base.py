"""Interfaces by which rollout instances pull the learner's weights, each when it needs them.

    store.publish(version, tensors)                    in the learner
    reader = handle.open()                             in the process that holds the tensors
    pulled = Installation(into).pull(reader, version)  `weights/install.py`

A pull neither waits for a publication nor delays one, and a puller that dies blocks no other
process. Imports no torch.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from pathlib import Path
from typing import TYPE_CHECKING, NamedTuple

import msgspec
import numpy as np

from rhymeflow.config import Config
from rhymeflow.core.types import Version
from rhymeflow.utils import progress
from rhymeflow.utils.objects import OwnerLost
from rhymeflow.weights.changes import Changes, Difference, Finder, Listed, pack, shares, whole_in
from rhymeflow.weights.manifest import Manifest, TensorSpec, require_names, require_spec
from rhymeflow.weights.proof import ChecksumMismatch, ProvedWeights, bytes_of, combine, digest

if TYPE_CHECKING:
    from torch import Tensor


class VersionUnavailable(LookupError):  # noqa: N818 - it is what happened
    """The store does not have the version yet, or no longer."""


class Overtaken(RuntimeError):  # noqa: N818 - it is what happened
    """The weights were overwritten during the pull: pull again."""


class WeightStore:
    """The learner's side."""

    handle: WeightHandle
    """By which readers open it."""

    def __init__(self, manifest: Manifest, keep: int) -> None:
        """`keep` is the number of last publications to which changes are kept; 0: none."""
        self._manifest, self._keep, self._finder = manifest, keep, Finder(manifest)
        self._last: ProvedWeights | None = None
        self.metrics: Mapping[str, float] = {}
        """How much the last publication changed; see `shares`. Empty if no changes are kept."""

    def publish(self, version: Version, tensors: Mapping[str, Tensor]) -> int:
        """Publish `version` for readers; return its checksum.

        The tensors, on any device, must not change until this returns. Their digests are taken
        before they are copied, so that readers detect errors in the copy.

        Raises `ManifestMismatch` if they are not the manifest's tensors.
        """
        require_names(self._manifest, tensors)
        base = self._last if self._keep else None
        old, put = self._begin()
        digests, differences = list[int](), list[Difference]()
        # Look each tensor up once: the mapping may gather it from ranks.
        for spec in self._manifest:
            tensor = tensors[spec.name]
            require_spec(spec, tensor)
            source = bytes_of(tensor)
            progress.advance()
            if base is not None:
                differences.append(self._finder.find(source, old(spec)))
            put(spec, source)
            digests.append(digest(source))
        weights = ProvedWeights(version, combine(self._manifest, digests))
        changes = [] if base is None else pack(base, weights, digests, differences)
        self._end(weights, digests, base, changes)
        if base is not None:
            self.metrics = shares(self._manifest, differences, sum(map(len, changes)))
        self._last = weights
        return weights.checksum

    def _begin(self) -> tuple[BytesOf, Callable[[TensorSpec, np.ndarray], None]]:
        """Return a function that reads a tensor of the last publication, and one that writes it."""
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


class SharedMemoryWeightHandle(msgspec.Struct, frozen=True, tag="shared_memory"):
    """Opens a store in shared memory from any process of its machine."""

    name: str
    manifest: Manifest
    has_changes: bool = False
    """Whether the store also has the changes between versions."""

    def open(self) -> WeightReader:
        """Open the store in this process, where the tensors to be filled are. Raises
        `FileNotFoundError` if the process that created the memory is gone."""
        from rhymeflow.weights.shared_memory import SharedMemoryWeightReader

        return SharedMemoryWeightReader(self)


class ObjectWeightHandle(msgspec.Struct, frozen=True, tag="objects"):
    """Opens a store of objects from any process of the cluster; `owner` is the learner's."""

    owner: str
    manifest: Manifest

    def open(self) -> WeightReader:
        """Open the store, without asking its owner anything yet."""
        from rhymeflow.weights.objects import ObjectWeightReader

        return ObjectWeightReader(self)


WeightHandle = SharedMemoryWeightHandle | ObjectWeightHandle
"""Where the weights are, as messages say it."""


BytesOf = Callable[[TensorSpec], np.ndarray]
"""Returns a tensor's bytes, [n] uint8, which are valid until the next call."""


class Update(NamedTuple):
    """Turns the weights that a puller has into those of another version."""

    manifest: Manifest
    weights: ProvedWeights
    """The result, once it is proved."""
    digests: Callable[[], Sequence[int]]
    """Returns each tensor's published digest. Raises `Overtaken` if the version is overwritten."""
    bytes_of: BytesOf
    steps: Sequence[Changes] | None
    """Changes to apply to the puller's weights, in order; None: all tensors are copied whole."""

    @property
    def whole(self) -> Iterator[tuple[str, np.ndarray]]:
        """Names and bytes of the tensors to copy whole."""
        names = None if self.steps is None else whole_in(self.steps)
        for spec in self.manifest:
            if names is None or spec.name in names:
                yield spec.name, self.bytes_of(spec)

    @property
    def listed(self) -> Iterator[tuple[str, Listed]]:
        """Names and changes of the other tensors, in the order in which to apply them."""
        whole = whole_in(self.steps or ())
        for step in self.steps or ():
            yield from (each for each in step.listed.items() if each[0] not in whole)

    def prove(self, digests_held: Mapping[str, int]) -> ProvedWeights:
        """Return the pulled weights, proved by the digests of the puller's tensors (law 5).

        The digest of a tensor to which changes were applied is its last digest, updated.

        Raises:
            Overtaken: the tensors are not of one version; pull again.
            ChecksumMismatch: the tensors are not those published.
        """
        published, pulled = self.digests(), [digests_held[spec.name] for spec in self.manifest]
        if combine(self.manifest, pulled) == self.weights.checksum:
            return self.weights
        triples = zip(self.manifest, published, pulled, strict=True)
        differing = [spec.name for spec, due, actual in triples if due != actual]
        raise ChecksumMismatch(
            f"pull of version {self.weights.version}: the checksum is not the published one; "
            f"{len(differing)} of {len(pulled)} tensors differ, first "
            f"{differing[0] if differing else 'none: the published checksum itself is damaged'}"
        )


class WeightReader:
    """One puller's side.

    Methods raise `OwnerLost` if the publishing process is gone and the weights with it; the next
    learner publishes them again, in a new store.
    """

    def __init__(self, handle: WeightHandle) -> None:
        self.handle, self.manifest = handle, handle.manifest
        self._executor = ThreadPoolExecutor(1, "weights")
        self._fetching: tuple[ProvedWeights | None, Version | None, Future[Update]] | None = None
        """The arguments and the result of the `_fetch` that `prepare` has begun."""

    def _fetch(self, have: ProvedWeights | None, want: Version | None) -> Update:
        raise NotImplementedError

    def prepare(self, have: ProvedWeights | None, want: Version) -> bool:
        """Fetch, in the background, what `update` will need; return whether it has arrived. Call it
        until it has; `update` also works without it, but takes longer."""
        if self._fetching is None or self._fetching[:2] != (have, want):
            self._fetching = have, want, self._executor.submit(self._fetch, have, want)
        *_, fetched = self._fetching
        if fetched.done() and isinstance(fetched.exception(), OwnerLost):
            self._fetching = None
            fetched.result()  # raises the error
        return fetched.done()

    def update(self, have: ProvedWeights | None, want: Version | None) -> Update:
        """Return an update to `want` (None: the newest), by changes from `have` if they are there
        and smaller than the weights. Raises `VersionUnavailable` if there is no such version."""
        fetching, self._fetching = self._fetching, None
        if fetching is not None and fetching[:2] == (have, want):
            return fetching[2].result()  # waits for it
        return self._fetch(have, want)


SPARE_VERSIONS = 2
"""Versions kept beyond the staleness bound: an instance may be as far behind as the bound, and one
version further while the next one is published."""


def make_store(config: Config, manifest: Manifest, run_dir: Path) -> WeightStore:
    """Create an empty store of `weights.transport`.

    On one machine it is named after the run's directory, and memory left by a killed learner is
    freed first: a run has one learner at a time.
    """
    from rhymeflow.utils import shared_memory  # late: the controller imports this module
    from rhymeflow.weights.objects import ObjectWeightStore
    from rhymeflow.weights.shared_memory import SharedMemoryWeightStore

    keep = config.schedule.bound + SPARE_VERSIONS if config.weights.transport == "delta" else 0
    if config.runtime == "ray":
        return ObjectWeightStore(manifest, keep=keep)
    prefix = shared_memory.prefix_for(run_dir, "w")
    shared_memory.free_left(prefix)
    return SharedMemoryWeightStore(manifest, keep=keep, prefix=prefix)
