"""One attention function for unconverted Hugging Face models, with the arithmetic plugged in.

The model runs on one packed row of tokens [1, T] of any number of sequences, with explicit
position ids, so projections and MLPs are dense over T and nothing is padded. What a token may
attend to is not the model's business: its caller puts an `Attention` in place for the
duration of the call (the engine's attends through its KV cache, the learner's within each packed
sequence).

    model = load with attn_implementation=NAME
    with attending(attention):
        model(input_ids=x_1T, position_ids=positions_1T, use_cache=False)

Source: the interface is transformers' `AttentionInterface` / `AttentionMaskInterface`.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from contextvars import ContextVar
from typing import Any, Protocol

from torch import Tensor, nn
from transformers import AttentionInterface
from transformers.masking_utils import AttentionMaskInterface

NAME = "rhymeflow"


class Attention(Protocol):
    """Attends for one packed row of tokens."""

    def attend(
        self, layer: int, q_HTD: Tensor, k_GTD: Tensor, v_GTD: Tensor, scale: float
    ) -> Tensor:
        """Return [T, H, D] for queries [H, T, D], keys and values [G, T, D] (G divides H).

        Rotary positions are already applied. `layer` counts from 0.
        """
        ...


_current: ContextVar[Attention] = ContextVar("attention")


@contextmanager
def attending(attention: Attention) -> Iterator[None]:
    """Use `attention` in every layer of model calls made inside the block."""
    token = _current.set(attention)
    try:
        yield
    finally:
        _current.reset(token)


def _attention_function(
    module: nn.Module,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attention_mask: Tensor | None,
    scaling: float | None = None,
    **kwargs: Any,
) -> tuple[Tensor, None]:
    if kwargs.get("sliding_window") or kwargs.get("softcap") or kwargs.get("s_aux") is not None:
        raise NotImplementedError(
            "models with sliding-window, soft-capped or sink attention are not supported yet"
        )
    scale = scaling if scaling is not None else query.shape[-1] ** -0.5
    # Not [0]: its gradient is copied into zeros, and the copy lies in memory as [H, T, D].
    q_HTD, k_GTD, v_GTD = (x.squeeze(0) for x in (query, key, value))
    out_THD = _current.get().attend(module.layer_idx, q_HTD, k_GTD, v_GTD, scale)
    return out_THD.unsqueeze(0), None


def _no_mask(*args: Any, **kwargs: Any) -> None:
    """The plugged-in attention knows what may be seen; a [T, T] mask is never built."""
    return None


AttentionInterface.register(NAME, _attention_function)
AttentionMaskInterface.register(NAME, _no_mask)


__all__ = ["NAME", "Attention", "attending"]
