"""One attention function for unconverted Hugging Face models, with the arithmetic plugged in.

The model runs on one packed row of tokens [1, T] of any number of sequences, with explicit position
ids. The caller decides what a token may attend to, by an `Attention` that is in force during the
call (`attending`). A model whose attention has more (its own mask, a window, sinks) is refused. The
interface is transformers' `AttentionInterface`.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from contextvars import ContextVar
from typing import Any, NamedTuple, Protocol

from torch import Tensor, nn
from transformers import AttentionInterface, PreTrainedConfig

from rhymeflow.errors import UserError

NAME = "rhymeflow"

_HARMLESS = {"dropout", "position_ids", "use_cache", "output_attentions"}
"""Arguments of a model's attention that may be ignored, if `dropout` is 0; others must be None."""


class Shape(NamedTuple):
    """The shape of a model's keys and values, as a cache holds them."""

    layers: int
    kv_heads: int
    head_dim: int

    @classmethod
    def of(cls, config: PreTrainedConfig) -> Shape:
        """Read it from a model's configuration."""
        text = config.get_text_config()
        heads = text.num_attention_heads
        return cls(
            text.num_hidden_layers,
            getattr(text, "num_key_value_heads", None) or heads,
            getattr(text, "head_dim", None) or text.hidden_size // heads,
        )


class Attention(Protocol):
    """Computes attention for one packed row of tokens."""

    cache_shape: Shape | None = None
    """The shape that keys and values must have to fit its cache; each layer must call it once, in
    order. None: it has no cache, and takes any."""
    num_layers_called: int = 0
    """Number of layers that have called it, if it has a cache."""

    def attend(
        self, layer: int, q_HTD: Tensor, k_GTD: Tensor, v_GTD: Tensor, scale: float
    ) -> Tensor:
        """Return [T, H, D] for queries [H, T, D], keys and values [G, T, D] (G divides H), with
        rotary positions applied. `layer` counts from 0."""
        ...


current: ContextVar[Attention] = ContextVar("attention")
"""The attention of the innermost `attending` block."""


@contextmanager
def attending(attention: Attention) -> Iterator[None]:
    """Use `attention` in all model calls inside the block."""
    token = current.set(attention)
    try:
        yield
    finally:
        current.reset(token)


def _attention_function(
    module: nn.Module,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attention_mask: Tensor | None,
    scaling: float | None = None,
    **kwargs: Any,
) -> tuple[Tensor, None]:
    attention, arguments = current.get(), {"attention_mask": attention_mask, **kwargs}
    layer: int = module.layer_idx  # type: ignore[assignment]
    if reason := _refusal(attention, layer, query, key, value, arguments):
        kind = getattr(getattr(module, "config", None), "model_type", type(module).__name__)
        raise UserError(f"model.name: a model of type {kind!r} {reason}, which is not supported")
    scale = scaling if scaling is not None else query.shape[-1] ** -0.5
    # Not [0]: its gradient would be copied into zeros laid out as [H, T, D].
    q_HTD, k_GTD, v_GTD = (x.squeeze(0) for x in (query, key, value))
    out_THD = attention.attend(layer, q_HTD, k_GTD, v_GTD, scale)
    return out_THD.unsqueeze(0), None


def _refusal(
    attention: Attention,
    layer: int,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    arguments: dict[str, Any],
) -> str | None:
    """Return what the model needs that `attention` does not support, or None."""
    unsupported = {name for name, x in arguments.items() if x is not None} - _HARMLESS
    if arguments.get("dropout"):
        unsupported.add("dropout")
    if unsupported:
        return f"has attention with {', '.join(sorted(unsupported))}"
    (rows, heads, tokens, dim), kv_heads, value_dim = query.shape, key.shape[1], value.shape[3]
    is_plain = rows == 1 and heads % kv_heads == 0 and key.shape == (1, kv_heads, tokens, dim)
    if not is_plain or value.shape[:3] != key.shape[:3]:
        shapes = [list(x.shape[1:]) for x in (query, key, value)]
        return f"has queries, keys and values of {shapes}"
    if (required := attention.cache_shape) is None:
        return None
    if (kv_heads, dim, value_dim) != (required.kv_heads, required.head_dim, required.head_dim):
        return (
            f"has {kv_heads} heads of keys of {dim} and values of {value_dim} numbers instead of "
            f"the {required.kv_heads} of {required.head_dim} in its config.json (try "
            "rollout.engine = 'vllm')"
        )
    if not attention.num_layers_called <= layer < required.layers:
        return "attends more than once in a layer"
    attention.num_layers_called = layer + 1
    return None


# Under a name that `AttentionMaskInterface` does not know, transformers makes no mask, and does not
# look at the positions for the sequences in a row, which would wait for the device.
AttentionInterface.register(NAME, _attention_function)
