"""Pulls weights into tensors, in place and proved.

Digests are those of the tensors themselves: taken from a tensor after it was copied whole, updated
where changes are put into it, and kept otherwise. After an error the tensors are undefined.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from functools import lru_cache, partial

import numpy as np
import torch
from torch import Tensor

from rhymeflow.core.types import Version
from rhymeflow.utils import progress
from rhymeflow.weights.base import Overtaken, Update, VersionUnavailable, WeightReader
from rhymeflow.weights.changes import Listed
from rhymeflow.weights.manifest import require
from rhymeflow.weights.proof import (
    HASH_BLOCK,
    INNER,
    MASK,
    ProvedWeights,
    bytes_of,
    copy_and_digest,
    digest,
    outer,
)

_MAX_OVERTAKEN = 1000
"""It takes two publications to overtake a reader once: after so many times they never pause."""


class Installation:
    """Tensors into which weights are pulled, and their digests.

    Nothing else may change or move them, since pulls build on their content.
    """

    def __init__(self, into: Mapping[str, Tensor]) -> None:
        self.holds: ProvedWeights | None = None
        """The proved weights in them; None: they are undefined."""
        self.digests: dict[str, int] = {}
        """Digest of each tensor that was pulled."""
        self._into = into
        self._views: dict[str, np.ndarray | None] = {}

    def pull(self, reader: WeightReader, want: Version | None = None) -> ProvedWeights:
        """Bring the tensors to `want`, or to the newest weights for None, by changes if possible.
        Raises `ManifestMismatch` if they are not the manifest's, and what the reader raises."""
        held, self.holds = self.holds, None
        if held is None:
            require(reader.manifest, self._into)

        def pull(want: Version | None) -> ProvedWeights:
            nonlocal held
            update, held = reader.update(held, want), None  # if overtaken, pull whole tensors
            return self._apply(update)

        self.holds = until_whole(pull, want)
        return self.holds

    def pull_at_least(self, reader: WeightReader, want: Version | None) -> ProvedWeights:
        """Bring the tensors to `want` or, if it is gone, the newest weights; see `pull`."""
        return or_newer(partial(self.pull, reader), want)

    def _apply(self, update: Update) -> ProvedWeights:
        from rhymeflow.weights.kernels import put_changes  # loads numba

        for name, listed in update.listed:
            view = self._view(name)
            if view is not None:
                added = int(put_changes(view.view(np.uint16), *listed, INNER))
            else:
                added = put_on_device(self._into[name], listed)
            self.digests[name] = (self.digests[name] + added) & MASK
        for name, data in update.whole:
            self._copy(name, data)
        return update.prove(self.digests)

    def _view(self, name: str) -> np.ndarray | None:
        """Return a view of the tensor's bytes; None unless they are contiguous CPU memory."""
        if name not in self._views:
            tensor = self._into[name]
            is_in_place = tensor.device.type == "cpu" and tensor.is_contiguous()
            self._views[name] = bytes_of(tensor) if is_in_place else None
        return self._views[name]

    def _copy(self, name: str, data: np.ndarray) -> None:
        progress.advance()
        view, target = self._view(name), self._into[name].detach()
        if view is not None:
            self.digests[name] = copy_and_digest(view, data)
            return
        if len(data):
            target.copy_(torch.from_numpy(data.copy()).view(target.dtype).reshape(target.shape))
        on_cpu = target.device.type == "cpu" or target.itemsize == 1
        self.digests[name] = digest(bytes_of(target)) if on_cpu else digest_on_device(target)


def until_whole(
    pull: Callable[[Version | None], ProvedWeights], want: Version | None
) -> ProvedWeights:
    """Call `pull` until no publication overtakes it."""
    for _ in range(_MAX_OVERTAKEN):
        try:
            return pull(want)
        except Overtaken:
            continue
    raise RuntimeError(f"overtaken by publications {_MAX_OVERTAKEN} times during one pull")


def or_newer(
    pull: Callable[[Version | None], ProvedWeights], want: Version | None
) -> ProvedWeights:
    """Call `pull` with `want` or, if that is gone, for the newest weights."""
    try:
        return pull(want)
    except VersionUnavailable:
        if want is None:
            raise
        pulled = pull(None)
        assert pulled.version > want, "a version is published before it is pulled"
        return pulled


# -- The loops of `kernels.py` in torch, for tensors that are not contiguous CPU memory ------------
# Results are the same to the bit: int64 sums and products wrap around as those of uint64.

_AT_A_TIME = 1 << 24
"""Units that are hashed at a time; each takes 16 bytes of working memory."""


def digest_on_device(tensor: Tensor, at_a_time: int = _AT_A_TIME) -> int:
    """Return `proof.digest` of a tensor, whose numbers have two bytes or more, on its device."""
    units_U, total = _units(tensor.contiguous()), 0
    for start in range(0, len(units_U), at_a_time):
        part_U = units_U[start : start + at_a_time]
        index_U = torch.arange(start, start + len(part_U), device=tensor.device)
        total += int((_keys(index_U) * _unsigned(part_U)).sum())
    return total & MASK


def put_on_device(tensor: Tensor, listed: Listed) -> int:
    """Apply changes to a tensor on its device; return what that adds to its digest."""
    if not tensor.is_contiguous():
        dense = tensor.detach().contiguous()
        added = put_on_device(dense, listed)
        tensor.detach().copy_(dense)
        return added
    blocks = np.arange(len(listed.counts), dtype=np.int64) * 65_536
    index = np.repeat(blocks, listed.counts) + listed.places
    index_N = torch.from_numpy(index).to(tensor.device)
    values_N = torch.from_numpy(listed.values.view(np.int16).copy()).to(tensor.device)
    units_U = _units(tensor)
    change_N = _unsigned(values_N) - _unsigned(units_U[index_N])
    units_U[index_N] = values_N
    return int((_keys(index_N) * change_N).sum()) & MASK


def _units(tensor: Tensor) -> Tensor:
    return tensor.detach().reshape(-1).view(torch.int16)


def _unsigned(units_N: Tensor) -> Tensor:
    return units_N.long() & 0xFFFF


def _keys(index_N: Tensor) -> Tensor:
    inner, outer_keys = _tables(str(index_N.device), int(index_N.max()) // HASH_BLOCK + 1)
    return inner[index_N % HASH_BLOCK] * outer_keys[index_N // HASH_BLOCK]


@lru_cache(4)
def _tables(device: str, num_blocks: int) -> tuple[Tensor, Tensor]:
    def on_device(table: np.ndarray) -> Tensor:
        return torch.from_numpy(table.view(np.int64)).to(device)

    return on_device(INNER), on_device(outer(0, num_blocks))
