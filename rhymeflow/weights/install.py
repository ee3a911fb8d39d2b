"""Pulling weights into tensors, in place and proved.

What is proved is what stands in the tensors: of what a pull writes, as it stands there afterwards;
of what it does not touch, as it was proved when it was written. After an error the tensors hold
anything.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from functools import partial

import numpy as np
import torch
from torch import Tensor

from rhymeflow.core.types import Version
from rhymeflow.utils import progress
from rhymeflow.weights import on_device
from rhymeflow.weights.base import Overtaken, Update, VersionUnavailable, WeightReader
from rhymeflow.weights.manifest import require
from rhymeflow.weights.proof import INNER, MASK, Pulled, bytes_of, copy_and_digest

_MAX_OVERTAKEN = 1000
"""A reader is overtaken once per two publications; more often means that they never pause."""


class Installation:
    """Tensors that weights are pulled into, and what they hold.

    They must not be changed by anybody else, nor moved: what is known of them is built upon.
    """

    def __init__(self, into: Mapping[str, Tensor]) -> None:
        self.holds: Pulled | None = None
        """What was proved of them; None: they hold anything."""
        self.digests: dict[str, int] = {}
        """Of each tensor, as far as it was pulled."""
        self._into = into
        self._places: dict[str, np.ndarray | None] = {}

    def pull(self, reader: WeightReader, want: Version | None = None) -> Pulled:
        """Bring `want`, or the newest weights for None, into the tensors.

        Only what differs from what they hold, where the reader knows it. Raises `ManifestMismatch`
        if they are not the manifest's tensors, and else as the reader.
        """
        held, self.holds = self.holds, None
        if held is not None:
            update = reader.changes(held, want)
            if update is not None:
                try:
                    self.holds = self._update(reader, update)
                    return self.holds
                except Overtaken:
                    pass  # all anew
        require(reader.manifest, self._into)
        self.holds = until_whole(partial(self._pull, reader), want)
        return self.holds

    def pull_at_least(self, reader: WeightReader, want: Version | None) -> Pulled:
        """Bring `want` or, if it is there no longer, the newest weights; see `pull`."""
        return or_newer(partial(self.pull, reader), want)

    def _pull(self, reader: WeightReader, want: Version | None) -> Pulled:
        self.digests = {}
        for tensor in reader.pull(want):
            self._copy(*tensor)
        return reader.prove(self.digests)

    def _update(self, reader: WeightReader, update: Update) -> Pulled:
        from rhymeflow.weights.kernels import put_changes  # loads numba

        for step in update.steps:
            for name, listed in step.items():
                place = self._place(name)
                if place is not None:
                    more = int(put_changes(place.view(np.uint16), *listed, INNER))
                else:
                    more = on_device.put_changes(self._into[name], listed)
                self.digests[name] = (self.digests[name] + more) & MASK
        for tensor in update.whole:
            self._copy(*tensor)
        return reader.prove(self.digests)

    def _place(self, name: str) -> np.ndarray | None:
        """The tensor's bytes in place; None if they are not in one piece of the CPU's memory."""
        if name not in self._places:
            tensor = self._into[name]
            is_in_place = tensor.device.type == "cpu" and tensor.is_contiguous()
            self._places[name] = bytes_of(tensor) if is_in_place else None
        return self._places[name]

    def _copy(self, name: str, data: np.ndarray) -> None:
        progress.advance()
        place, target = self._place(name), self._into[name].detach()
        if place is not None:
            self.digests[name] = copy_and_digest(place, data)
            return
        if len(data):
            target.copy_(torch.from_numpy(data.copy()).view(target.dtype).reshape(target.shape))
        self.digests[name] = on_device.digest(target)


def until_whole(pull: Callable[[Version | None], Pulled], want: Version | None) -> Pulled:
    """`pull` this, again as often as publications overtake it."""
    for _ in range(_MAX_OVERTAKEN):
        try:
            return pull(want)
        except Overtaken:
            continue
    raise RuntimeError(f"overtaken by publications {_MAX_OVERTAKEN} times during one pull")


def or_newer(pull: Callable[[Version | None], Pulled], want: Version | None) -> Pulled:
    """`pull` this or, if it is there no longer, the newest weights."""
    try:
        return pull(want)
    except VersionUnavailable:
        if want is None:
            raise
        pulled = pull(None)
        assert pulled.version > want, "a version is published before it is pulled"
        return pulled
