"""Pulls weights into tensors, in place and proved.

Digests are those of the tensors themselves: taken from a tensor after it was copied whole, updated
where changes are put into it, and kept otherwise. After an error the tensors are undefined."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from functools import partial

import numpy as np
import torch
from torch import Tensor

from rhymeflow.core.types import Version
from rhymeflow.utils import progress
from rhymeflow.weights.base import (
    Overtaken,
    PulledParts,
    Update,
    VersionUnavailable,
    WeightReader,
    prove,
)
from rhymeflow.weights.changes import Listed
from rhymeflow.weights.manifest import Slab, TensorSpec, require
from rhymeflow.weights.on_device import Hash, Staging, as_ints, hash_of, is_on_host, put_on_device
from rhymeflow.weights.proof import INNER, MASK, ProvedWeights, copy_and_digest

_MAX_OVERTAKEN = 1000
"""It takes two publications to overtake a reader once: after so many times they never pause."""


class SlabPlace:
    """Where a process has a slab of a tensor, all or part of it."""

    def __init__(self, spec: TensorSpec, slab: Slab, into: Tensor) -> None:
        """`into` has the slab's numbers in their order, in any shape and dtype."""
        self.slab, self._into, self._dtype = slab, into.detach(), getattr(torch, spec.dtype)
        self.device, self._is_whole = into.device, slab == Slab(0, spec.num_bytes)
        self._rows = self._rows_of(self._into)
        self.view: np.ndarray | None = None  # its bytes, [runs, length], in the host's memory
        if self._rows is not None and is_on_host(into):
            self.view = self._rows.view(torch.uint8).numpy()

    def copy(self, rows: Sequence[tuple[int, np.ndarray]], staging: Staging) -> Hash:
        """Copy those of the tensor's rows that are the slab's, as in `Update.whole`; return the
        digest of all that the place has afterwards."""
        rows_RN, write = self._dense()
        total, copied = 0, 0
        for first, data in rows:
            part, runs, columns = self.slab.within(first, first + len(data))
            source, copied = part.of(data), copied + part.runs * part.length
            if self.view is None:
                staging.copy_in(rows_RN.view(torch.uint8)[runs, columns], source)
            elif self.slab.runs == 1:
                start = self.slab.start + columns.start
                total += copy_and_digest(self.view[0, columns], source[0], start)
            else:
                np.copyto(self.view[runs, columns], source)
        write()
        if self.view is not None and copied == self.view.size and self.slab.runs == 1:
            return total & MASK
        return hash_of(self._into.to(self._dtype), self.slab)

    def put(self, first: int, listed: Listed, staging: Staging) -> Hash:
        """Apply the slab's changes of rows that begin at byte `first` of the tensor; return what
        that adds to the digest. The others are not brought to its device."""
        from rhymeflow.weights.kernels import put_changes  # loads numba

        if self.view is not None and self._is_whole:
            return int(put_changes(self.view[0].view(np.uint16), *listed, INNER, first // 2))
        mine = listed if self._is_whole else listed.within(self.slab, first)
        if not len(mine.places):
            return 0
        rows_RN, write = self._dense()
        added = put_on_device(rows_RN, self.slab, mine, first, staging)
        write()
        return added

    def _dense(self) -> tuple[Tensor, Callable[[], object]]:
        """Return the numbers, [runs, numbers], and what puts those that are a copy into place."""
        if self._rows is not None:
            return self._rows, lambda: None
        dense = torch.empty(self._into.shape, dtype=self._dtype, device=self.device)
        dense.copy_(self._into)
        return dense.view(self.slab.runs, -1), lambda: self._into.copy_(dense)

    def _rows_of(self, tensor: Tensor) -> Tensor | None:
        shape = self.slab.runs, tensor.numel() // self.slab.runs
        try:
            rows = tensor.view(shape)
        except RuntimeError:  # the strides forbid it
            return None
        return rows if rows.dtype == self._dtype and rows.stride(1) == 1 else None


class Installation:
    """Tensors, or parts of them, into which weights are pulled, and their digests. Nothing else may
    change or move them, since pulls build on their content."""

    def __init__(
        self,
        into: Mapping[str, Tensor] | Callable[[TensorSpec], Sequence[SlabPlace]],
        copied: Callable[[str], object] = lambda name: None,
    ) -> None:
        """`into`: the manifest's tensors, or what returns all places where the process has parts of
        one. `copied` is called with the name of each tensor that was copied whole."""
        self.holds: ProvedWeights | None = None  # the weights in them; None: they are undefined
        self.digests: dict[str, dict[Slab, int]] = {}
        """Digest of each part of each tensor that was pulled."""
        self._into, self._copied = into, copied
        self._staging: Staging | None = None

    def pull(self, reader: WeightReader, want: Version | None = None) -> ProvedWeights:
        """Bring the tensors to `want` or, if it is gone or for None, to the newest weights, by
        changes if possible. Raises `ManifestMismatch` if they are not the manifest's, and what the
        reader raises."""
        pulled = or_newer(partial(self.pull_part, reader), want)
        self.holds = None  # if they are not the published ones
        self.holds = prove(reader.manifest, [pulled])
        return self.holds

    def pull_part(self, reader: WeightReader, want: Version | None) -> PulledParts:
        """Pull what this process has of the tensors, of no other weights; proved elsewhere."""
        held, self.holds = self.holds, None
        if isinstance(self._into, Mapping):
            require(reader.manifest, self._into)
            whole = {
                spec.name: [SlabPlace(spec, Slab(0, spec.num_bytes), self._into[spec.name])]
                for spec in reader.manifest
            }
            self._into = lambda spec: whole[spec.name]
        for _ in range(_MAX_OVERTAKEN):
            try:
                pulled = self._apply(reader.update(held, want))
            except Overtaken:
                held = None  # pull whole tensors
                continue
            self.holds = pulled.weights
            return pulled
        raise RuntimeError(f"overtaken by publications {_MAX_OVERTAKEN} times during one pull")

    def _staging_of(self, place: SlabPlace) -> Staging:
        self._staging = self._staging or Staging(place.device)
        assert place.device == self._staging.device, "weights of a process are on one device"
        return self._staging

    def _apply(self, update: Update) -> PulledParts:
        places_of = self._into
        assert callable(places_of)
        specs = {spec.name: spec for spec in update.manifest}
        hashes: list[tuple[str, Slab, bool, Hash]] = []  # whether it is of the whole place
        for name, first, listed in update.listed:
            for place in places_of(specs[name]):
                added = place.put(first, listed, self._staging_of(place))
                hashes.append((name, place.slab, False, added))
        for name, rows in update.whole:
            progress.advance()
            for place in places_of(specs[name]):
                found = place.copy(rows, self._staging_of(place))
                hashes.append((name, place.slab, True, found))
            self._copied(name)
        digests = as_ints([each for *_, each in hashes])
        for (name, slab, is_whole, _), digest in zip(hashes, digests, strict=True):
            held = self.digests.get(name, {})
            before = 0 if is_whole else held[slab]
            self.digests[name] = {**held, slab: (before + digest) & MASK}
        held_of_all = [self.digests[spec.name] for spec in update.manifest]
        return PulledParts(update.weights, update.digests(), held_of_all)


def or_newer(pull: Callable[[Version | None], PulledParts], want: Version | None) -> PulledParts:
    """Call `pull` with `want` or, if that is gone, for the newest weights."""
    try:
        return pull(want)
    except VersionUnavailable:
        if want is None:
            raise
        pulled = pull(None)
        assert pulled.weights.version > want, "a version is published before it is pulled"
        return pulled
