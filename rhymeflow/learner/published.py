"""What of a model is published as a version of the policy: parameters and buffers, by name."""

from __future__ import annotations

import torch
from torch import Tensor
from transformers import PreTrainedModel

from rhymeflow.learner.ranks import ALONE, Gathering, Ranks
from rhymeflow.models.buffers import published_buffers
from rhymeflow.models.frozen_base import NAME, FrozenBase
from rhymeflow.models.lora import versioned
from rhymeflow.weights.manifest import Manifest, plan


def manifest_for(
    model: PreTrainedModel, dtype: torch.dtype, base: FrozenBase | None = None
) -> Manifest:
    """Describe the tensors: parameters in `dtype`, tied ones once, and buffers; with an adapter on
    a `base` its parameters, and the checksum of the base."""
    tensors = {name: (each.shape, dtype) for name, each in versioned(model).items()}
    buffers = _beside(model, dtype, base)
    return plan(tensors | {name: (each.shape, each.dtype) for name, each in buffers.items()})


def rows(
    model: PreTrainedModel, dtype: torch.dtype, ranks: Ranks, base: FrozenBase | None = None
) -> Gathering:
    """Return this rank's rows of the tensors, live ones or made as they are looked up; not a
    collective."""
    parameters, beside = versioned(model), _beside(model, dtype, base).items()
    own = {name: each[ranks.rows(len(each))] for name, each in beside}
    return Gathering(model, lambda name: ranks.local(parameters[name]), dtype, ALONE, others=own)


def _beside(
    model: PreTrainedModel, dtype: torch.dtype, base: FrozenBase | None
) -> dict[str, Tensor]:
    """Return what is published beside parameters."""
    return published_buffers(model, dtype) if base is None else {NAME: base.checksum}
