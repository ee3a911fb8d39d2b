"""Pulls weights into tensors, in place and proved.

Digests are those of the tensors themselves: taken from a tensor after it was copied whole, updated
where changes are put into it, and kept otherwise. After an error the tensors are undefined.
"""

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
        self.view: np.ndarray | None = None
        """Its bytes, [runs, length], in the host's memory."""
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
        """Apply changes of rows that begin at byte `first` of the tensor; return what that adds to
        the digest."""
        from rhymeflow.weights.kernels import put_changes  # loads numba

        if self.view is not None and self._is_whole:
            return int(put_changes(self.view[0].view(np.uint16), *listed, INNER, first // 2))
        rows_RN, write = self._dense()
        is_whole = self._is_whole
        added = put_on_device(rows_RN, self.slab, listed, first, staging, is_whole=is_whole)
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
    """Tensors, or parts of them, into which weights are pulled, and their digests.

    Nothing else may change or move them, since pulls build on their content.
    """

    def __init__(self, into: Mapping[str, Tensor] | Mapping[str, Sequence[SlabPlace]]) -> None:
        """`into` has the manifest's tensors, or all places where the process has parts of them."""
        self.holds: ProvedWeights | None = None
        """The weights in them; None: they are undefined."""
        self.digests: dict[str, dict[Slab, int]] = {}
        """Digest of each part of each tensor that was pulled."""
        self._into = into
        self._places: dict[str, Sequence[SlabPlace]] = {}
        self._staging = Staging(torch.device("cpu"))

    def pull(self, reader: WeightReader, want: Version | None = None) -> ProvedWeights:
        """Bring the tensors to `want`, or to the newest weights for None, by changes if possible.
        Raises `ManifestMismatch` if they are not the manifest's, and what the reader raises."""
        return self._proved(reader, self.pull_part(reader, want))

    def pull_at_least(self, reader: WeightReader, want: Version | None) -> ProvedWeights:
        """Bring the tensors to `want` or, if it is gone, the newest weights; see `pull`."""
        return self._proved(reader, or_newer(partial(self.pull_part, reader), want))

    def _proved(self, reader: WeightReader, pulled: PulledParts) -> ProvedWeights:
        self.holds = None  # if they are not the published ones
        self.holds = prove(reader.manifest, [pulled])
        return self.holds

    def pull_part(self, reader: WeightReader, want: Version | None) -> PulledParts:
        """Pull, as `pull` does, what this process has of the tensors; proved elsewhere."""
        held, self.holds = self.holds, None
        if held is None:
            self._find_places(reader)

        def pull(want: Version | None) -> PulledParts:
            nonlocal held
            update, held = reader.update(held, want), None  # if overtaken, pull whole tensors
            return self._apply(update)

        pulled = until_whole(pull, want)
        self.holds = pulled.weights
        return pulled

    def _find_places(self, reader: WeightReader) -> None:
        tensors = {name: each for name, each in self._into.items() if isinstance(each, Tensor)}
        if tensors or not self._into:
            require(reader.manifest, tensors)
        for spec in reader.manifest:
            place = self._into[spec.name]
            if isinstance(place, Tensor):
                place = [SlabPlace(spec, Slab(0, spec.num_bytes), place)]
            self._places[spec.name] = place
        devices = {each.device for places in self._places.values() for each in places}
        assert len(devices) <= 1, f"weights of one process are on one device, not {devices}"
        self._staging = Staging(devices.pop() if devices else torch.device("cpu"))

    def _apply(self, update: Update) -> PulledParts:
        hashes: list[tuple[str, Slab, bool, Hash]] = []  # whether it is of the whole place
        for name, first, listed in update.listed:
            for place in self._places[name]:
                added = place.put(first, listed, self._staging)
                hashes.append((name, place.slab, False, added))
        for name, rows in update.whole:
            progress.advance()
            for place in self._places[name]:
                hashes.append((name, place.slab, True, place.copy(rows, self._staging)))
        found = as_ints([each for *_, each in hashes])
        for (name, slab, is_whole, _), digest in zip(hashes, found, strict=True):
            held = self.digests.get(name, {})
            before = 0 if is_whole else held[slab]
            self.digests[name] = {**held, slab: (before + digest) & MASK}
        held_of_all = [self.digests[spec.name] for spec in update.manifest]
        return PulledParts(update.weights, update.digests(), held_of_all)


def until_whole(pull: Callable[[Version | None], PulledParts], want: Version | None) -> PulledParts:
    """Call `pull` until no publication overtakes it."""
    for _ in range(_MAX_OVERTAKEN):
        try:
            return pull(want)
        except Overtaken:
            continue
    raise RuntimeError(f"overtaken by publications {_MAX_OVERTAKEN} times during one pull")


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
