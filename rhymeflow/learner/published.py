"""What of a model is published as a version of the policy: parameters and buffers, by name."""

from __future__ import annotations

import torch
from torch import Tensor
from transformers import PreTrainedModel

from rhymeflow.learner.ranks import ALONE, Gathering, Ranks
from rhymeflow.models.buffers import published_buffers
from rhymeflow.weights.manifest import Manifest, plan


def manifest_for(model: PreTrainedModel, dtype: torch.dtype) -> Manifest:
    """Describe the tensors: parameters in `dtype`, tied ones once, and buffers."""
    tensors = {name: (each.shape, dtype) for name, each in model.named_parameters()}
    buffers = published_buffers(model, dtype)
    return plan(tensors | {name: (each.shape, each.dtype) for name, each in buffers.items()})


def whole(model: PreTrainedModel, dtype: torch.dtype, ranks: Ranks) -> Gathering:
    """Return the tensors, the live ones or gathered from them on rank 0."""
    return _gathering(model, dtype, ranks, ranks, published_buffers(model, dtype))


def rows(model: PreTrainedModel, dtype: torch.dtype, ranks: Ranks) -> Gathering:
    """Return this rank's rows of the tensors, made as they are looked up; not a collective."""
    buffers = published_buffers(model, dtype).items()
    own = {name: each[ranks.rows(len(each))] for name, each in buffers}
    return _gathering(model, dtype, ranks, ALONE, own)


def _gathering(
    model: PreTrainedModel,
    dtype: torch.dtype,
    ranks: Ranks,
    among: Ranks,
    buffers: dict[str, Tensor],
) -> Gathering:
    parameters = dict(model.named_parameters())

    def local(name: str) -> Tensor:
        return ranks.local(parameters[name])

    return Gathering(model, local, dtype, among, others=buffers)
