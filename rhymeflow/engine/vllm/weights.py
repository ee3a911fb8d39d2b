"""Pulls weights into vLLM's model between two iterations, in place and proved (law 5).

Where vLLM computes with packed weights, a weight is assembled and digested in a buffer, which is
then packed. Packed weights cannot be digested; with `compare` each layer is compared, bit for bit,
with a fresh one packed from the buffer.

**The head.** vLLM 0.32 packs the output head (if tied, from the embedding's weight) when it loads a
model, but not again when that weight changes. So every layer that has both its weight and a packed
form of it is packed again after each pull.

**Changes** cannot be applied to packed weights. So from the second pull on, if the store has
changes, unpacked weights are kept (`Unpacked`, in as much memory again) and only changed layers are
packed again.

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
from rhymeflow.engine.vllm.places import Target, TensorPlace, find_places, has_experts, shape_of
from rhymeflow.utils import progress
from rhymeflow.weights.base import PulledParts, WeightReader
from rhymeflow.weights.install import Installation, SlabPlace, or_newer, until_whole
from rhymeflow.weights.manifest import Manifest, Slab
from rhymeflow.weights.on_device import Hash, Staging, as_ints
from rhymeflow.weights.proof import ChecksumMismatch, ProvedWeights

PROBE_ROWS = 3


class InstalledWeights:
    """The weights of one process's part of vLLM's model; undefined after an error."""

    def __init__(self, model: nn.Module, reader: WeightReader) -> None:
        """`model` may have any weights."""
        self._model = model
        self._manifest = reader.manifest
        self._specs = {spec.name: spec for spec in reader.manifest}
        self._places = find_places(model, reader.manifest)
        self.holds: ProvedWeights | None = None
        """The weights that were installed last."""
        self._unpacked: Unpacked | None = None
        self._staging = Staging(next(model.parameters()).device)
        targets = {id(place.target): place.target for place in self._places.values()}
        self._targets = list(targets.values())
        self._packed: dict[int, list[Target]] = {}
        """The targets of each layer that packs, by the layer's id; experts pack two together."""
        for target in self._targets:
            if target.is_packed:
                self._packed.setdefault(id(target.layer), []).append(target)

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
            if self._unpacked is None and held and self._can_take_changes(reader, held, want):
                self._unpacked = Unpacked(self._places, self._manifest, self._into)
            if self._unpacked is None:
                return until_whole(partial(self._pull_whole, reader, compare), want)
            return self._pull_changes(self._unpacked, reader, want, compare)

        pulled = or_newer(pull, want)
        self.holds = pulled.weights
        return pulled

    def _can_take_changes(
        self, reader: WeightReader, held: ProvedWeights, want: Version | None
    ) -> bool:
        """Return whether there are changes, and tensors have their published dtypes here."""
        dtypes = {spec.name: getattr(torch, spec.dtype) for spec in self._manifest}
        fits = all(
            target.tensor().dtype == dtypes[name]
            for target in self._targets
            for name in target.parts
        )
        return fits and reader.update(held, want).steps is not None

    def _pull_changes(
        self, unpacked: Unpacked, reader: WeightReader, want: Version | None, compare: bool
    ) -> PulledParts:
        pulled = unpacked.installation.pull_part(reader, want)
        changed = unpacked.take_changed()
        for layer_id in {id(target.layer) for target in changed if target.is_packed}:
            self._pack(layer_id, unpacked.buffers)
        addresses = {target.tensor().data_ptr() for target in changed if not target.is_packed}
        self._pack_heads(addresses)
        if compare:
            self._compare(unpacked.buffers)
        return pulled

    def _pull_whole(self, reader: WeightReader, compare: bool, want: Version | None) -> PulledParts:
        hashes: dict[str, list[tuple[SlabPlace, Hash]]] = {}
        buffers: dict[str, Tensor] = {}
        num_missing = {
            layer_id: sum(len(target.parts) for target in targets)
            for layer_id, targets in self._packed.items()
        }
        # Pull every tensor: changes cannot be applied to packed weights.
        update = reader.update(None, want)
        for name, rows in update.whole:
            progress.advance()
            target = self._places[name].target
            places = self._places[name].slabs(self._specs[name], self._into(name, buffers))
            hashes[name] = [(place, place.copy(rows, self._staging)) for place in places]
            if not target.is_packed:
                continue
            layer_id = id(target.layer)
            num_missing[layer_id] -= 1
            if not num_missing[layer_id]:
                self._pack(layer_id, buffers)
                if not compare:
                    for each in self._packed[layer_id]:
                        del buffers[each.name]
        assert len(hashes) == len(self._specs), "a whole pull brings every tensor"
        self._pack_heads()
        found = iter(as_ints([each for pairs in hashes.values() for _, each in pairs]))
        held = [{place.slab: next(found) for place, _ in pairs} for pairs in hashes.values()]
        pulled = PulledParts(update.weights, update.digests(), held)
        if compare:
            self._compare(buffers)
        return pulled

    def _into(self, name: str, buffers: dict[str, Tensor]) -> Tensor:
        """Return what a tensor is copied into: its target, or the buffer that this is packed from,
        which is made if it is not in `buffers`."""
        target = self._places[name].target
        if not target.is_packed:
            return target.tensor().data
        if target.name not in buffers:
            shape, dtype = shape_of(target, self._places), getattr(torch, self._specs[name].dtype)
            buffers[target.name] = torch.empty(shape, dtype=dtype)
        return buffers[target.name]

    def _pack(self, layer_id: int, buffers: Mapping[str, Tensor]) -> None:
        targets = self._packed[layer_id]
        _pack_layer(targets[0].layer, {each.attribute: buffers[each.name] for each in targets})

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

    def _compare(self, buffers: Mapping[str, Tensor]) -> None:
        for target in self._targets:
            # An embedding is packed too, but only used for lookups.
            is_product = hasattr(target.layer, "quant_method") and target.attribute == "weight"
            if is_product and not hasattr(target.layer, "shard_indices"):
                _compare_products(target.layer, buffers.get(target.name, target.tensor().data))
        for layer in self._output_heads():
            _compare_products(layer, layer.weight.data)
        for targets in self._packed.values():
            if has_experts(targets[0].layer):
                weights = {each.attribute: buffers[each.name] for each in targets}
                _compare_packed(targets[0].layer, weights)


class Unpacked:
    """Unpacked weights, from which layers are packed; undefined until the first pull."""

    def __init__(
        self,
        places: Mapping[str, TensorPlace],
        manifest: Manifest,
        into: Callable[[str, dict[str, Tensor]], Tensor],
    ) -> None:
        """`into` is `InstalledWeights._into`."""
        self.buffers: dict[str, Tensor] = {}
        """Unpacked weights by the name of the packed target."""
        self._places = places
        slabs = {}
        for spec in manifest:
            slabs[spec.name] = places[spec.name].slabs(spec, into(spec.name, self.buffers))
        self.installation = Installation(slabs)
        self._last_digests: dict[str, dict[Slab, int]] = {}

    def take_changed(self) -> list[Target]:
        """Return the targets that changed since the last call."""
        digests = self.installation.digests
        changed = [name for name, new in digests.items() if self._last_digests.get(name) != new]
        self._last_digests = dict(digests)
        targets = (self._places[name].target for name in changed)
        return list({target.name: target for target in targets}.values())


def _pack_layer(layer: Any, weights: Mapping[str, Tensor]) -> None:
    """Set the layer's weights as if just loaded, and have it pack them."""
    for attribute, weight in weights.items():
        setattr(layer, attribute, nn.Parameter(weight, requires_grad=False))
    if hasattr(layer.quant_method, "moe_kernel"):
        layer.quant_method.moe_kernel = None  # experts are packed when their kernel is made
    layer.quant_method.process_weights_after_loading(layer)


def _compare_products(layer: Any, weight: Tensor) -> None:
    """Raise `ChecksumMismatch` unless a linear layer's output for a probe equals, to the bit, that
    of a fresh layer of the same weight."""
    probe = _probe(weight)
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


def _probe(weight: Tensor) -> Tensor:
    """Return input rows for a layer, the same in every call."""
    size = weight.shape[1]
    values = torch.linspace(-1.0, 1.0, PROBE_ROWS * size, device=weight.device)
    return values.cos().reshape(PROBE_ROWS, size).to(weight.dtype)
