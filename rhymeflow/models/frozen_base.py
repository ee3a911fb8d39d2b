"""The proof of the weights under an adapter, which are not published (law 5).

Learner and engine read them from the model's files, each by itself. The checksum of the learner's
is published with each version, and the engine's must have it. Both hash theirs again, a part with
each version, to find what has changed them since.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING

import torch
from torch import Tensor
from transformers import PreTrainedModel

from rhymeflow.models.buffers import published_buffers
from rhymeflow.models.lora import unversioned
from rhymeflow.weights.manifest import plan
from rhymeflow.weights.proof import ChecksumMismatch
from rhymeflow.weights.publish import checksum_of, row_digests

if TYPE_CHECKING:
    from rhymeflow.learner.ranks import Ranks

NAME = "base_checksum"
"""Name under which the checksum is published."""
PARTS = 16
"""Versions in which all tensors are hashed again."""


class FrozenBase:
    """The parameters and buffers of `model` that no version changes, or this rank's rows of them,
    and their digests. With several `ranks`, which have the model's rows, making it is a
    collective."""

    def __init__(self, model: PreTrainedModel, ranks: Ranks | None = None) -> None:
        base: dict[str, Tensor] = dict(unversioned(model))
        buffers = published_buffers(model, next(iter(base.values())).dtype)
        whole = (base | buffers).items()
        self._manifest = plan({name: (each.shape, each.dtype) for name, each in whole})
        self._ranks = ranks
        if ranks is None:
            self._tensors = {name: each.detach() for name, each in whole}
        else:
            self._tensors = {name: ranks.local(each) for name, each in base.items()}
            self._tensors |= {n: each[ranks.rows(len(each))] for n, each in buffers.items()}
        digests = row_digests(self._manifest, self._tensors, ranks)
        self._digests = dict(zip(self._tensors, digests, strict=True))
        self._num_checked = 0
        checksum = checksum_of(self._manifest, digests, ranks)
        signed = checksum - (1 << 64) if checksum >> 63 else checksum
        self.checksum = torch.tensor([signed], device=model.device)
        """As it is published, [1] int64."""

    def check_part(self) -> None:
        """Hash the next of `PARTS` parts again. Raises `ChecksumMismatch` if it has changed."""
        part = self._manifest[self._num_checked % PARTS :: PARTS]
        self._num_checked += 1
        found = row_digests(part, self._tensors, self._ranks)
        require_unchanged({spec.name: self._digests[spec.name] for spec in part}, found)


def require_base(published: Tensor, own: Tensor) -> None:
    """Raise `ChecksumMismatch` unless the learner's weights are those of this checksum."""
    if not torch.equal(published, own):
        raise ChecksumMismatch(
            "the weights under the adapter are not the learner's: each process reads them from "
            "model.name, whose files differ or have changed"
        )


def require_unchanged(digests: Mapping[str, int], found: Sequence[int]) -> None:
    """Raise `ChecksumMismatch` if `found`, in the same order, are not the tensors' `digests`."""
    pairs = zip(digests.items(), found, strict=True)
    if changed := [name for (name, digest), now in pairs if digest != now]:
        raise ChecksumMismatch(
            f"{len(changed)} of {len(digests)} tensors have changed in place since they were "
            f"proved, first {changed[0]}"
        )
