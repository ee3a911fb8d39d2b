"""Pulling weights into vLLM's model, in place and proved (law 5).

Between two iterations every tensor of the store is copied to its place. Where vLLM computes with
what a packer made of a weight, the weight is put together in a buffer, its digest is taken there,
and that buffer is what the packer gets: so the digest is of the packer's input. What the packer
makes of it cannot be digested; with `compare` each layer is compared, bit for bit, with one that
was freshly made of the same buffer (`packing.py`).

**The head.** vLLM 0.32 packs the output head when it loads a model, and a head that is tied to the
embedding is packed from the embedding's weight; whoever changes the embedding later leaves the head
on the old weights, silently. So every layer that has both its weight and something packed is packed
again after each pull.

**Changes.** From the second pull on, if the store knows what changed since the first, weights are
kept as they are before they are packed (`unpacked.py`), and only layers of which something changed
are packed again; but not where a process holds parts of tensors (tensor parallelism).

Holds true: after `install` returned, the digests that were proved are of what vLLM computes with.
After an error the model holds anything. Imports no vLLM: layers pack themselves
(`quant_method.process_weights_after_loading`) and compute by `quant_method.apply`.
"""

from __future__ import annotations

from collections.abc import Container, Mapping
from typing import Any

import torch
from torch import Tensor, nn

from rhymeflow.core.types import Version
from rhymeflow.engine.vllm.packing import compare_packed, compare_products, pack
from rhymeflow.engine.vllm.places import Target, find_places, has_experts, shape_of
from rhymeflow.engine.vllm.unpacked import Unpacked, can_be_kept
from rhymeflow.utils import progress
from rhymeflow.weights.base import (
    ChecksumMismatch,
    Overtaken,
    Pulled,
    TensorChunk,
    VersionUnavailable,
    WeightReader,
)
from rhymeflow.weights.manifest import ManifestMismatch, TensorSpec
from rhymeflow.weights.proof import bytes_of, digest

_MAX_OVERTAKEN = 1000
"""As in `weights/install.py`."""


class InstalledWeights:
    """The weights of one process's part of vLLM's model."""

    def __init__(self, model: nn.Module, reader: WeightReader) -> None:
        """`model` was loaded, with any weights."""
        self._model = model
        self._manifest = reader.manifest
        self._specs = {spec.name: spec for spec in reader.manifest}
        self._places = find_places(model, reader.manifest)
        self._held: Pulled | None = None
        self._unpacked: Unpacked | None = None
        targets = {id(place.target): place.target for place in self._places.values()}
        self._targets = list(targets.values())
        self._packed: dict[int, list[Target]] = {}
        """What each layer packs, by the layer's id: experts pack two weights together."""
        for target in self._targets:
            if target.is_packed:
                self._packed.setdefault(id(target.layer), []).append(target)

    def install(
        self, reader: WeightReader, want: Version | None = None, *, compare: bool = False
    ) -> Pulled:
        """Bring `want`, newer ones if those are gone, or the newest for None.

        With `compare`, every layer is compared with a fresh one; this takes the memory of another
        copy of the weights, and as long again.

        Raises:
            ChecksumMismatch: what arrived is not what was published, or a layer computes with
                something else.
        """
        held, self._held = self._held, None
        if self._unpacked is None and held is not None and self._can_take_changes(reader, held):
            self._unpacked = Unpacked(self._places, self._manifest)
        if self._unpacked is None:
            self._held = self._install_whole(reader, want, compare)
        else:
            self._held = self._install_changes(self._unpacked, reader, want, compare)
        return self._held

    def _can_take_changes(self, reader: WeightReader, held: Pulled) -> bool:
        """Whether the reader knows any, and they can be put in."""
        whole = can_be_kept(self._places.values(), self._manifest)
        return whole and reader.changes(held, None) is not None

    @torch.no_grad()
    def _install_changes(
        self, unpacked: Unpacked, reader: WeightReader, want: Version | None, compare: bool
    ) -> Pulled:
        pulled = unpacked.pull(reader, want)
        changed = unpacked.take_changed()
        for layer in {id(target.layer) for target in changed if target.is_packed}:
            self._pack(layer, unpacked.buffers)
        there = {target.tensor().data_ptr() for target in changed if not target.is_packed}
        self._pack_heads(there)
        if compare:
            self._compare(unpacked.buffers)
        return pulled

    def _install_whole(self, reader: WeightReader, want: Version | None, compare: bool) -> Pulled:
        for _ in range(_MAX_OVERTAKEN):
            try:
                return self._pull(reader, want, compare)
            except Overtaken:
                continue
            except VersionUnavailable:
                if want is None:
                    raise
                want = None
        raise RuntimeError(f"overtaken by publications {_MAX_OVERTAKEN} times during one pull")

    @torch.no_grad()
    def _pull(self, reader: WeightReader, want: Version | None, compare: bool) -> Pulled:
        digests: dict[str, int] = {}
        buffers: dict[str, Tensor] = {}
        missing = {
            layer: sum(len(target.parts) for target in targets)
            for layer, targets in self._packed.items()
        }
        # Everything, whatever was here before: of what was packed, nothing is left to build on.
        for chunk in reader.pull(None, want):
            progress.advance()
            target = self._places[chunk.name].target
            digests[chunk.name] = self._copy(chunk, buffers)
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
        pulled = reader.prove(digests)
        if compare:
            self._compare(buffers)
        return pulled

    def _copy(self, chunk: TensorChunk, buffers: dict[str, Tensor]) -> int:
        """Put the tensor in its place; return its digest, of what stands there."""
        spec, place = self._specs[chunk.name], self._places[chunk.name]
        target = place.target
        assert len(chunk.data) == spec.num_bytes, "tensors come whole"
        source = _typed(chunk, spec)
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
                    f"{chunk.name} is {list(part.shape)}, and its place in vLLM's {target.name} "
                    f"{list(where.shape)}"
                )
            where.copy_(part)
            if part.shape == source.shape:
                return digest(bytes_of(where.to(source.dtype)))
        # This process has parts of it: the whole as it was read is proved, and they are compared.
        whole = source.clone()
        for of_tensor, of_target in place.pieces:
            if not torch.equal(into[of_target].to(source.dtype).cpu(), whole[of_tensor]):
                raise ChecksumMismatch(f"{chunk.name}: this process's part is not what was read")
        return digest(bytes_of(whole))

    def _pack(self, layer: int, buffers: Mapping[str, Tensor]) -> None:
        """Give a layer all that it packs."""
        targets = self._packed[layer]
        pack(targets[0].layer, {each.attribute: buffers[each.name] for each in targets})

    def _pack_heads(self, changed: Container[int] | None = None) -> None:
        """Pack them again; `changed`: only those whose weight is at one of these addresses."""
        for layer in self._kept_and_packed():
            if changed is None or layer.weight.data_ptr() in changed:
                layer.quant_method.process_weights_after_loading(layer)

    def _kept_and_packed(self) -> list[Any]:
        """Layers with a weight and something packed from it that is used: output heads."""
        heads = [
            layer
            for layer in self._model.modules()
            if hasattr(layer, "cpu_linear") and getattr(layer, "weight", None) is not None
        ]
        kept = [layer for layer in heads if layer.weight.numel()]
        named = getattr(self._model, "lm_head", None)
        # Embeddings are packed too: of use where they are the head themselves.
        return [each for each in kept if each is named] if named in kept else kept

    def _compare(self, buffers: Mapping[str, Tensor]) -> None:
        """Compare every layer with a fresh one of the same weights."""
        for target in self._linear():
            compare_products(target.layer, buffers.get(target.name, target.tensor().data))
        for layer in self._kept_and_packed():
            compare_products(layer, layer.weight.data)
        for targets in self._packed.values():
            if has_experts(targets[0].layer):
                weights = {each.attribute: buffers[each.name] for each in targets}
                compare_packed(targets[0].layer, weights)

    def _linear(self) -> list[Target]:
        found = [target for target in self._targets if target.attribute == "weight"]
        return [target for target in found if _is_linear(target.layer)]


def _is_linear(layer: nn.Module) -> bool:
    """Whether products are what it is for: an embedding is packed too, and only looked up in."""
    return hasattr(layer, "quant_method") and not hasattr(layer, "shard_indices")


def _typed(chunk: TensorChunk, spec: TensorSpec) -> Tensor:
    """The chunk as the tensor that it is; a copy, for shared memory changes."""
    flat = torch.from_numpy(chunk.data.copy())
    return flat.view(getattr(torch, spec.dtype)).reshape(spec.shape)


__all__ = ["InstalledWeights"]
