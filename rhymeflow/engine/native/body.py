"""Runs a model's body, from token ids to the last hidden states.

In an iteration with few rows, matrix products do not dominate: transformers' modules take some
forty small operations per layer. On CPUs, `Layers` runs Llama-like decoders with four products and
a dozen torch functions per layer; every other model runs through its own modules."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import nullcontext
from functools import partial
from typing import Any, NamedTuple

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

from rhymeflow.cpu.products import Packed, PackedProducts, Repacked
from rhymeflow.models.attention import Attention, Reach, Weighing, attending, body_of
from rhymeflow.models.copies import Copy, Own
from rhymeflow.models.lora import LoraLinear, LoraNF4Linear, keeps_base
from rhymeflow.models.nf4 import NF4Linear

_CLASSES = (LlamaForCausalLM, MistralForCausalLM, Qwen2ForCausalLM, Qwen3ForCausalLM)
_CHANGING = ("dynamic", "longrope")
"""Rotary types whose frequencies depend on the longest position of a call."""


def body_for(model: PreTrainedModel) -> Layers | Modules:
    """Return the fastest implementation that supports the model."""
    return Layers(model) if Layers.serves(model) else Modules(model)


class Modules:
    """Runs a model's body through its own modules, with packed linear layers where possible."""

    def __init__(self, model: PreTrainedModel) -> None:
        self._body = body_of(model)
        self._device = model.device
        for layer in self._body.modules():
            if isinstance(layer, NF4Linear) and self._device.type == "cpu":
                layer.hold()  # packed products know weights by their identity
        self._products = PackedProducts(_products(self._body))
        self._keeps_base = keeps_base(model)
        self._products.repack(_matrices(self._body))

    def run(self, ids: list[int], positions: list[int], row_attention: Attention) -> Tensor:
        """Return the last hidden states [T, D] of a packed row of tokens at these positions."""
        ids_1T, positions_1T = torch.tensor([ids, positions], device=self._device).split(1)
        products = self._products if self._products.has_any else nullcontext()
        with attending(row_attention), products:
            out = self._body(input_ids=ids_1T, position_ids=positions_1T, use_cache=False)
        return out.last_hidden_state[0]

    def refresh(self) -> None:
        """Repack the model's weights after they changed in place."""
        if not self._keeps_base:
            self._products.pack(_products(self._body))
        self._products.repack(_matrices(self._body))

    def copies(self) -> Iterator[Copy]:
        """Yield the copies of the model's weights that are read in their place."""
        for layer in _linear(self._body) if self._device.type == "cpu" else ():
            product = self._products.of(layer.weight)
            if product is not None or isinstance(layer, NF4Linear):
                yield Copy(product.held_OI if product else layer.weight, partial(_weights, [layer]))

    def adapter_copies(self) -> Iterator[Copy]:
        """Yield those of the adapter's matrices."""
        for layer in _adapted(self._body):
            for name in ("lora_A", "lora_B"):
                own = getattr(layer, name)
                if product := self._products.of(own):
                    yield Copy(product.held_OI, partial(list, [(layer, name, own)]))


_LINEAR = (nn.Linear, LoraLinear, NF4Linear, LoraNF4Linear)
"""Layers that compute no more than these do; a router may be a linear layer of another kind."""


def _linear(body: nn.Module) -> Iterator[nn.Linear]:
    for layer in body.modules():
        if isinstance(layer, nn.Linear) and type(layer) in _LINEAR:
            yield layer


def _products(body: nn.Module) -> Iterator[tuple[Tensor, Tensor | None]]:
    """Yield weight and bias of the linear layers."""
    for layer in _linear(body):
        yield layer.weight, layer.bias


def _matrices(body: nn.Module) -> Iterator[Tensor]:
    """Yield the matrices of the linear layers' adapters."""
    for layer in _adapted(body):
        yield from (layer.lora_A, layer.lora_B)


def _adapted(body: nn.Module) -> Iterator[LoraLinear]:
    for layer in body.modules():
        if isinstance(layer, LoraLinear):
            yield layer


def _weights(layers: Sequence[nn.Linear]) -> Iterator[Own]:
    for layer in layers:
        yield layer, "weight", layer.made() if isinstance(layer, NF4Linear) else layer.weight


def _biases(layers: Sequence[nn.Linear]) -> Iterator[Own]:
    for layer in layers:
        yield layer, "bias", layer.bias


class _Layer(NamedTuple):
    qkv: Packed | _AdaptedProduct
    out: Packed | _AdaptedProduct
    gate_up: Packed | _AdaptedProduct
    down: Packed | _AdaptedProduct
    first_norm: Tensor
    second_norm: Tensor
    head_norms_ED: Tensor | None  # norm weights of the query and key heads, if they are normalised
    weighing: Weighing


class Layers:
    """Runs the body of a Llama-like model, rounding bfloat16 where its modules do."""

    def __init__(self, model: PreTrainedModel) -> None:
        body: Any = model.base_model
        self._body, config = body, model.config
        dim: int = body.layers[0].self_attn.head_dim
        self._sizes = (config.num_attention_heads, config.num_key_value_heads, dim)
        self._epsilon: float = config.rms_norm_eps
        self._cos_LD = self._sin_LD = torch.empty(0, dim)
        self._keeps_base = keeps_base(model)
        self._layers: list[_Layer] = []
        self.refresh()

    @staticmethod
    def serves(model: PreTrainedModel) -> bool:
        """Return whether the model is Llama-like and on a CPU."""
        if type(model) not in _CLASSES or model.config.hidden_act != "silu":
            return False
        body: Any = model.base_model
        rotary, head_dim = body.rotary_emb, body.layers[0].self_attn.head_dim
        is_whole = rotary.inv_freq.shape[-1] * 2 == head_dim
        return model.device.type == "cpu" and is_whole and rotary.rope_type not in _CHANGING

    def refresh(self) -> None:
        """See `Modules`."""
        if not self._keeps_base or not self._layers:
            self._layers = [self._layer(i, layer) for i, layer in enumerate(self._body.layers)]
        for _, product in self._products():
            if isinstance(product, _AdaptedProduct):
                product.refresh()

    def copies(self) -> Iterator[Copy]:
        """See `Modules`."""
        for layers, product in self._products():
            base = product.base if isinstance(product, _AdaptedProduct) else product
            yield Copy(base.held_OI, partial(_weights, layers))
            if base.bias_O is not None:
                yield Copy(base.bias_O, partial(_biases, layers))
        for layer, held in zip(self._body.layers, self._layers, strict=True):
            if held.head_norms_ED is not None:
                yield Copy(held.head_norms_ED, partial(self._head_norms, layer.self_attn))

    def adapter_copies(self) -> Iterator[Copy]:
        """See `Modules`."""
        for _, product in self._products():
            if isinstance(product, _AdaptedProduct):
                yield from product.copies()

    def _products(self) -> Iterator[tuple[Sequence[nn.Linear], Packed | _AdaptedProduct]]:
        for layer, held in zip(self._body.layers, self._layers, strict=True):
            yield from zip(_sharing(layer), held[:4], strict=True)

    def _head_norms(self, self_attn: Any) -> list[Own]:
        """Return the norm weights of the query heads and of the key heads."""
        pairs = ((self_attn.q_norm, self._sizes[0]), (self_attn.k_norm, self._sizes[1]))
        return [(norm, "weight", norm.weight.expand(count, -1)) for norm, count in pairs]

    def run(self, ids: list[int], positions: list[int], row_attention: Attention) -> Tensor:
        """See `Modules`."""
        heads, kv_heads, dim = self._sizes
        cos_T1D, sin_T1D = self._angles(positions)
        hidden_TD = F.embedding(torch.tensor(ids), self._body.embed_tokens.weight)
        for i, layer in enumerate(self._layers):
            heads_TED = layer.qkv(self._normed(hidden_TD, layer.first_norm)).view(len(ids), -1, dim)
            qk_TED, v_TGD = heads_TED.split([heads + kv_heads, kv_heads], 1)
            if layer.head_norms_ED is not None:
                qk_TED = F.rms_norm(qk_TED, (dim,), None, self._epsilon) * layer.head_norms_ED
            qk_TED = qk_TED * cos_T1D + qk_TED.roll(dim // 2, -1) * sin_T1D
            q_HTD, k_GTD = qk_TED.transpose(0, 1).split([heads, kv_heads])
            v_GTD = v_TGD.transpose(0, 1)
            attended_THD = row_attention.attend(i, q_HTD, k_GTD, v_GTD, layer.weighing)
            hidden_TD += layer.out(attended_THD.reshape(len(ids), heads * dim))
            gate_up_TE = layer.gate_up(self._normed(hidden_TD, layer.second_norm))
            gate_TI, up_TI = gate_up_TE.chunk(2, -1)
            hidden_TD += layer.down(F.silu(gate_TI) * up_TI)
        return self._normed(hidden_TD, self._body.norm.weight)

    def _normed(self, x_TD: Tensor, weight_D: Tensor) -> Tensor:
        if x_TD.dtype == torch.float32:
            return F.rms_norm(x_TD, weight_D.shape, weight_D, self._epsilon)
        return F.rms_norm(x_TD, weight_D.shape, None, self._epsilon) * weight_D

    def _angles(self, positions: list[int]) -> tuple[Tensor, Tensor]:
        """Return cosines and sines [T, 1, D], the first half of the sines negated: with them,
        `x.roll(D // 2)` serves as transformers' `rotate_half(x)`."""
        longest = max(positions)
        if longest >= len(self._cos_LD):
            positions_1L = torch.arange(1 << longest.bit_length())[None]
            cos_1LD, sin_1LD = self._body.rotary_emb(self._body.norm.weight, positions_1L)
            self._cos_LD, self._sin_LD = cos_1LD[0], sin_1LD[0].clone()
            self._sin_LD[:, : self._sizes[2] // 2].neg_()
        positions_T = torch.tensor(positions)
        return self._cos_LD[positions_T][:, None], self._sin_LD[positions_T][:, None]

    def _layer(self, i: int, layer: Any) -> _Layer:
        self_attn, norms = layer.self_attn, None
        if hasattr(self_attn, "q_norm"):
            norms = torch.cat([own.detach() for *_, own in self._head_norms(self_attn)])
        qkv, out, gate_up, down = map(_product, _sharing(layer))
        return _Layer(
            qkv,
            out,
            gate_up,
            down,
            layer.input_layernorm.weight,
            layer.post_attention_layernorm.weight,
            norms,
            Weighing(self_attn.scaling, Reach.of(self._body.config, i)),
        )


def _sharing(layer: Any) -> tuple[tuple[nn.Linear, ...], ...]:
    """Return the linear layers that share an input, in the order of `_Layer`."""
    of, mlp = layer.self_attn, layer.mlp
    return (
        (of.q_proj, of.k_proj, of.v_proj),
        (of.o_proj,),
        (mlp.gate_proj, mlp.up_proj),
        (mlp.down_proj,),
    )


def _product(layers: Sequence[nn.Linear]) -> Packed | _AdaptedProduct:
    """Return one product for linear layers that share their input."""
    assert all(type(layer) in _LINEAR for layer in layers)
    biases = [layer.bias.detach() for layer in layers if layer.bias is not None]
    assert len(biases) in (0, len(layers))
    weight_OI = torch.cat([layer.weight.detach() for layer in layers])
    product = Packed(weight_OI, torch.cat(biases) if biases else None)
    is_adapted = any(isinstance(layer, LoraLinear) for layer in layers)
    return _AdaptedProduct(product, layers) if is_adapted else product


class _AdaptedProduct:
    """One product for linear layers that share their input, and one for their adapters: the outputs
    of each depend on its own narrow part alone. `refresh` packs these, and packs them again after
    the adapters have changed."""

    def __init__(self, product: Packed, layers: Sequence[nn.Linear]) -> None:
        adapted = [each for each in layers if isinstance(each, LoraLinear)]
        (self._scale,) = {each.scale for each in adapted}
        self.base, self._layers = product, layers
        like, rank = adapted[0].lora_A.detach(), len(adapted[0].lora_A)
        num_rows, self._num_columns = sum(each.out_features for each in layers), rank * len(adapted)
        narrow_RI = like.new_zeros(self._num_columns, adapted[0].in_features)
        wide_OR = like.new_zeros(num_rows, self._num_columns)
        self._into: list[Tensor] = []
        self._matrices: list[Tensor] = []
        row = column = 0
        for each in layers:
            if isinstance(each, LoraLinear):
                rows, columns = slice(row, row + each.out_features), slice(column, column + rank)
                self._into += narrow_RI[columns], wide_OR[rows, columns]
                column += rank
                self._matrices += each.lora_A.detach(), each.lora_B.detach()
            row += each.out_features
        self._narrow, self._wide = Repacked(narrow_RI), Repacked(wide_OR)

    def __call__(self, x_TI: Tensor) -> Tensor:
        """Return the layers' products [T, O], rounded as `LoraLinear` does."""
        out_TO = self.base(x_TI)
        return out_TO.add_(self._wide(self._narrow(x_TI)), alpha=self._scale)

    def refresh(self) -> None:
        """See the class."""
        torch._foreach_copy_(self._into, self._matrices)
        self._narrow.refresh()
        self._wide.refresh()

    def copies(self) -> Iterator[Copy]:
        """See `Modules.adapter_copies`."""
        yield Copy(self._narrow.held_OI, self._narrow_rows)
        yield Copy(self._wide.held_OI, self._wide_rows)

    def _narrow_rows(self) -> Iterator[Own]:
        for each in self._layers:
            if isinstance(each, LoraLinear):
                yield each, "lora_A", each.lora_A

    def _wide_rows(self) -> Iterator[Own]:
        """Nothing is to be added for a layer without an adapter, nor to another's columns."""
        column = 0
        for each in self._layers:
            if isinstance(each, LoraLinear):
                end = column + len(each.lora_A)
                yield each, "lora_B", F.pad(each.lora_B, (column, self._num_columns - end))
                column = end
            else:
                yield each, "weight", each.weight.new_zeros(each.out_features, self._num_columns)
