"""Publishes weights: the learner's side of `base.py`, the same on one rank and on many.

Each rank hashes its rows where they are, and copies them into a store of its own. It publishes them
there once the digests of all ranks are summed, so when all have copied theirs. A GPU copies while
the next step begins: only what changes the weights must come after `BegunPublication.copied`."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from itertools import chain
from pathlib import Path
from typing import TYPE_CHECKING, NamedTuple

import numpy as np
import torch
from torch import Tensor

from rhymeflow.config import Config
from rhymeflow.core.types import Version
from rhymeflow.utils import progress, shared_memory
from rhymeflow.weights.base import SPARE_VERSIONS, BytesOf, RankedWeightHandle, WeightHandle
from rhymeflow.weights.changes import Difference, Finder, amounts, pack
from rhymeflow.weights.manifest import Manifest, Slab, TensorSpec, plan, require_names, require_spec
from rhymeflow.weights.on_device import Hash, Outbox, as_ints, hash_of, is_on_host
from rhymeflow.weights.proof import ProvedWeights, bytes_of, combine

if TYPE_CHECKING:
    from rhymeflow.learner.ranks import Ranks


DIGEST_BYTES = 8


def rows_of(manifest: Manifest, ranks: Ranks) -> Manifest:
    """Return the manifest of a rank's rows."""
    rows = {}
    for spec in manifest:
        part = ranks.rows(spec.shape[0])
        rows[spec.name] = (part.stop - part.start, *spec.shape[1:]), getattr(torch, spec.dtype)
    return plan(rows)


class New(NamedTuple):
    """What is published beside the bytes."""

    weights: ProvedWeights
    digests: list[int]
    base: ProvedWeights | None
    """What `changes`, parts of one buffer, start from; None: there are none."""
    changes: Sequence[np.ndarray]


class BegunPublication(NamedTuple):
    """A publication that has begun."""

    take: Callable[[np.ndarray], None]
    """Fills [n] uint8 with the next tensor's bytes, once they are in the host's memory."""
    digests: Callable[[], list[int]]
    """Returns what the tensors add to their digests, once all were taken."""
    copied: torch.cuda.Event | None
    """The tensors must not change before this event or, for None, before it is finished."""


class WeightStore:
    """The learner's side, or one rank's: what it publishes are its rows."""

    handle: WeightHandle
    """By which readers open it; with several ranks, that of rank 0 opens the stores of all."""

    def __init__(self, manifest: Manifest, keep: int, ranks: Ranks | None = None) -> None:
        """`keep` is the number of last publications to which changes are kept; 0: none."""
        self._manifest, self._keep = manifest, keep
        self._ranks = None if ranks is None or ranks.count == 1 else ranks.publishing
        self._rows = manifest if self._ranks is None else rows_of(manifest, self._ranks)
        self._finder: Finder | None = None
        self._outbox: Outbox | None = None  # of a device; memory of the host needs none
        self._last: ProvedWeights | None = None
        self.metrics: Mapping[str, float] = {}
        """How much the last publication changed. Empty if no changes are kept."""

    def publish(self, version: Version, tensors: Mapping[str, Tensor]) -> int:
        """Publish `version` for readers; return its checksum. With several ranks `tensors` are
        this rank's rows, and all ranks must publish: each returns when all have. Digests are those
        of the tensors, so that readers detect errors in the copy. If a rank is lost in the
        meantime, readers still find the version before.

        Raises `ManifestMismatch` if they are not the manifest's tensors."""
        return self.finish(version, self.begin(tensors))

    def begin(self, tensors: Mapping[str, Tensor]) -> BegunPublication:
        """Begin to publish: have a GPU hash and copy its tensors beside what it is told next, and
        wait for nothing. Only the last publication may be unfinished. Raises as `publish`."""
        require_names(self._rows, tensors)
        # Look each tensor up once: the mapping may make it then, on the stream that copies it.
        looked = (tensors[spec.name] for spec in self._rows)
        first = next(looked)
        given = zip(self._rows, self._manifest, chain([first], looked), strict=True)
        if not is_on_host(first):
            return self._begin_on_device(first, given)
        hashes = list[Hash]()

        def take(into: np.ndarray) -> None:
            spec, whole, tensor = next(given)
            require_spec(spec, tensor)
            hashes.append(self._copy(tensor, _first_byte(whole, self._ranks), into))

        return BegunPublication(take, lambda: as_ints(hashes), None)

    def _begin_on_device(
        self, first: Tensor, given: Iterable[tuple[TensorSpec, TensorSpec, Tensor]]
    ) -> BegunPublication:
        size = sum(spec.num_bytes + DIGEST_BYTES for spec in self._rows)
        outbox = self._outbox = self._outbox or Outbox(first.device, size)
        hashes = list[Tensor]()
        with outbox.filling():
            if outbox.stream is not None:
                first.record_stream(outbox.stream)  # it was made on another
            for spec, whole, tensor in given:
                require_spec(spec, tensor)
                dense = tensor.detach().contiguous()
                found = hash_of(dense, Slab(_first_byte(whole, self._ranks), spec.num_bytes))
                assert isinstance(found, Tensor), "all tensors are on the device"
                hashes.append(found)
                outbox.put(dense)
                progress.advance()
            outbox.put(torch.stack(hashes))
            copied = None if outbox.stream is None else outbox.stream.record_event()

        def digests() -> list[int]:
            found = np.empty(len(hashes), np.uint64)
            outbox.take(found.view(np.uint8))
            return [int(each) for each in found]

        return BegunPublication(outbox.take, digests, copied)

    def finish(self, version: Version, begun: BegunPublication) -> int:
        """Publish what `begin` began, in any thread; see `publish`."""
        base = self._last if self._keep else None
        old, room = self._begin()
        differences = list[Difference]()
        for spec in self._rows:
            into = room(spec)
            begun.take(into)
            progress.advance()
            if base is not None:
                self._finder = self._finder or Finder(self._rows)
                differences.append(self._finder.find(into, old(spec)))
        digests = _summed(begun.digests(), self._ranks)  # so all ranks' rows are there
        weights = ProvedWeights(version, combine(self._manifest, digests))
        changes = [] if base is None else pack(base, weights, digests, differences)
        self._end(New(weights, digests, base, changes))
        changed, copied = amounts(self._rows, differences) if differences else (0, 0)
        amount = [changed, copied, sum(map(len, changes)) + copied]
        changed, copied, size = _summed(amount, self._ranks)  # so all ranks have published
        if base is not None:
            num_bytes = max(1, sum(spec.num_bytes for spec in self._manifest))
            self.metrics = {
                "params/changed_share": changed / num_bytes,
                "params/whole_share": copied / num_bytes,
                "params/delta_bytes": float(size),
            }
        self._last = weights
        return weights.checksum

    def _copy(self, tensor: Tensor, first: int, into: np.ndarray) -> Hash:
        """Copy a tensor's bytes in the host's memory; return its digest as rows that begin at that
        byte."""
        np.copyto(into, bytes_of(tensor))
        return hash_of(tensor.detach().contiguous(), Slab(first, len(into)))

    def _begin(self) -> tuple[BytesOf, BytesOf]:
        """Return functions that return a tensor's bytes: of the last publication, to be read, and
        of the next, to be filled before those of another are asked for."""
        raise NotImplementedError

    def _end(self, new: New) -> None:
        """Publish what was written."""
        raise NotImplementedError

    def close(self) -> None:
        """Free the store's memory; readers keep what they have."""
        raise NotImplementedError


def checksum_of(manifest: Manifest, digests: Sequence[int], ranks: Ranks | None = None) -> int:
    """Return the checksum of tensors, from each rank's `row_digests`; a collective."""
    return combine(manifest, _summed(list(digests), ranks))


def row_digests(
    manifest: Manifest, rows: Mapping[str, Tensor], ranks: Ranks | None = None
) -> list[int]:
    """Return what this rank's rows of each tensor add to the tensor's digest."""
    hashes = []
    for spec in manifest:
        tensor = rows[spec.name]
        hashes.append(hash_of(tensor, Slab(_first_byte(spec, ranks), tensor.nbytes)))
    return as_ints(hashes)


def _first_byte(spec: TensorSpec, ranks: Ranks | None) -> int:
    """Return how many bytes of a tensor come before this rank's rows."""
    if ranks is None or ranks.count == 1:
        return 0
    first_row: int = ranks.rows(spec.shape[0]).start
    return first_row * (spec.num_bytes // max(1, spec.shape[0]))


def _summed(numbers: list[int], ranks: Ranks | None) -> list[int]:
    """Return the sums over all ranks, modulo 2**64."""
    if ranks is None:
        return numbers
    sums = torch.from_numpy(np.array(numbers, np.uint64).view(np.int64))
    found: list[int] = ranks.summed(sums).numpy().view(np.uint64).tolist()
    return found


def make_store(
    config: Config, manifest: Manifest, run_dir: Path, ranks: Ranks | None = None
) -> WeightStore:
    """Create an empty store of `weights.transport`, in each of several ranks. On one machine it is
    named after the run's directory, and memory left by a killed learner is freed first: a run has
    one learner at a time."""
    from rhymeflow.weights.objects import ObjectWeightStore
    from rhymeflow.weights.shared_memory import SharedMemoryWeightStore

    keep = config.schedule.bound + SPARE_VERSIONS if config.weights.transport == "delta" else 0
    store: WeightStore
    if config.runtime == "ray":
        store = ObjectWeightStore(manifest, keep=keep, ranks=ranks)
    else:
        prefix = shared_memory.prefix_for(run_dir, "w")
        if ranks is None or ranks.rank == 0:
            shared_memory.free_left(prefix)
        if ranks is not None:
            ranks.summed(torch.zeros(1))  # the others wait until it is freed
        store = SharedMemoryWeightStore(manifest, keep=keep, prefix=prefix, ranks=ranks)
    if ranks is not None and len(handles := ranks.gathered(store.handle)) > 1:
        store.handle = RankedWeightHandle(manifest, tuple(handles))
    return store
