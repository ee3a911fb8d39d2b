"""What of a model is published as a version of the policy: parameters and buffers, by name."""

from __future__ import annotations

import torch
from transformers import PreTrainedModel

from rhymeflow.learner.ranks import ALONE, Gathering, Ranks
from rhymeflow.models.buffers import published_buffers
from rhymeflow.weights.manifest import Manifest, plan


def manifest_for(model: PreTrainedModel, dtype: torch.dtype) -> Manifest:
    """Describe the tensors: parameters in `dtype`, tied ones once, and buffers."""
    tensors = {name: (each.shape, dtype) for name, each in model.named_parameters()}
    buffers = published_buffers(model, dtype)
    return plan(tensors | {name: (each.shape, each.dtype) for name, each in buffers.items()})


def rows(model: PreTrainedModel, dtype: torch.dtype, ranks: Ranks) -> Gathering:
    """Return this rank's rows of the tensors, live ones or made as they are looked up; not a
    collective."""
    parameters, buffers = dict(model.named_parameters()), published_buffers(model, dtype).items()
    own = {name: each[ranks.rows(len(each))] for name, each in buffers}
    return Gathering(model, lambda name: ranks.local(parameters[name]), dtype, ALONE, others=own)
