"""Llama and its kin, layer by layer: four products, and compiled passes between them.

An iteration with few rows is not bound by its products: of one by transformers' modules they took a
fifth, the rest was some forty small operations a layer and what Python does around them
(docs/lab-log.md). Here a layer is four products and four passes, one of which attends.

Holds true: computes what the modules of the classes in `_CLASSES` do, up to float rounding, on
CPUs in float32 and bfloat16; products are the same in number and shape whatever the row holds.
`refresh` has been called since the weights last changed.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from transformers import (
    LlamaForCausalLM,
    MistralForCausalLM,
    PreTrainedModel,
    Qwen2ForCausalLM,
    Qwen3ForCausalLM,
)

from rhymeflow.engine.native import layer_kernels
from rhymeflow.engine.native.cpu_attention import CpuAttention
from rhymeflow.models import attention
from rhymeflow.models.packed import Packed
from rhymeflow.models.tiled import COLUMNS, Tiled
from rhymeflow.utils import threads
from rhymeflow.utils.gemm import ROWS

_CLASSES = (LlamaForCausalLM, MistralForCausalLM, Qwen2ForCausalLM, Qwen3ForCausalLM)
_BLOCK = 256
"""Rows of one call of a kernel, if several threads share them."""
_SMALL = 100_000
"""Elements of an array for which a second thread costs more than it brings."""


class Decoder:
    """A `body.Body` of a Llama-like model."""

    def __init__(self, body: Any) -> None:
        config = body.config
        self._body = body
        self._dim: int = body.layers[0].self_attn.head_dim
        self._sizes = (config.num_attention_heads, config.num_key_value_heads, self._dim)
        self._intermediate: int = config.intermediate_size
        self._epsilon = np.float32(config.rms_norm_eps)
        self.refresh()

    @staticmethod
    def serves(model: PreTrainedModel) -> bool:
        """Whether the model is of this kind, and where compiled code computes."""
        if type(model) not in _CLASSES or model.config.hidden_act != "silu":
            return False
        body = model.base_model
        head_dim = body.layers[0].self_attn.head_dim
        is_whole = body.rotary_emb.inv_freq.shape[-1] * 2 == head_dim
        return is_whole and CpuAttention.serves(model.device, model.dtype, head_dim)

    def refresh(self) -> None:
        """The model's weights have changed."""
        self._layers = [_Layer(layer) for layer in self._body.layers]
        self._norm = _bits(self._body.norm.weight)

    def run(self, ids: list[int], positions: list[int], how: attention.Attention) -> Tensor:
        """The last hidden states [T, D] of tokens at such positions."""
        unused = [0] * (-len(ids) % ROWS)
        ids, positions = ids + unused, positions + unused
        delta_TD = F.embedding(torch.tensor(ids), self._body.embed_tokens.weight)
        cos, sin = self._body.rotary_emb(delta_TD, torch.tensor([positions]))
        angles = _bits(cos), _bits(sin)
        hidden_TD = torch.zeros_like(delta_TD)
        for i, layer in enumerate(self._layers):
            normed_TD = self._add_and_norm(hidden_TD, delta_TD, layer.first_norm)
            attended = self._attend(i, layer, layer.qkv(normed_TD), angles, how)
            delta_TD = layer.out(attended)
            normed_TD = self._add_and_norm(hidden_TD, delta_TD, layer.second_norm)
            delta_TD = layer.down(self._swiglu(layer.gate_up(normed_TD)))
        return self._add_and_norm(hidden_TD, delta_TD, self._norm)

    def _add_and_norm(self, hidden_TD: Tensor, delta_TD: Tensor, weight: np.ndarray) -> Tensor:
        """Add to the residual stream in place; return it normalised."""
        out_TD = torch.empty_like(hidden_TD)
        hidden, delta, out = _bits(hidden_TD), _bits(delta_TD), _bits(out_TD)

        def rows(first: int, last: int) -> None:
            layer_kernels.add_and_norm(hidden, delta, weight, self._epsilon, first, last, out)

        _in_blocks(rows, *hidden_TD.shape)
        return out_TD

    def _attend(
        self,
        index: int,
        layer: _Layer,
        qkv_TE: Tensor,
        angles: tuple[np.ndarray, np.ndarray],
        how: attention.Attention,
    ) -> Tensor:
        """Rotate, attend; return [T, H * D]."""
        heads, kv_heads, dim = self._sizes
        count, width = qkv_TE.shape
        q_THD = torch.empty(count, heads, dim)
        k_TGD = torch.empty(count, kv_heads, dim, dtype=qkv_TE.dtype)
        v_TGD = torch.empty_like(k_TGD)
        qkv, q, k, v = _bits(qkv_TE), _bits(q_THD), _bits(k_TGD), _bits(v_TGD)
        ends = heads * dim, (heads + kv_heads) * dim

        def rows(first: int, last: int) -> None:
            for norm, begin, end in zip(layer.head_norms, (0, ends[0]), ends, strict=False):
                layer_kernels.norm_heads(qkv, norm, self._epsilon, first, last, width, begin, end)
            layer_kernels.rotate_and_split(qkv, *angles, self._sizes, first, last, q, k, v)

        _in_blocks(rows, count, width)
        q_HTD, k_GTD, v_GTD = (x.transpose(0, 1) for x in (q_THD, k_TGD, v_TGD))
        out_THD = how.attend(index, q_HTD, k_GTD, v_GTD, layer.scale)
        return out_THD.reshape(count, heads * dim).to(qkv_TE.dtype)

    def _swiglu(self, gate_up_TE: Tensor) -> Tensor:
        out_TI = gate_up_TE.new_empty(gate_up_TE.shape[0], self._intermediate)
        gate_up, out = _bits(gate_up_TE), _bits(out_TI)

        def rows(first: int, last: int) -> None:
            layer_kernels.swiglu(gate_up, self._intermediate, first, last, out)

        _in_blocks(rows, *gate_up_TE.shape)
        return out_TI


def load_kernels(dtype: torch.dtype) -> None:
    """Load what a model of this type is run with, or compile it: on a machine's first run, seconds.

    Nothing is computed: every call is of no rows.
    """
    x, floats, epsilon = _bits(torch.zeros(1, dtype=dtype)), np.zeros(1, np.float32), np.float32(0)
    layer_kernels.add_and_norm(x, x, x, epsilon, 0, 0, x)
    layer_kernels.norm_heads(x, x, epsilon, 0, 0, 1, 0, 1)
    layer_kernels.rotate_and_split(x, x, x, (1, 1, 1), 0, 0, floats, x, x)
    layer_kernels.swiglu(x, 1, 0, 0, x)
    if dtype == torch.float32:
        Tiled(torch.zeros(COLUMNS, 1))(torch.zeros(0, 1))


class _Layer:
    """One layer's weights, as they are computed with."""

    def __init__(self, layer: Any) -> None:
        heads, mlp = layer.self_attn, layer.mlp
        self.scale: float = heads.scaling
        self.qkv = _product(heads.q_proj, heads.k_proj, heads.v_proj)
        self.out = _product(heads.o_proj)
        self.gate_up = _product(mlp.gate_proj, mlp.up_proj)
        self.down = _product(mlp.down_proj)
        self.first_norm = _bits(layer.input_layernorm.weight)
        self.second_norm = _bits(layer.post_attention_layernorm.weight)
        norms = [getattr(heads, name, None) for name in ("q_norm", "k_norm")]
        self.head_norms = [_bits(norm.weight) for norm in norms if norm is not None]


def _product(*layers: nn.Linear) -> Callable[[Tensor], Tensor]:
    """Linear maps of one input as one."""
    biases = [layer.bias.detach() for layer in layers if layer.bias is not None]
    assert len(biases) in (0, len(layers))
    weight_OI = torch.cat([layer.weight.detach() for layer in layers])
    bias_O = torch.cat(biases) if biases else None
    return Tiled(weight_OI) if Tiled.serves(weight_OI, bias_O) else Packed(weight_OI, bias_O)


def _bits(x: Tensor) -> np.ndarray:
    """All elements in a row; bfloat16 as its bits."""
    x = x.detach().reshape(-1)
    return (x.view(torch.uint16) if x.dtype == torch.bfloat16 else x).numpy()


def _in_blocks(rows: Callable[[int, int], None], count: int, width: int) -> None:
    """Call `rows` for all of `count` rows, on several threads where that is quicker."""
    num_threads = torch.get_num_threads()
    if num_threads == 1 or count * width <= _SMALL:
        rows(0, count)
        return
    blocks = [(first, min(first + _BLOCK, count)) for first in range(0, count, _BLOCK)]
    threads.run(lambda block: rows(*block), blocks, min(num_threads, len(blocks)))


__all__ = ["Decoder", "load_kernels"]
