"""Pulling weights into vLLM's model between two iterations, in place and proved (law 5).

Where vLLM computes with a packed weight, the weight is assembled in a buffer, its digest is taken
there, and the packer gets that buffer. The packer's result cannot be digested; with `compare` each
layer is compared, bit for bit, with one freshly made of the buffer.

**The head.** vLLM 0.32 packs the output head when it loads a model, a tied one from the embedding's
weight, and does not when the embedding changes. So every layer that has both its weight and
something packed is packed again after each pull.

**Changes** cannot be put into packed weights. So from the second pull on, if the store knows them,
unpacked weights are kept (`Unpacked`, in as much memory again) and only changed layers are packed
again; but not where a process holds parts of tensors, whose digests cannot be followed.
"""

from __future__ import annotations

import copy
from collections.abc import Container, Mapping
from functools import partial
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn

from rhymeflow.core.types import Version
from rhymeflow.engine.vllm.places import Target, TensorPlace, find_places, has_experts, shape_of
from rhymeflow.utils import progress
from rhymeflow.weights.base import WeightReader
from rhymeflow.weights.install import Installation, or_newer, until_whole
from rhymeflow.weights.manifest import Manifest, ManifestMismatch
from rhymeflow.weights.proof import ChecksumMismatch, ProvedWeights, bytes_of, digest

PROBE_ROWS = 3


class InstalledWeights:
    """The weights of one process's part of vLLM's model; undefined after an error."""

    def __init__(self, model: nn.Module, reader: WeightReader) -> None:
        """`model` was loaded, with any weights."""
        self._model = model
        self._manifest = reader.manifest
        self._specs = {spec.name: spec for spec in reader.manifest}
        self._places = find_places(model, reader.manifest)
        self._held: ProvedWeights | None = None
        self._unpacked: Unpacked | None = None
        targets = {id(place.target): place.target for place in self._places.values()}
        self._targets = list(targets.values())
        self._packed: dict[int, list[Target]] = {}
        """The targets that each layer packs, by the layer's id: experts pack two together."""
        for target in self._targets:
            if target.is_packed:
                self._packed.setdefault(id(target.layer), []).append(target)

    @torch.no_grad()
    def install(
        self, reader: WeightReader, want: Version | None = None, *, compare: bool = False
    ) -> ProvedWeights:
        """Install `want`, newer weights if those are gone, or the newest for None.

        `compare` compares every layer with a fresh one, which takes as much memory and time again.

        Raises:
            ChecksumMismatch: the weights are not those published, or a layer computes with others.
        """
        held, self._held = self._held, None

        def pull(want: Version | None) -> ProvedWeights:
            if self._unpacked is None and held and self._can_take_changes(reader, held, want):
                self._unpacked = Unpacked(self._places, self._manifest)
            if self._unpacked is None:
                return until_whole(partial(self._pull_whole, reader, compare), want)
            return self._pull_changes(self._unpacked, reader, want, compare)

        self._held = or_newer(pull, want)
        return self._held

    def _can_take_changes(
        self, reader: WeightReader, held: ProvedWeights, want: Version | None
    ) -> bool:
        """Whether the reader knows changes, and this process has whole weights, as published."""
        dtypes = {spec.name: getattr(torch, spec.dtype) for spec in self._manifest}
        fits = not any(target.is_split for target in self._targets) and all(
            target.tensor().dtype == dtypes[name]
            for target in self._targets
            for name in target.parts
        )
        return fits and reader.update(held, want).steps is not None

    def _pull_changes(
        self, unpacked: Unpacked, reader: WeightReader, want: Version | None, compare: bool
    ) -> ProvedWeights:
        pulled = unpacked.installation.pull(reader, want)
        changed = unpacked.take_changed()
        for layer in {id(target.layer) for target in changed if target.is_packed}:
            self._pack(layer, unpacked.buffers)
        there = {target.tensor().data_ptr() for target in changed if not target.is_packed}
        self._pack_heads(there)
        if compare:
            self._compare(unpacked.buffers)
        return pulled

    def _pull_whole(
        self, reader: WeightReader, compare: bool, want: Version | None
    ) -> ProvedWeights:
        digests: dict[str, int] = {}
        buffers: dict[str, Tensor] = {}
        missing = {
            layer: sum(len(target.parts) for target in targets)
            for layer, targets in self._packed.items()
        }
        # Everything: packed weights cannot be built on.
        update = reader.update(None, want)
        for name, data in update.whole:
            progress.advance()
            target = self._places[name].target
            digests[name] = self._copy(name, data, buffers)
            if not target.is_packed:
                continue
            layer = id(target.layer)
            missing[layer] -= 1
            if not missing[layer]:
                self._pack(layer, buffers)
                if not compare:
                    for each in self._packed[layer]:
                        del buffers[each.name]
        assert len(digests) == len(self._specs), "a pull that began with nothing brings all"
        self._pack_heads()
        pulled = update.prove(digests)
        if compare:
            self._compare(buffers)
        return pulled

    def _copy(self, name: str, data: np.ndarray, buffers: dict[str, Tensor]) -> int:
        """Put the tensor in its place; return the digest of what is there then."""
        spec, place = self._specs[name], self._places[name]
        target = place.target
        flat = torch.from_numpy(data.copy())  # for shared memory changes
        source = flat.view(getattr(torch, spec.dtype)).reshape(spec.shape)
        if target.is_packed:
            if target.name not in buffers:
                shape = shape_of(target, self._places)
                buffers[target.name] = torch.empty(shape, dtype=source.dtype)
            into = buffers[target.name]
        else:
            into = target.tensor().data
        for of_tensor, of_target in place.pieces:
            where, part = into[of_target], source[of_tensor]
            if where.shape != part.shape:
                raise ManifestMismatch(
                    f"{name} is {list(part.shape)}, and its place in vLLM's {target.name} "
                    f"{list(where.shape)}"
                )
            where.copy_(part)
            if part.shape == source.shape:
                return digest(bytes_of(where.to(source.dtype)))
        # This process has parts of it: the whole is proved as read, the parts are compared with it.
        whole = source.clone()
        for of_tensor, of_target in place.pieces:
            if not torch.equal(into[of_target].to(source.dtype).cpu(), whole[of_tensor]):
                raise ChecksumMismatch(f"{name}: this process's part is not what was read")
        return digest(bytes_of(whole))

    def _pack(self, layer: int, buffers: Mapping[str, Tensor]) -> None:
        """Have a layer pack its weights."""
        targets = self._packed[layer]
        _pack_layer(targets[0].layer, {each.attribute: buffers[each.name] for each in targets})

    def _pack_heads(self, changed: Container[int] | None = None) -> None:
        """Pack them again; `changed`: only those whose weight is at one of these addresses."""
        for layer in self._kept_and_packed():
            if changed is None or layer.weight.data_ptr() in changed:
                layer.quant_method.process_weights_after_loading(layer)

    def _kept_and_packed(self) -> list[Any]:
        """Output heads: layers that keep a weight and compute with something packed from it."""
        heads: list[Any] = [
            layer
            for layer in self._model.modules()
            if hasattr(layer, "cpu_linear") and getattr(layer, "weight", None) is not None
        ]
        kept = [layer for layer in heads if layer.weight.numel()]
        named = getattr(self._model, "lm_head", None)
        # Embeddings are packed too, which matters where they are the head.
        return [each for each in kept if each is named] if named in kept else kept

    def _compare(self, buffers: Mapping[str, Tensor]) -> None:
        """Compare every layer with a fresh one of the same weights."""
        for target in self._targets:
            # An embedding is packed too, and only looked up in.
            is_product = hasattr(target.layer, "quant_method") and target.attribute == "weight"
            if is_product and not hasattr(target.layer, "shard_indices"):
                _compare_products(target.layer, buffers.get(target.name, target.tensor().data))
        for layer in self._kept_and_packed():
            _compare_products(layer, layer.weight.data)
        for targets in self._packed.values():
            if has_experts(targets[0].layer):
                weights = {each.attribute: buffers[each.name] for each in targets}
                _compare_packed(targets[0].layer, weights)


class Unpacked:
    """The weights that layers are packed from."""

    def __init__(self, places: Mapping[str, TensorPlace], manifest: Manifest) -> None:
        """Undefined until the first pull."""
        self.buffers: dict[str, Tensor] = {}
        """By the name of a packed target."""
        into = {}
        for spec in manifest:
            place = places[spec.name]
            target = place.target
            if not target.is_packed:
                whole = target.tensor().data
            elif target.name in self.buffers:
                whole = self.buffers[target.name]
            else:
                whole = torch.empty(shape_of(target, places), dtype=getattr(torch, spec.dtype))
                self.buffers[target.name] = whole
            into[spec.name] = whole[place.destination]
        self._places = places
        self.installation = Installation(into)
        self._taken: dict[str, int] = {}
        """Digests of the tensors that layers have."""

    def take_changed(self) -> list[Target]:
        """Targets that changed since the last call."""
        digests = self.installation.digests
        changed = [name for name, found in digests.items() if self._taken.get(name) != found]
        self._taken = dict(digests)
        targets = (self._places[name].target for name in changed)
        return list({target.name: target for target in targets}.values())


def _pack_layer(layer: Any, weights: Mapping[str, Tensor]) -> None:
    """Give the layer its weights as if just loaded, and have it pack them."""
    for attribute, weight in weights.items():
        setattr(layer, attribute, nn.Parameter(weight, requires_grad=False))
    if hasattr(layer.quant_method, "moe_kernel"):
        layer.quant_method.moe_kernel = None  # experts are packed when their kernel is made
    layer.quant_method.process_weights_after_loading(layer)


def _compare_products(layer: Any, weight: Tensor) -> None:
    """Have a linear layer compute on a probe, and a fresh one of the same weight.

    Raises:
        ChecksumMismatch: they differ in any bit.
    """
    probe = _probe(weight)
    fresh: Any = nn.Module()
    fresh.quant_method = layer.quant_method
    _pack_layer(fresh, {"weight": weight.clone()})
    found = layer.quant_method.apply(layer, probe)
    due = layer.quant_method.apply(fresh, probe)
    if not torch.equal(found, due):
        raise ChecksumMismatch(
            f"a {type(layer).__name__} of vLLM's model does not compute what a fresh one "
            f"of the pulled weights does: off by {(found - due).abs().max().item():.3g}"
        )
    plain = probe.float() @ weight.float().T
    if not torch.allclose(due.float(), plain, rtol=0.05, atol=0.05 * float(plain.abs().max())):
        raise ChecksumMismatch(f"a fresh {type(layer).__name__} is no product at all")


def _compare_packed(layer: Any, weights: Mapping[str, Tensor]) -> None:
    """Have a fresh layer pack the same weights: experts compute on what was routed to them only.

    Raises:
        ChecksumMismatch: what was packed differs in any bit.
    """
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
    """Rows to compute with: the same in every call."""
    size = weight.shape[1]
    values = torch.linspace(-1.0, 1.0, PROBE_ROWS * size, device=weight.device)
    return values.cos().reshape(PROBE_ROWS, size).to(weight.dtype)
