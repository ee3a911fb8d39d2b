"""One attention function for unconverted Hugging Face models, with the arithmetic plugged in.

The model runs on one packed row of tokens [1, T] of any number of sequences, with explicit
position ids, so projections and MLPs are dense over T and nothing is padded. What a token may
attend to is not the model's business: its caller puts an `Attention` in place for the
duration of the call (the engine's attends through its KV cache, the learner's within each packed
sequence).

    model = load with attn_implementation=NAME
    with attending(attention):
        model(input_ids=x_1T, position_ids=positions_1T, use_cache=False)

Holds true: whatever a model asks of its attention beyond what an `Attention` does (a mask of its
own, a window, sinks, other shapes than the cache holds) is a `UserError`, never passed over.
Source: the interface is transformers' `AttentionInterface` / `AttentionMaskInterface`.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from contextvars import ContextVar
from typing import Any, NamedTuple, Protocol

from torch import Tensor, nn
from transformers import AttentionInterface, PreTrainedConfig
from transformers.masking_utils import AttentionMaskInterface

from rhymeflow.errors import UserError

NAME = "rhymeflow"

_HARMLESS = {"dropout", "position_ids", "use_cache", "output_attentions"}
"""Arguments that models hand to their attention and that change nothing here, if `dropout` is 0;
others may only be absent or None."""


class Shape(NamedTuple):
    """Of the keys and values of a whole model, as a cache holds them."""

    layers: int
    kv_heads: int
    head_dim: int

    @classmethod
    def of(cls, config: PreTrainedConfig) -> Shape:
        """As a model's configuration says."""
        text = config.get_text_config()
        heads = text.num_attention_heads
        return cls(
            text.num_hidden_layers,
            getattr(text, "num_key_value_heads", None) or heads,
            getattr(text, "head_dim", None) or text.hidden_size // heads,
        )


class Attention(Protocol):
    """Attends for one packed row of tokens."""

    holds: Shape | None
    """The only keys and values that it can take, once in each layer, in their order; None: any."""
    reached: int
    """Layers that it has attended in, if it `holds`."""

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
    attention = _current.get()
    _check(module, attention, query, key, value, attention_mask, kwargs)
    scale = scaling if scaling is not None else query.shape[-1] ** -0.5
    # Not [0]: its gradient is copied into zeros, and the copy lies in memory as [H, T, D].
    q_HTD, k_GTD, v_GTD = (x.squeeze(0) for x in (query, key, value))
    out_THD = attention.attend(module.layer_idx, q_HTD, k_GTD, v_GTD, scale)
    return out_THD.unsqueeze(0), None


def _check(
    module: nn.Module,
    attention: Attention,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    mask: Tensor | None,
    given: dict[str, Any],
) -> None:
    """Raise `UserError` if the model asks for more than `attention` does."""
    more = [name for name, x in given.items() if x is not None and name not in _HARMLESS]
    if mask is not None:
        more.append("attention_mask")
    if given.get("dropout"):
        more.append("dropout")
    if more:
        raise UserError(f"{_kind(module)} has attention with {', '.join(sorted(more))}, {_NOT}")
    (rows, heads, tokens, dim), kv_heads = query.shape, key.shape[1]
    is_even = rows == 1 and heads % kv_heads == 0 and key.shape == (1, kv_heads, tokens, dim)
    if not is_even or value.shape[:3] != key.shape[:3]:
        shapes = [list(x.shape[1:]) for x in (query, key, value)]
        raise UserError(f"{_kind(module)} has queries, keys and values of {shapes}, {_NOT}")
    if attention.holds is not None:
        _check_held(module, attention, key, value)


def _check_held(module: nn.Module, attention: Attention, key: Tensor, value: Tensor) -> None:
    """Raise `UserError` if the cache has no place for these keys and values."""
    holds, layer = attention.holds, module.layer_idx
    assert holds is not None
    kv_heads, (key_dim, value_dim) = key.shape[1], (key.shape[3], value.shape[3])
    if (kv_heads, key_dim, value_dim) != (holds.kv_heads, holds.head_dim, holds.head_dim):
        raise UserError(
            f"{_kind(module)} has {kv_heads} heads of keys of {key_dim} and values of {value_dim} "
            f"numbers, where the cache has {holds.kv_heads} of {holds.head_dim}, as its "
            "config.json says; rollout.engine = 'native' keeps no others ('vllm' may)"
        )
    if not attention.reached <= layer < holds.layers:
        raise UserError(f"{_kind(module)} attends more than once in a layer, {_NOT}")
    attention.reached = layer + 1


_NOT = "which is not supported"


def _kind(module: nn.Module) -> str:
    config = getattr(module, "config", None)
    return f"model.name: a model of type {getattr(config, 'model_type', type(module).__name__)!r}"


def _no_mask(*args: Any, **kwargs: Any) -> None:
    """The plugged-in attention knows what may be seen; a [T, T] mask is never built."""
    return None


AttentionInterface.register(NAME, _attention_function)
AttentionMaskInterface.register(NAME, _no_mask)


__all__ = ["NAME", "Attention", "Shape", "attending"]
