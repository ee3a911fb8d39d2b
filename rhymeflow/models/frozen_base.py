"""The proof of the weights under an adapter, which are not published (law 5).

Learner and engine read them from the model's files, each by itself. The checksum of the learner's
is published with each version, and the engine's must have it. Both hash theirs again, a part with
each version, to find what has changed them since.
"""

from __future__ import annotations

from collections.abc import Mapping

import torch
from torch import Tensor
from transformers import PreTrainedModel

from rhymeflow.models.lora import unversioned
from rhymeflow.weights.manifest import Slab, manifest_of
from rhymeflow.weights.on_device import as_ints, hash_of
from rhymeflow.weights.proof import ChecksumMismatch, combine

NAME = "base_checksum"
"""Name under which the checksum is published."""
PARTS = 16
"""Versions in which all tensors are hashed again."""


class FrozenBase:
    """The parameters of `model` that no version changes, and their digests."""

    def __init__(self, model: PreTrainedModel) -> None:
        self._tensors = {name: each.detach() for name, each in unversioned(model).items()}
        self._digests = dict(zip(self._tensors, _digests(self._tensors), strict=True))
        self._num_checked = 0
        checksum = combine(manifest_of(self._tensors), list(self._digests.values()))
        signed = checksum - (1 << 64) if checksum >> 63 else checksum
        self.checksum = torch.tensor([signed], device=model.device)
        """As it is published, [1] int64."""

    def require(self, published: Tensor) -> None:
        """Raise `ChecksumMismatch` unless the learner's weights are these."""
        if not torch.equal(published, self.checksum):
            raise ChecksumMismatch(
                "the weights under the adapter are not the learner's: each process reads them from "
                "model.name, whose files differ or have changed"
            )

    def check_part(self) -> None:
        """Hash the next of `PARTS` parts again. Raises `ChecksumMismatch` if it has changed."""
        part = list(self._tensors)[self._num_checked % PARTS :: PARTS]
        self._num_checked += 1
        require_unchanged({name: self._tensors[name] for name in part}, self._digests)


def require_unchanged(tensors: Mapping[str, Tensor], digests: Mapping[str, int]) -> None:
    """Raise `ChecksumMismatch` if tensors no longer have these digests."""
    found = zip(tensors, _digests(tensors), strict=True)
    if changed := [name for name, digest in found if digest != digests[name]]:
        raise ChecksumMismatch(
            f"{len(changed)} of {len(tensors)} tensors have changed in place since they were "
            f"proved, first {changed[0]}"
        )


def _digests(tensors: Mapping[str, Tensor]) -> list[int]:
    return as_ints([hash_of(each, Slab(0, each.nbytes)) for each in tensors.values()])
