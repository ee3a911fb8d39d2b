"""Pulls weights into vLLM's model between two iterations, in place and proved (law 5).

Where vLLM computes with packed weights, a weight is assembled and digested in a buffer, which is
then packed. Packed weights cannot be digested; with `compare` each layer is compared, bit for bit,
with a fresh one packed from the buffer.

**The head.** vLLM 0.32 packs the output head (if tied, from the embedding's weight) when it loads a
model, but not again when that weight changes. So every layer that has both its weight and a packed
form of it is packed again after each pull.

**Changes** cannot be applied to packed weights. So from the second pull on, if the store has
changes, unpacked weights are kept (in as much memory again) and only changed layers are packed
again.

**Shards.** A process copies and hashes its part of each tensor; the engine adds up the digests.
"""

from __future__ import annotations

import copy
from collections.abc import Callable, Container, Mapping
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn

from rhymeflow.core.types import Version
from rhymeflow.engine.vllm.places import DECAY, Target, find_places, has_experts, shape_of
from rhymeflow.weights.base import PulledParts, WeightReader
from rhymeflow.weights.install import Installation, SlabPlace, or_newer
from rhymeflow.weights.manifest import Slab, TensorSpec
from rhymeflow.weights.proof import ChecksumMismatch, ProvedWeights, bytes_of, digest

PROBE_ROWS = 3


class InstalledWeights:
    """The weights of one process's part of vLLM's model; undefined after an error."""

    def __init__(self, model: nn.Module, reader: WeightReader) -> None:
        """`model` may have any weights."""
        self._model = model
        self._specs = {spec.name: spec for spec in reader.manifest}
        self._places = find_places(model, reader.manifest)
        self.holds: ProvedWeights | None = None
        """The weights that were installed last."""
        self._buffers: dict[str, Tensor] = {}
        """Unpacked weights, by the name of the target that is packed from them."""
        self._kept: Installation | None = None
        """Takes changes, in buffers that are kept; None: each pull copies all, layer by layer."""
        self._packed_digests: dict[str, dict[Slab, int]] = {}
        targets = {id(place.target): place.target for place in self._places.values()}
        self._targets = list(targets.values())
        self._packed: dict[int, list[Target]] = {}
        """The targets of each layer that packs, by the layer's id; experts pack two together."""
        for target in self._targets:
            if target.is_packed:
                self._packed.setdefault(id(target.layer), []).append(target)
        targets_of = {name: self._places[name].target for name in self._specs}
        last = {id(each.layer): name for name, each in targets_of.items() if each.is_packed}
        self._layers = {name: layer_id for layer_id, name in last.items()}
        """Layers that pack, by the last tensor from which they are packed."""

    @torch.no_grad()
    def install(
        self, reader: WeightReader, want: Version | None = None, *, compare: bool = False
    ) -> PulledParts:
        """Install `want`, newer weights if those are gone, or the newest for None; they are proved
        with what the engine's other processes have installed (`base.prove`).

        `compare` compares every layer with a fresh one, which takes as much memory and time again.

        Raises:
            ChecksumMismatch: a layer's packed form is not that of the weights.
        """
        held, self.holds = self.holds, None

        def pull(want: Version | None) -> PulledParts:
            if self._kept is None and held and self._can_take_changes(reader, held, want):
                self._kept = Installation(self._slabs)
            copied = partial(self._pack_if_whole, frees=not compare)
            return (self._kept or Installation(self._slabs, copied)).pull_part(reader, want)

        pulled = or_newer(pull, want)
        if self._kept is not None:
            self._pack_changed(self._kept.digests)
        else:
            self._pack_heads()
        if compare:
            self._compare()
        if self._kept is None:
            self._buffers.clear()
        self.holds = pulled.weights
        return pulled

    def digests(self) -> dict[str, Callable[[], int]]:
        """Return, by the name of each parameter, and of each head that is packed beside its weight,
        a function that hashes it; of a packed matrix, which cannot be read, its product with a
        probe."""
        found: dict[str, Callable[[], int]] = {}
        for target in self._targets:
            shape = shape_of(target, self._places)
            is_matrix = hasattr(target.layer, "quant_method") and len(shape) == 2
            if target.is_packed and is_matrix:
                dtype = getattr(torch, self._specs[target.parts[0]].dtype)
                found[target.name] = partial(_digest_of_product, target.layer, shape[1], dtype)
            else:
                found[target.name] = partial(_digest_of, target)
        for number, layer in enumerate(self._output_heads()):
            size, dtype = layer.weight.shape[1], layer.weight.dtype
            found[f"packed head {number}"] = partial(_digest_of_product, layer, size, dtype)
        return found

    def _can_take_changes(
        self, reader: WeightReader, held: ProvedWeights, want: Version | None
    ) -> bool:
        """Return whether there are changes, and tensors have their published dtypes here."""
        fits = all(
            target.tensor().dtype == getattr(torch, self._specs[name].dtype)
            for target in self._targets
            for name in target.parts
        )
        return fits and reader.update(held, want).steps is not None

    def _slabs(self, spec: TensorSpec) -> list[SlabPlace]:
        """Return the places of a tensor's parts: in its target or in the buffer that this is packed
        from, which is made if it is not there."""
        place = self._places[spec.name]
        target = place.target
        if not target.is_packed:
            return place.slabs(target.tensor().data)
        if target.name not in self._buffers:
            shape, dtype = shape_of(target, self._places), getattr(torch, spec.dtype)
            self._buffers[target.name] = torch.empty(shape, dtype=dtype)
        return place.slabs(self._buffers[target.name])

    def _pack_if_whole(self, name: str, *, frees: bool) -> None:
        """Pack the layer whose last tensor this is, and free its buffers."""
        if name in self._layers:
            self._pack(self._layers[name])
            for each in self._packed[self._layers[name]] if frees else ():
                del self._buffers[each.name]

    def _pack_changed(self, digests: Mapping[str, dict[Slab, int]]) -> None:
        """Pack layers with tensors that have other digests than when they were packed last."""
        changed = [n for n, new in digests.items() if self._packed_digests.get(n) != new]
        self._packed_digests = dict(digests)
        targets = [self._places[name].target for name in changed]
        for layer_id in {id(target.layer) for target in targets if target.is_packed}:
            self._pack(layer_id)
        self._pack_heads({each.tensor().data_ptr() for each in targets if not each.is_packed})

    def _pack(self, layer_id: int) -> None:
        targets = self._packed[layer_id]
        weights = {each.attribute: self._buffers[each.name] for each in targets}
        _pack_layer(targets[0].layer, weights)

    def _pack_heads(self, changed: Container[int] | None = None) -> None:
        """Pack output heads again; with `changed`, only those with a weight at these addresses."""
        for layer in self._output_heads():
            if changed is None or layer.weight.data_ptr() in changed:
                layer.quant_method.process_weights_after_loading(layer)

    def _output_heads(self) -> list[Any]:
        """Return layers that keep their weight and compute with a packed form of it."""
        heads: list[Any] = [
            layer
            for layer in self._model.modules()
            if hasattr(layer, "cpu_linear") and getattr(layer, "weight", None) is not None
        ]
        with_weight = [layer for layer in heads if layer.weight.numel()]
        lm_head = getattr(self._model, "lm_head", None)
        # Embeddings are packed too, which matters only if they are the head.
        return [lm_head] if lm_head in with_weight else with_weight

    def _compare(self) -> None:
        buffers = self._buffers
        for target in self._targets:
            # An embedding is packed too, but only used for lookups.
            is_product = hasattr(target.layer, "quant_method") and target.attribute == "weight"
            weight = buffers.get(target.name, target.tensor().data)
            if is_product and weight.ndim == 2 and not hasattr(target.layer, "shard_indices"):
                _compare_products(target.layer, weight)
        for layer in self._output_heads():
            _compare_products(layer, layer.weight.data)
        for targets in self._packed.values():
            if has_experts(targets[0].layer):
                weights = {each.attribute: buffers[each.name] for each in targets}
                _compare_packed(targets[0].layer, weights)


def _pack_layer(layer: Any, weights: Mapping[str, Tensor]) -> None:
    """Set the layer's weights as if just loaded, and have it pack them."""
    if DECAY in weights:
        layer.A.data.copy_(-weights[DECAY].float().exp())
        return
    for attribute, weight in weights.items():
        setattr(layer, attribute, nn.Parameter(weight, requires_grad=False))
    if hasattr(layer.quant_method, "moe_kernel"):
        layer.quant_method.moe_kernel = None  # experts are packed when their kernel is made
    layer.quant_method.process_weights_after_loading(layer)


def _compare_products(layer: Any, weight: Tensor) -> None:
    """Raise `ChecksumMismatch` unless a linear layer's output for a probe equals, to the bit, that
    of a fresh layer of the same weight."""
    probe = _probe(weight.shape[1], weight.dtype, weight.device)
    fresh: Any = nn.Module()
    fresh.quant_method = layer.quant_method
    _pack_layer(fresh, {"weight": weight.clone()})
    actual = layer.quant_method.apply(layer, probe)
    expected = layer.quant_method.apply(fresh, probe)
    if not torch.equal(actual, expected):
        raise ChecksumMismatch(
            f"a {type(layer).__name__} of vLLM's model does not compute what a fresh one "
            f"of the pulled weights does: off by {(actual - expected).abs().max().item():.3g}"
        )
    plain = probe.float() @ weight.float().T
    tolerance = 0.05 * float(plain.abs().max())  # rounding in bfloat16 stays far below it
    if not torch.allclose(expected.float(), plain, rtol=0.05, atol=tolerance):
        raise ChecksumMismatch(f"a fresh {type(layer).__name__} does not multiply by its weight")


def _compare_packed(layer: Any, weights: Mapping[str, Tensor]) -> None:
    """Raise `ChecksumMismatch` unless packed experts equal, to the bit, those of a fresh layer: a
    probe would not reach all experts."""
    fresh = copy.copy(layer)
    fresh._parameters = dict(layer._parameters)
    fresh.quant_method = copy.copy(layer.quant_method)
    _pack_layer(fresh, {attribute: weight.clone() for attribute, weight in weights.items()})
    for attribute in weights:
        if not torch.equal(getattr(layer, attribute), getattr(fresh, attribute)):
            raise ChecksumMismatch(
                f"{attribute} of a {type(layer).__name__} of vLLM's model is not what a fresh one "
                "makes of the pulled weights"
            )


def _digest_of(target: Target) -> int:
    return digest(bytes_of(target.tensor()))


def _digest_of_product(layer: Any, size: int, dtype: torch.dtype) -> int:
    probe = _probe(size, dtype, torch.device("cpu"))  # only there weights are packed
    return digest(bytes_of(layer.quant_method.apply(layer, probe)))


def _probe(size: int, dtype: torch.dtype, device: torch.device) -> Tensor:
    """Return input rows for a layer, the same in every call."""
    values = torch.linspace(-1.0, 1.0, PROBE_ROWS * size, device=device)
    return values.cos().reshape(PROBE_ROWS, size).to(dtype)
