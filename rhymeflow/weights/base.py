"""How instances pull the learner's weights, each at its own time.

    store.publish(version, tensors)                    in the learner
    reader = handle.open()                             in the process that holds the tensors
    pulled = Installation(into).pull(reader, version)  `weights/install.py`

A pull neither waits for a publication nor holds one up, and a puller that dies blocks no other
process. Loads no torch.
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
from rhymeflow.weights.changes import Changes, Finder, Found, Listed, pack, shares, whole_in
from rhymeflow.weights.manifest import Manifest, TensorSpec, require_names, require_spec
from rhymeflow.weights.proof import ChecksumMismatch, ProvedWeights, bytes_of, combine, digest

if TYPE_CHECKING:
    from torch import Tensor


class VersionUnavailable(LookupError):  # noqa: N818 - it is what happened
    """The version asked for cannot be had (not yet, or no longer)."""


class Overtaken(RuntimeError):  # noqa: N818 - it is what happened
    """What was being pulled has been written over: pull again."""


class WeightStore:
    """The learner's side."""

    handle: WeightHandle
    """How readers find it."""

    def __init__(self, manifest: Manifest, keep: int) -> None:
        """The changes to the last `keep` publications are kept."""
        self._manifest, self._keep, self._finder = manifest, keep, Finder(manifest)
        self._made: ProvedWeights | None = None
        self.metrics: Mapping[str, float] = {}
        """How much the last publication changed, and what that takes, each as a share of the
        weights; empty where no changes are kept."""

    def publish(self, version: Version, tensors: Mapping[str, Tensor]) -> int:
        """Let `version` be pulled; return the checksum that proves it.

        The tensors, on any device, must not change until this returns. Digests are of what is
        given, so the reader finds what goes wrong in the copy.

        Raises:
            ManifestMismatch: they are not the manifest's tensors.
        """
        require_names(self._manifest, tensors)
        base = self._made if self._keep else None
        old, put = self._begin()
        digests, found = list[int](), list[Found]()
        # Each is looked up once: a mapping may make them (gather them from ranks) one by one.
        for spec in self._manifest:
            tensor = tensors[spec.name]
            require_spec(spec, tensor)
            source = bytes_of(tensor)
            progress.advance()
            if base is not None:
                found.append(self._finder.find(source, old(spec)))
            put(spec, source)
            digests.append(digest(source))
        made = ProvedWeights(version, combine(self._manifest, digests))
        changes = [] if base is None else pack(base, made, digests, found)
        self._end(made, digests, base, changes)
        if base is not None:
            self.metrics = shares(self._manifest, found, sum(map(len, changes)))
        self._made = made
        return made.checksum

    def _begin(self) -> tuple[BytesOf, Callable[[TensorSpec, np.ndarray], None]]:
        """What returns the bytes of the last publication, and what takes those of the next."""
        raise NotImplementedError

    def _end(
        self,
        made: ProvedWeights,
        digests: list[int],
        base: ProvedWeights | None,
        changes: Sequence[np.ndarray],
    ) -> None:
        """All tensors were taken: let them be pulled. If there is a `base`, the changes, parts of
        one buffer, lead here from it."""
        raise NotImplementedError

    def close(self) -> None:
        """Give back what it keeps; readers keep what they have."""
        raise NotImplementedError


class SharedMemoryWeightHandle(msgspec.Struct, frozen=True, tag="shared_memory"):
    """Reaches the weights from any process of the machine that holds the memory of this name."""

    name: str
    manifest: Manifest
    has_changes: bool = False
    """What changed from version to version is there too."""

    def open(self) -> WeightReader:
        """Open it in this process, which is the one that holds the tensors.

        Raises:
            FileNotFoundError: the process that created the memory is gone.
        """
        from rhymeflow.weights.shared_memory import SharedMemoryWeightReader

        return SharedMemoryWeightReader(self)


class ObjectWeightHandle(msgspec.Struct, frozen=True, tag="objects"):
    """The same from any process of the cluster of which `owner` is one."""

    owner: str
    manifest: Manifest

    def open(self) -> WeightReader:
        """Be able to ask the owner; does not look whether it is there."""
        from rhymeflow.weights.objects import ObjectWeightReader

        return ObjectWeightReader(self)


WeightHandle = SharedMemoryWeightHandle | ObjectWeightHandle
"""Where the weights are: what messages carry."""


BytesOf = Callable[[TensorSpec], np.ndarray]
"""Returns the bytes of a tensor, [n] uint8, valid until the next is asked for."""


class Update(NamedTuple):
    """What turns weights that a puller has into those of another version."""

    manifest: Manifest
    made: ProvedWeights
    """What it makes, if it is proved."""
    digests: Callable[[], Sequence[int]]
    """Of each tensor that was published. Raises `Overtaken` if other bytes may have been read."""
    bytes_of: BytesOf
    steps: Sequence[Changes] | None
    """What leads here from the weights that the puller has; None: every tensor is brought whole."""

    @property
    def whole(self) -> Iterator[tuple[str, np.ndarray]]:
        """The tensors that are to be copied, by name, with their bytes."""
        names = None if self.steps is None else whole_in(self.steps)
        for spec in self.manifest:
            if names is None or spec.name in names:
                yield spec.name, self.bytes_of(spec)

    @property
    def listed(self) -> Iterator[tuple[str, Listed]]:
        """What is to be put into the others, one after the other."""
        whole = whole_in(self.steps or ())
        for step in self.steps or ():
            yield from (each for each in step.listed.items() if each[0] not in whole)

    def prove(self, held: Mapping[str, int]) -> ProvedWeights:
        """What was pulled, given the digest of each tensor that the puller now computes with (law
        5); where only listed changes were put in, it follows from the one before.

        Raises:
            Overtaken: what was pulled is no whole version; pull again.
            ChecksumMismatch: what arrived is not what was published.
        """
        published, found = self.digests(), [held[spec.name] for spec in self.manifest]
        if combine(self.manifest, found) == self.made.checksum:
            return self.made
        digests = zip(self.manifest, published, found, strict=True)
        differing = [spec.name for spec, a, b in digests if a != b]
        raise ChecksumMismatch(
            f"pull of version {self.made.version}: the checksum is not the published one; "
            f"{len(differing)} of {len(found)} tensors differ, first "
            f"{differing[0] if differing else 'none: the published checksum itself is damaged'}"
        )


class WeightReader:
    """One puller's side.

    All raise `OwnerLost`, and bring nothing, where who published is gone and the weights with it:
    the next learner publishes them again, in a store of its own.
    """

    def __init__(self, handle: WeightHandle) -> None:
        self.handle, self.manifest = handle, handle.manifest
        self._executor = ThreadPoolExecutor(1, "weights")
        self._fetching: tuple[ProvedWeights | None, Version | None, Future[Update]] | None = None

    def _fetch(self, have: ProvedWeights | None, want: Version | None) -> Update:
        """See `update`."""
        raise NotImplementedError

    def prepare(self, have: ProvedWeights | None, want: Version) -> bool:
        """Begin to fetch, in the background, what `update` will need; whether that is here.

        To be asked again until it is. Nothing depends on it but how long `update` takes.
        """
        if self._fetching is None or self._fetching[:2] != (have, want):
            self._fetching = have, want, self._executor.submit(self._fetch, have, want)
        fetch = self._fetching[2]
        if fetch.done() and isinstance(fetch.exception(), OwnerLost):
            self._fetching = None
            fetch.result()  # raises it
        return fetch.done()

    def update(self, have: ProvedWeights | None, want: Version | None) -> Update:
        """What brings `want` (None: the newest), by changes if `have` was proved and they are
        known and shorter.

        Raises:
            VersionUnavailable: `want` is not there, or nothing is.
        """
        fetching, self._fetching = self._fetching, None
        if fetching is not None and fetching[:2] == (have, want):
            return fetching[2].result()
        return self._fetch(have, want)


SPARE_VERSIONS = 2
"""Beyond the staleness bound: an instance may be that much behind, and one version more while the
next is published."""


def make_store(config: Config, manifest: Manifest, run_dir: Path) -> WeightStore:
    """An empty store of `weights.transport`.

    On one machine it is named after the run's directory, and what a learner that was killed left
    is removed first: there is one learner at a time.
    """
    from rhymeflow.utils import shared_memory  # the controller knows no memory
    from rhymeflow.weights.objects import ObjectWeightStore
    from rhymeflow.weights.shared_memory import SharedMemoryWeightStore

    keep = config.schedule.bound + SPARE_VERSIONS if config.weights.transport == "delta" else 0
    if config.runtime == "ray":
        return ObjectWeightStore(manifest, keep=keep)
    prefix = shared_memory.prefix_for(run_dir, "w")
    shared_memory.free_left(prefix)
    return SharedMemoryWeightStore(manifest, keep=keep, prefix=prefix)
