"""Which attention the learner computes with: `learner.attention`, on this device and model.

Holds true: all of them give the same numbers up to float rounding. Knows nothing of rows.
"""

from __future__ import annotations

import torch
from transformers import PreTrainedModel

from rhymeflow.config import LearnerConfig
from rhymeflow.cpu import choice
from rhymeflow.errors import UserError
from rhymeflow.learner.attention import PackedAttention
from rhymeflow.learner.cpu_attention import CpuPackedAttention
from rhymeflow.learner.flex_attention import FlexAttention
from rhymeflow.models.attention import Shape

AttentionKind = type[PackedAttention] | type[CpuPackedAttention] | type[FlexAttention]


def attention_kind(learner: LearnerConfig, model: PreTrainedModel) -> AttentionKind:
    """The class whose instances attend within a packed row. `UserError` as by `check_attention`."""
    check_attention(learner, model.device)
    if learner.attention == "flex":
        return FlexAttention
    is_compiled = choice.has_packed_attention(
        model.device, model.dtype, Shape.of(model.config).head_dim
    )
    return CpuPackedAttention if learner.attention == "auto" and is_compiled else PackedAttention


def check_attention(learner: LearnerConfig, device: torch.device) -> None:
    """Raise `UserError` if the learner's attention has no backward pass on this device."""
    if learner.attention == "flex" and device.type == "cpu":
        raise UserError(
            "learner.attention = 'flex' needs a GPU (PyTorch's FlexAttention has no backward pass "
            "on CPUs); leave it out, or use 'auto'"
        )


__all__ = ["AttentionKind", "attention_kind", "check_attention"]
