"""Layers that carry a state from token to token: linear attention, state spaces, convolutions.

On a packed row the state would pass from one sequence into the next. transformers tells some types'
layers of boundaries, by `seq_idx` or `cu_seqlens`, which need kernels of other packages. So here a
layer computes the sequences as a batch, which every kernel can: each begins without a state."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from contextvars import ContextVar
from types import MethodType
from typing import Any, Protocol

from torch import Tensor, nn
from transformers import PreTrainedModel

from rhymeflow.models.families import FAMILIES, ModelFamily


class Batches(Protocol):
    """The sequences of a packed row of T tokens, as batches."""

    def gather(self, x_TE: Tensor) -> list[Tensor]:
        """Return [B, L, ...] for each batch, with padding after each sequence."""
        ...

    def scatter(self, blocks_BLE: Sequence[Tensor]) -> Tensor:
        """Return [T, ...] from what was computed for each batch, [B, L, ...]."""
        ...


current: ContextVar[Callable[[], Batches] | None] = ContextVar("batches", default=None)
"""Makes the batches of the innermost `resetting` block. None: a row is one sequence."""


@contextmanager
def resetting(batches: Callable[[], Batches] | None) -> Iterator[None]:
    """In model calls inside the block, reset the state at the boundaries of these sequences."""
    token = current.set(batches)
    try:
        yield
    finally:
        current.reset(token)


def reset_at_boundaries(model: PreTrainedModel) -> None:
    """Have the model's layers heed `resetting`. Calling it again has no effect."""
    name = FAMILIES.get(model.config.model_type, ModelFamily()).state
    for module in model.modules():
        if type(module).__name__ == name:
            # A method, and no closure, so that copies of the model have their own.
            module.forward = MethodType(_forward, module)


def _forward(module: nn.Module, hidden_states: Tensor, **given: Any) -> Tensor:
    plain: Callable[..., Tensor] = type(module).forward
    batches = current.get()
    if batches is None:
        return plain(module, hidden_states, **given)
    for name in ("attention_mask", "cache_params", "past_key_values", "cache"):
        assert given.get(name) is None, f"{name} is not for packed rows"
    parts = batches()
    outputs = [plain(module, x_BLD, **given) for x_BLD in parts.gather(hidden_states.squeeze(0))]
    return parts.scatter(outputs).unsqueeze(0)
