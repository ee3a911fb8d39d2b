"""Gradient checkpointing for models that attend through the seam.

A layer that is recomputed in the backward pass runs when the block `attending(...)` of its forward
pass is over, on CUDA even in another thread; the attention in place is therefore remembered with
the layer's call. Knows nothing of the training step.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from contextvars import ContextVar
from functools import partial

from torch.utils.checkpoint import checkpoint
from transformers import PreTrainedModel
from transformers.modeling_layers import GradientCheckpointingLayer

from rhymeflow.models.attention import Attention, attending

_attention: ContextVar[Attention] = ContextVar("recomputed_attention")


@contextmanager
def attending_recomputably(attention: Attention) -> Iterator[None]:
    """As `attending`, and layers called in the block are recomputed with the same `attention`."""
    token = _attention.set(attention)
    try:
        with attending(attention):
            yield
    finally:
        _attention.reset(token)


def recompute_layers(model: PreTrainedModel) -> None:
    """Keep only each layer's input for the backward pass; everything else stays in eval mode."""
    for module in model.modules():
        if isinstance(module, GradientCheckpointingLayer):
            module.gradient_checkpointing = True
            module._gradient_checkpointing_func = partial(
                checkpoint, use_reentrant=False, context_fn=_contexts
            )
            # transformers checkpoints in training mode only; the flag is the layer's alone, so
            # dropout inside stays off and log-probabilities stay the engine's.
            module.training = True


def _contexts() -> tuple[AbstractContextManager[None], AbstractContextManager[None]]:
    """Contexts of a layer's forward pass and of its recomputation."""
    return nullcontext(), attending(_attention.get())


__all__ = ["attending_recomputably", "recompute_layers"]
