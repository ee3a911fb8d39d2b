"""Where the compiled parts are used; elsewhere torch's own way is."""

from __future__ import annotations

import torch

from rhymeflow.cpu.tiles import LANES, ROWS

DTYPES = (torch.float32, torch.bfloat16)
"""Of keys and values."""


def has_attention(device: torch.device, dtype: torch.dtype, head_dim: int) -> bool:
    """Whether the engine attends through its cache by `attention`."""
    return device.type == "cpu" and dtype in DTYPES and head_dim % ROWS == 0


def has_packed_attention(device: torch.device, dtype: torch.dtype, head_dim: int) -> bool:
    """Whether the learner attends by `packed_attention`."""
    return device.type == "cpu" and dtype in DTYPES and head_dim % LANES == 0
