"""Where each tensor of the weight store stands in vLLM's model, and in which process's part of it.

vLLM puts the query, key and value projections of a layer into one, and likewise gate and up; it
splits layers over processes; it pads the vocabulary; and on CPUs it hands a linear layer's weight
to a packer and keeps only what the packer made of it.

Holds true: every tensor of the manifest has a place, and every parameter of the model is filled by
them (`find_places` raises otherwise), so nothing is computed with that was not pulled. Works on any
modules with these attributes; imports no vLLM.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from itertools import accumulate

from torch import Tensor, nn

from rhymeflow.weights.manifest import Manifest, ManifestMismatch

Slices = tuple[slice, ...]


@dataclass(slots=True, eq=False)
class Target:
    """A parameter of vLLM's model."""

    name: str
    layer: nn.Module
    attribute: str
    parts: list[str]
    """The manifest's tensors that it is made of, those of lower rows first."""
    is_emptied: bool
    """The layer keeps what the packer made of it, and not the parameter."""

    def tensor(self) -> Tensor:
        """The parameter as it is now."""
        found: Tensor = getattr(self.layer, self.attribute)
        return found

    @property
    def is_split(self) -> bool:
        """Whether this process has a part of it only."""
        return getattr(self.layer, "tp_size", 1) > 1


@dataclass(slots=True)
class Place:
    """What this process holds of one tensor of the manifest."""

    target: Target
    source: Slices
    """The part of the tensor."""
    destination: Slices
    """Where in the target it is."""


def find_places(model: nn.Module, manifest: Manifest) -> dict[str, Place]:
    """Return the place of each tensor by its name.

    Raises:
        ManifestMismatch: a tensor has no place, or a parameter of the model is left over.
    """
    layers = dict(model.named_modules())
    fused: Mapping[str, list[str]] = getattr(model, "packed_modules_mapping", None) or {}
    mapper = getattr(model, "hf_to_vllm_mapper", None)
    targets: dict[str, Target] = {}
    order: dict[str, tuple[Target, int]] = {}
    for spec in manifest:
        path, _, attribute = spec.name.rpartition(".")
        found, part = _layer(path, layers, fused)
        if found not in layers and mapper is not None:
            path, _, attribute = (mapper.map_name(spec.name) or spec.name).rpartition(".")
            found, part = _layer(path, layers, fused)
        layer = layers.get(found)
        if layer is None or getattr(layer, attribute, None) is None:
            raise ManifestMismatch(f"{spec.name}: vLLM's {type(model).__name__} has no {found}")
        target = targets.get(f"{found}.{attribute}")
        if target is None:
            is_emptied = getattr(layer, attribute).numel() == 0
            target = Target(f"{found}.{attribute}", layer, attribute, [], is_emptied)
            targets[target.name] = target
        order[spec.name] = target, part
    _check_filled(model, targets)
    shapes = {spec.name: spec.shape for spec in manifest}
    for name, (target, _) in sorted(order.items(), key=lambda item: item[1][1]):
        target.parts.append(name)
    return {name: _place(target, part, shapes[name]) for name, (target, part) in order.items()}


def _layer(
    path: str, layers: Mapping[str, nn.Module], fused: Mapping[str, list[str]]
) -> tuple[str, int]:
    """The layer that holds what Hugging Face calls `path`, and which part of it that is."""
    parent, _, last = path.rpartition(".")
    for whole, parts in fused.items():
        name = f"{parent}.{whole}" if parent else whole
        if last in parts and name in layers:
            return name, parts.index(last)
    return path, 0


def _place(target: Target, part: int, shape: tuple[int, ...]) -> Place:
    """By the layer's own attributes."""
    layer, whole = target.layer, tuple(slice(0, size) for size in shape)
    indices = getattr(layer, "shard_indices", None)
    if indices is not None:  # an embedding or a head: padded behind the vocabulary
        first, end = indices.org_vocab_start_index, indices.org_vocab_end_index
        return Place(target, (slice(first, end), *whole[1:]), (slice(0, end - first), *whole[1:]))
    sizes = getattr(layer, "output_partition_sizes", None)
    if sizes is None:
        return Place(target, whole, whole)
    rank, row = getattr(layer, "tp_rank", 0), [0, *accumulate(sizes)][part]
    if part > 0:  # each key and value head may be held by several processes
        rank //= getattr(layer, "num_kv_head_replicas", 1)
    rows, columns = slice(0, shape[0]), whole[1:]
    if shape[0] != sizes[part]:
        rows = slice(rank * sizes[part], (rank + 1) * sizes[part])
    num_columns = getattr(layer, "input_size_per_partition", None)
    if columns and num_columns is not None and num_columns != shape[1]:
        columns = (slice(rank * num_columns, (rank + 1) * num_columns),)
    held = tuple(slice(0, each.stop - each.start) for each in columns)
    return Place(target, (rows, *columns), (slice(row, row + sizes[part]), *held))


def shape_of(target: Target, places: Mapping[str, Place]) -> tuple[int, ...]:
    """The target's shape before it is packed."""
    ends = [[each.stop for each in places[name].destination] for name in target.parts]
    return tuple(map(max, zip(*ends, strict=True)))


def _check_filled(model: nn.Module, targets: Mapping[str, Target]) -> None:
    """Raise unless each parameter of the model is some target's; tied ones are one tensor."""
    filled = {id(target.tensor()) for target in targets.values()}
    for name, parameter in model.named_parameters(remove_duplicate=False):
        if id(parameter) not in filled:
            raise ManifestMismatch(f"{name} of vLLM's model is not in the weight store's manifest")


__all__ = ["Place", "Target", "find_places", "shape_of"]
