"""One attention function for unconverted Hugging Face models, with the arithmetic plugged in.

The model runs on one packed row of tokens [1, T] of any number of sequences, with explicit position
ids. The caller decides which sequences a token is in, by an `Attention` that is in force during the
call (`attending`); the model says by `Weighing` how its layer weighs their tokens. A model whose
attention has more (its own mask, biases) is refused. The interface is transformers'
`AttentionInterface`.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from contextvars import ContextVar
from typing import Any, NamedTuple, Protocol

import torch.nn.functional as F
from torch import Tensor, nn
from transformers import AttentionInterface, PreTrainedConfig, PreTrainedModel

from rhymeflow.errors import UserError

NAME = "rhymeflow"

_HARMLESS = {"dropout", "position_ids", "use_cache", "output_attentions"}
"""Arguments of a model's attention that may be ignored, if `dropout` is 0; others must be None."""


class Reach(NamedTuple):
    """How far back a token attends in one layer."""

    window: int | None = None
    """To itself and the `window` - 1 tokens before it. None: no limit."""
    chunk: int | None = None
    """Within its chunk; a sequence is cut into chunks of so many tokens. None: no limit."""

    def first(self, position: int) -> int:
        """Return the first position to which a token at `position` attends."""
        after_window = 0 if self.window is None else position - self.window + 1
        return max(
            0, after_window, 0 if self.chunk is None else position // self.chunk * self.chunk
        )

    def sees(self, query: Any, key: Any) -> Any:
        """Return whether a token at position `query` attends to one at `key`, elementwise."""
        seen = key <= query
        if self.window is not None:
            seen = seen & (key > query - self.window)
        if self.chunk is not None:
            seen = seen & (key // self.chunk == query // self.chunk)
        return seen

    @classmethod
    def of(cls, text: PreTrainedConfig, layer: int) -> Reach:
        """Read a layer's from a text model's configuration, as transformers makes its masks."""
        kinds, window = getattr(text, "layer_types", None), getattr(text, "sliding_window", None)
        if not kinds:  # the same in every layer
            is_used = getattr(text, "use_sliding_window", None) is not False
            return cls(window=(window or None) if is_used else None)
        if kinds[layer] == "chunked_attention":
            return cls(chunk=text.attention_chunk_size)
        return cls(window=window if kinds[layer] == "sliding_attention" else None)


class Weighing(NamedTuple):
    """How a layer weighs the tokens that a query attends to: by the softmax of `scale` times the
    products of query and keys."""

    scale: float
    reach: Reach = Reach()
    cap: float | None = None
    """Scores x become cap * tanh(x / cap) (Gemma 2, arXiv 2408.00118, section 2)."""
    sink_H: Tensor | None = None
    """For each query head, the score of one more token, whose value is 0 (gpt-oss's sinks)."""

    @property
    def is_plain(self) -> bool:
        """Whether scores are not capped and there is no sink; the reach may be limited."""
        return self.cap is None and self.sink_H is None


class Shape(NamedTuple):
    """The shape of a model's keys and values, as a cache holds them."""

    layers: int
    kv_heads: int
    """In the layer that has most; in others each is held several times."""
    head_dim: int
    """Of keys or values, whichever are wider; the others are filled up with zeros."""
    reach: Reach = Reach()
    """No layer attends further back."""

    @classmethod
    def of(cls, config: PreTrainedConfig) -> Shape:
        """Read it from a model's configuration."""
        text = config.get_text_config()
        layers = text.num_hidden_layers
        sizes = [_sizes(each) for each in (text.per_layer_config if is_mixed(text) else [text])]
        return cls(
            layers,
            max(kv_heads for kv_heads, _ in sizes),
            max(width for _, width in sizes),
            farthest({Reach.of(text, layer) for layer in range(layers)}),
        )


def is_mixed(text: PreTrainedConfig) -> bool:
    """Return whether layers of a model differ in sizes, which its configuration has for each."""
    return bool(getattr(text, "is_heterogeneous", False))


def _sizes(text: PreTrainedConfig) -> tuple[int, int]:
    """Return the heads of keys of a layer, and the numbers of the wider of a key and a value."""
    heads = text.num_attention_heads
    head_dim = getattr(text, "head_dim", None) or text.hidden_size // heads
    # Latent attention calls the rotary part of a head `head_dim`.
    widths = getattr(text, "qk_head_dim", None) or head_dim, getattr(text, "v_head_dim", None)
    return getattr(text, "num_key_value_heads", None) or heads, max(each or 0 for each in widths)


def farthest(reaches: set[Reach]) -> Reach:
    """Return a reach that includes all of these."""
    windows, chunks = ([each[i] for each in reaches] for i in (0, 1))
    limits = [window for window in windows if window is not None]
    return Reach(
        max(limits) if len(limits) == len(windows) else None,
        chunks[0] if len(set(chunks)) == 1 else None,
    )


class Attention(Protocol):
    """Computes attention for one packed row of tokens."""

    cache_shape: Shape | None = None
    """The shape that keys and values must have to fit its cache; each layer must call it once, in
    order. None: it has no cache, and takes any."""
    num_layers_called: int = 0
    """Number of layers that have called it, if it has a cache."""

    def attend(
        self, layer: int, q_HTD: Tensor, k_GTD: Tensor, v_GTE: Tensor, weighing: Weighing
    ) -> Tensor:
        """Return [T, H, E] for queries [H, T, D], keys [G, T, D] and values [G, T, E] (G divides
        H), with rotary positions applied. `layer` counts from 0. With a cache, D and E are equal.
        """
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
    config: Any = getattr(module, "config", None)
    weighing = Weighing(
        scaling if scaling is not None else query.shape[-1] ** -0.5,
        Reach() if config is None else Reach.of(config, layer),
        arguments.pop("softcap", None),
        arguments.pop("s_aux", None),
    )
    mixed = config is not None and is_mixed(config)
    if reason := _refusal(attention, layer, query, key, value, weighing.reach, arguments, mixed):
        kind = getattr(config, "model_type", type(module).__name__)
        raise UserError(f"model.name: a model of type {kind!r} {reason}, which is not supported")
    # Not [0]: its gradient would be copied into zeros laid out as [H, T, D].
    q_HTD, k_GTD, v_GTE = (x.squeeze(0) for x in (query, key, value))
    if (required := attention.cache_shape) is not None:
        if (times := required.kv_heads // len(k_GTD)) > 1:
            k_GTD, v_GTE = (x.repeat_interleave(times, 0) for x in (k_GTD, v_GTE))
        q_HTD, k_GTD, v_GTE = (widened(x, required.head_dim) for x in (q_HTD, k_GTD, v_GTE))
    out_THE = attention.attend(layer, q_HTD, k_GTD, v_GTE, weighing)
    return narrowed(out_THE, value.shape[-1]).unsqueeze(0), None


def widened(x: Tensor, width: int) -> Tensor:
    """Append zeros to vectors, which changes no product of them, and no weighted sum."""
    return x if x.shape[-1] == width else F.pad(x, (0, width - x.shape[-1]))


def narrowed(x: Tensor, width: int) -> Tensor:
    """Cut off what `widened` appended."""
    return x if x.shape[-1] == width else x[..., :width]


def _refusal(
    attention: Attention,
    layer: int,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    reach: Reach,
    arguments: dict[str, Any],
    mixed: bool,
) -> str | None:
    """Return what the model needs that `attention` does not support, or None. `mixed`: its layers
    differ in sizes."""
    unsupported = {name for name, x in arguments.items() if x is not None} - _HARMLESS
    if (window := arguments.get("sliding_window")) == reach.window:
        unsupported.discard("sliding_window")
    elif window is not None:
        said = f"where its config.json says {reach.window}"
        return f"has attention with sliding_window = {window} in layer {layer} {said}"
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
    width = max(dim, value_dim)
    fits = (kv_heads, width) == (required.kv_heads, required.head_dim)
    if mixed:
        fits = required.kv_heads % kv_heads == 0 and width <= required.head_dim
    if not fits:
        return (
            f"has {kv_heads} heads of keys of {dim} and values of {value_dim} numbers instead of "
            f"the {required.kv_heads} of {required.head_dim} in its config.json (try "
            "rollout.engine = 'vllm')"
        )
    if farthest({reach, required.reach}) != required.reach:
        return "attends further back than its config.json says"
    if not attention.num_layers_called <= layer < required.layers:
        return "attends more than once in a layer"
    attention.num_layers_called = layer + 1
    return None


# Under a name that `AttentionMaskInterface` does not know, transformers makes no mask, and does not
# look at the positions for the sequences in a row, which would wait for the device.
AttentionInterface.register(NAME, _attention_function)


def body_of(model: PreTrainedModel) -> Any:
    """Return the part of a model that makes hidden states of tokens; the model if there is none."""
    body = model.base_model  # Llama 4 has another than it says
    return getattr(model, "model", model) if body is model else body
