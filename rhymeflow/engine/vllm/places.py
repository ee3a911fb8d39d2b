"""Maps each tensor of the weight store to its place in vLLM's model, or in one process's shard.

vLLM fuses the query, key and value projections of a layer, and gate and up; it shards layers over
processes, pads the vocabulary, holds a mixture's experts in one layer, and on CPUs keeps only the
packed form of a layer's weights. Each tensor must have a place and each parameter must be filled,
so all weights that are used were pulled.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from itertools import accumulate
from typing import Any

from torch import Tensor, nn

from rhymeflow.weights.manifest import Manifest, ManifestMismatch

Slices = tuple[slice, ...]

EXPERTS = {"gate_up_proj": "w13_weight", "down_proj": "w2_weight"}
"""vLLM's names of the weights of a layer's experts; both are [experts, rows, columns]."""


@dataclass(slots=True, eq=False)
class Target:
    """A parameter of vLLM's model."""

    name: str
    layer: nn.Module
    attribute: str
    parts: list[str]
    """The manifest's tensors that it is fused from, in the order of their rows."""
    is_packed: bool
    """Whether the layer keeps only a packed form of the parameter."""

    def tensor(self) -> Tensor:
        """Return the current parameter."""
        parameter: Tensor = getattr(self.layer, self.attribute)
        return parameter

    @property
    def is_split(self) -> bool:
        """Whether this process has only a shard of it."""
        return _share(self.layer)[1] > 1


@dataclass(slots=True)
class TensorPlace:
    """Where this process holds a tensor of the manifest, or its shard of it."""

    target: Target
    pieces: Sequence[tuple[Slices, Slices]]
    """Slices of the tensor, each with the slices of the target that hold it."""

    @property
    def destination(self) -> Slices:
        """Slices of the target, if this process has the whole tensor."""
        ((_, destination),) = self.pieces
        return destination


def find_places(model: nn.Module, manifest: Manifest) -> dict[str, TensorPlace]:
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
        path, attribute, part = _layer(spec.name, layers, fused)
        if path not in layers and mapper is not None:
            name = mapper.map_name(spec.name) or spec.name
            path, attribute, part = _layer(name, layers, fused)
        layer = layers.get(path)
        if layer is None or getattr(layer, attribute, None) is None:
            raise ManifestMismatch(f"{spec.name}: vLLM's {type(model).__name__} has no {path}")
        target = targets.get(f"{path}.{attribute}")
        if target is None:
            is_packed = _is_packed(layer, getattr(layer, attribute))
            target = Target(f"{path}.{attribute}", layer, attribute, [], is_packed)
            targets[target.name] = target
        order[spec.name] = target, part
    _check_filled(model, targets)
    shapes = {spec.name: spec.shape for spec in manifest}
    for name, (target, _) in sorted(order.items(), key=lambda item: item[1][1]):
        target.parts.append(name)
    return {name: _place(target, part, shapes[name]) for name, (target, part) in order.items()}


def _layer(
    tensor: str, layers: Mapping[str, nn.Module], fused: Mapping[str, list[str]]
) -> tuple[str, str, int]:
    """Return the layer and attribute of a Hugging Face tensor, and its index if it is fused."""
    path, _, attribute = tensor.rpartition(".")
    if attribute in EXPERTS and f"{path}.routed_experts" in layers:
        return f"{path}.routed_experts", EXPERTS[attribute], 0
    parent, _, last = path.rpartition(".")
    for whole, parts in fused.items():
        name = f"{parent}.{whole}" if parent else whole
        if last in parts and name in layers:
            return name, attribute, parts.index(last)
    return path, attribute, 0


def has_experts(layer: nn.Module) -> bool:
    """Return whether the layer holds the experts of a mixture."""
    return hasattr(layer, "w13_weight")


def _is_packed(layer: nn.Module, weight: Tensor) -> bool:
    """Return whether the layer computes with a packed form of the weight. Raises `ManifestMismatch`
    if experts are packed on a GPU, where CUDA graphs forbid packing them again."""
    if not has_experts(layer):
        return weight.numel() == 0
    if weight.device.type == "cpu":
        return True
    backend = getattr(layer.quant_method, "unquantized_backend", None)
    if getattr(backend, "name", None) != "TRITON":
        raise ManifestMismatch(f"vLLM computes experts by {backend}; TRITON was asked for")
    return False


def _share(layer: nn.Module) -> tuple[int, int]:
    """Return the layer's tensor-parallel rank in this process, and the number of ranks."""
    if has_experts(layer):
        parallel: Any = layer.moe_config.moe_parallel_config  # type: ignore[union-attr]
        assert not parallel.use_ep, "expert parallelism is not supported"
        return parallel.tp_rank, parallel.tp_size
    return getattr(layer, "tp_rank", 0), getattr(layer, "tp_size", 1)


def _place(target: Target, part: int, shape: tuple[int, ...]) -> TensorPlace:
    layer, whole = target.layer, tuple(slice(0, size) for size in shape)
    if has_experts(layer):
        return TensorPlace(target, _expert_pieces(target, shape))
    indices = getattr(layer, "shard_indices", None)
    if indices is not None:  # an embedding or a head: padded behind the vocabulary
        first, end = indices.org_vocab_start_index, indices.org_vocab_end_index
        held = slice(0, end - first), *whole[1:]
        return TensorPlace(target, [((slice(first, end), *whole[1:]), held)])
    sizes = getattr(layer, "output_partition_sizes", None)
    if sizes is None:
        return TensorPlace(target, [(whole, whole)])
    rank, row = _share(layer)[0], [0, *accumulate(sizes)][part]
    if part > 0:  # each key and value head may be held by several processes
        rank //= getattr(layer, "num_kv_head_replicas", 1)
    rows, columns = slice(0, shape[0]), whole[1:]
    if shape[0] != sizes[part]:
        rows = slice(rank * sizes[part], (rank + 1) * sizes[part])
    num_columns = getattr(layer, "input_size_per_partition", None)
    if columns and num_columns is not None and num_columns != shape[1]:
        columns = (slice(rank * num_columns, (rank + 1) * num_columns),)
    target_columns = tuple(slice(0, each.stop - each.start) for each in columns)
    target_rows = slice(row, row + sizes[part])
    return TensorPlace(target, [((rows, *columns), (target_rows, *target_columns))])


def _expert_pieces(target: Target, shape: tuple[int, ...]) -> list[tuple[Slices, Slices]]:
    """Return this process's rows of each expert's gate and up, or the same columns of down."""
    rank, size = _share(target.layer)
    experts, rows, columns = (slice(0, each) for each in shape)
    if size == 1:
        return [((experts, rows, columns), (experts, rows, columns))]
    if target.attribute == EXPERTS["down_proj"]:
        part = shape[2] // size
        shard = slice(rank * part, (rank + 1) * part)
        return [((experts, rows, shard), (experts, rows, slice(0, part)))]
    inner = shape[1] // 2
    part = inner // size
    return [
        (
            (experts, slice(first + rank * part, first + (rank + 1) * part), columns),
            (experts, slice(row, row + part), columns),
        )
        for first, row in ((0, 0), (inner, part))
    ]


def shape_of(target: Target, places: Mapping[str, TensorPlace]) -> tuple[int, ...]:
    """Return the target's shape before packing."""
    pieces = [piece for name in target.parts for piece in places[name].pieces]
    ends = [[each.stop for each in destination] for _, destination in pieces]
    return tuple(map(max, zip(*ends, strict=True)))


def _check_filled(model: nn.Module, targets: Mapping[str, Target]) -> None:
    """Raise `ManifestMismatch` unless each parameter of the model is a target, or tied to one."""
    filled = {id(target.tensor()) for target in targets.values()}
    for name, parameter in model.named_parameters(remove_duplicate=False):
        if id(parameter) not in filled:
            raise ManifestMismatch(f"{name} of vLLM's model is not in the weight store's manifest")
