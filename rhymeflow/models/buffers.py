"""Tensors that are no parameters and yet come from a model's files: biases of experts' routers.

They are not trained, and are published with the weights, since an engine makes the model without
its files: in float32, as transformers keeps most of them, but single numbers, constants of
activation functions, in compute precision, as vLLM has them."""

from __future__ import annotations

import torch
from torch import Tensor
from transformers import PreTrainedModel


def buffers_of(model: PreTrainedModel) -> dict[str, Tensor]:
    """Return the tensors of the model's state dict that are not parameters, by name."""
    parameters = {name for name, _ in model.named_parameters(remove_duplicate=False)}
    return {name: each for name, each in model.state_dict().items() if name not in parameters}


def published_buffers(model: PreTrainedModel, dtype: torch.dtype) -> dict[str, Tensor]:
    """Return `buffers_of` as they are published beside weights in `dtype`: views, or copies if they
    have another precision. A single number has a row, since ranks publish rows."""
    buffers = buffers_of(model).items()
    return {name: torch.atleast_1d(each.to(_dtype(each, dtype))) for name, each in buffers}


def keep_precision(model: PreTrainedModel) -> None:
    """Give these tensors of a model in compute precision the one in which they are published."""
    for module in model.modules():
        for name, each in module.named_buffers(recurse=False):
            if name not in module._non_persistent_buffers_set:
                setattr(module, name, each.to(_dtype(each, model.dtype)))


def _dtype(buffer: Tensor, dtype: torch.dtype) -> torch.dtype:
    if not buffer.is_floating_point():
        return buffer.dtype
    return torch.float32 if buffer.ndim else dtype
