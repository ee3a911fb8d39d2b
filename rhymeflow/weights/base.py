"""Interfaces by which rollout instances pull the learner's weights, each when it needs them.

    store.publish(version, tensors)                    in every rank of the learner
    reader = handle.open()                             in the process that holds the tensors
    pulled = Installation(into).pull(reader, version)  `weights/install.py`

Each rank publishes its rows in a store of its own, after all have copied and hashed theirs. A pull
neither waits for a publication nor delays one, and a puller that dies blocks no other process.
Imports no torch."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from functools import partial
from typing import NamedTuple

import msgspec
import numpy as np

from rhymeflow.core.types import Version
from rhymeflow.utils.objects import OwnerLost
from rhymeflow.weights.changes import Changes, Listed, whole_in
from rhymeflow.weights.manifest import Manifest, Slab, TensorSpec
from rhymeflow.weights.proof import MASK, ChecksumMismatch, ProvedWeights, combine

SPARE_VERSIONS = 2
"""Versions kept beyond the staleness bound: an instance may be as far behind as the bound, and one
version further while the next one is published."""


class VersionUnavailable(LookupError):  # noqa: N818 - it is what happened
    """The store does not have the version yet, or no longer."""


class Overtaken(RuntimeError):  # noqa: N818 - it is what happened
    """The weights were overwritten during the pull: pull again."""


class SharedMemoryWeightHandle(msgspec.Struct, frozen=True, tag="shared_memory"):
    """Opens a store in shared memory from any process of its machine."""

    name: str
    manifest: Manifest
    has_changes: bool = False  # whether the store also has the changes between versions

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


class RankedWeightHandle(msgspec.Struct, frozen=True, tag="ranked"):
    """Opens the stores of all ranks, in each of which are its rows; `manifest` is the whole's."""

    manifest: Manifest
    ranks: tuple[SharedMemoryWeightHandle | ObjectWeightHandle, ...]

    def open(self) -> WeightReader:
        """Open the stores; raises what opening one does."""
        return RankedWeightReader(self)


WeightHandle = SharedMemoryWeightHandle | ObjectWeightHandle | RankedWeightHandle
"""Where the weights are, as messages say it."""


BytesOf = Callable[[TensorSpec], np.ndarray]
"""Returns a tensor's bytes, [n] uint8, which are valid until the next call."""


class RowsSource(NamedTuple):
    """What turns the rows of one rank into those of another version."""

    manifest: Manifest
    bytes_of: BytesOf
    steps: Sequence[Changes] | None
    """Changes to apply to what a puller has, in order; None: all tensors are copied whole."""

    @property
    def whole(self) -> set[str]:
        """Names of the tensors whose rows are copied whole."""
        return {s.name for s in self.manifest} if self.steps is None else whole_in(self.steps)


class PulledParts(NamedTuple):
    """What one process says that it pulled; proved with what the others of its engine have."""

    weights: ProvedWeights
    published: Sequence[int]  # each tensor's published digest
    held: Sequence[Mapping[Slab, int]]
    """What each part of each tensor that the process has adds to the tensor's digest."""


class Update(NamedTuple):
    """Turns the weights that a puller has into those of another version."""

    manifest: Manifest
    weights: ProvedWeights  # the result, once it is proved
    digests: Callable[[], Sequence[int]]
    """Returns each tensor's published digest. Raises `Overtaken` if the version is overwritten."""
    sources: Sequence[RowsSource]  # of each rank, in the order of their rows

    @property
    def steps(self) -> Sequence[Changes] | None:
        """The changes, of the first rank; None if a rank has none."""
        steps = [source.steps for source in self.sources]
        return None if None in steps else steps[0]

    @property
    def whole(self) -> Iterator[tuple[str, list[tuple[int, np.ndarray]]]]:
        """Names of the tensors of which rows are copied whole, and these: their bytes, and how many
        come before them."""
        names = [source.whole for source in self.sources]
        for number, spec in enumerate(self.manifest):
            rows, first = [], 0
            for source, whole in zip(self.sources, names, strict=True):
                part = source.manifest[number]
                if spec.name in whole:
                    rows.append((first, source.bytes_of(part)))
                first += part.num_bytes
            if rows:
                yield spec.name, rows

    @property
    def listed(self) -> Iterator[tuple[str, int, Listed]]:
        """Names of tensors, how many bytes come before the rows of a rank, and changes of these, in
        the order in which to apply them."""
        first = dict.fromkeys((spec.name for spec in self.manifest), 0)
        for source in self.sources:
            whole = source.whole
            for step in source.steps or ():
                for name, listed in step.listed.items():
                    if name not in whole:
                        yield name, first[name], listed
            for spec in source.manifest:
                first[spec.name] += spec.num_bytes


def prove(manifest: Manifest, pulled: Sequence[PulledParts]) -> ProvedWeights:
    """Return the weights that the processes of an engine have pulled, proved by the digests of what
    they hold (law 5): digests of parts add up, and those of equal parts are equal. Raises
    `ChecksumMismatch` if they are not the published ones."""
    weights, published, _ = pulled[0]
    assert all(each.weights == weights for each in pulled), "all have the same version"
    digests, differing = list[int](), list[str]()
    for number, spec in enumerate(manifest):
        parts = dict[Slab, int]()
        for each in pulled:
            for slab, digest in each.held[number].items():
                if parts.setdefault(slab, digest) != digest:
                    differing.append(spec.name)
        digests.append(sum(parts.values()) & MASK)
        if digests[-1] != published[number]:
            differing.append(spec.name)
    if not differing and combine(manifest, digests) == weights.checksum:
        return weights
    raise ChecksumMismatch(
        f"pull of version {weights.version}: the checksum is not the published one; "
        f"{len(set(differing))} of {len(digests)} tensors differ, first "
        f"{differing[0] if differing else 'none: the published checksum itself is damaged'}"
    )


class WeightReader:
    """One puller's side. Methods raise `OwnerLost` if the publishing process is gone and the
    weights with it; the next learner publishes them again, in a new store."""

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


class RankedWeightReader(WeightReader):
    """One puller's side of the stores of several ranks."""

    def __init__(self, handle: RankedWeightHandle) -> None:
        super().__init__(handle)
        self._readers = [each.open() for each in handle.ranks]

    def prepare(self, have: ProvedWeights | None, want: Version) -> bool:
        """Have every rank's reader fetch; see `WeightReader`."""
        return all([reader.prepare(have, want) for reader in self._readers])

    def update(self, have: ProvedWeights | None, want: Version | None) -> Update:
        """Join the ranks' updates to one version, which all ranks have; see `WeightReader`."""
        found = [reader.update(have, want) for reader in self._readers]
        oldest = min(each.weights for each in found)
        if any(each.weights != oldest for each in found):  # some have published a newer one
            found = [reader.update(have, oldest.version) for reader in self._readers]
            if any(each.weights != oldest for each in found):
                raise Overtaken(f"version {oldest.version} was published again")
        sources = [source for each in found for source in each.sources]
        return Update(self.manifest, oldest, partial(_digests_of_all, found), sources)


def _digests_of_all(found: Sequence[Update]) -> Sequence[int]:
    """Return the digests, of which each rank has those of all; raises `Overtaken` as each does."""
    digests = [each.digests() for each in found]
    return digests[0]
