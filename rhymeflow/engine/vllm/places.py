"""Maps each tensor of the weight store to its place in vLLM's model, or in one process's shard.

vLLM fuses the query, key and value projections of a layer, and gate and up; it shards layers over
processes, pads the vocabulary, holds a mixture's experts in one layer, and on CPUs keeps only the
packed form of a layer's weights. Each tensor must have a place and each parameter must be filled,
so all weights that are used were pulled.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from rhymeflow.weights.install import SlabPlace
from rhymeflow.weights.manifest import Manifest, ManifestMismatch, TensorSpec, slab_of

EXPERTS = {"gate_up_proj": "w13_weight", "down_proj": "w2_weight"}
"""vLLM's names of the weights of a layer's experts; both are [experts, rows, columns]."""

DECAY_LOGARITHM, DECAY = "A_log", "A"
"""A state space's weight, and what vLLM keeps in its place: -exp(A_log)."""


ROUTER, GATE = "block_sparse_moe.router", "block_sparse_moe.gate"
"""A router of Granite's experts, and vLLM's name of it, which its mapper has for older files."""


class FusedPart(NamedTuple):
    """Which of the `total` tensors that a parameter is made of, in order of their rows, from 0."""

    number: int = 0
    total: int = 1


class Piece(NamedTuple):
    """Part of a tensor, which is cut in one dimension, and where it begins in the target's."""

    axis: int
    first: int
    size: int
    into: int

    def of(self, target: Tensor) -> Tensor:
        """Return its place in the target; a single number has a row."""
        here = slice(self.into, self.into + self.size)
        return torch.atleast_1d(target)[(slice(None),) * self.axis + (here,)]


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
        return getattr(self.layer, self.attribute)


@dataclass(slots=True)
class TensorPlace:
    """Where this process holds a tensor of the manifest, or its shard of it."""

    target: Target
    spec: TensorSpec
    pieces: Sequence[Piece]

    def shape_of(self, piece: Piece) -> list[int]:
        """Return a piece's shape."""
        return [piece.size if n == piece.axis else each for n, each in enumerate(self.spec.shape)]

    def slabs(self, into: Tensor) -> list[SlabPlace]:
        """Return the pieces' places in `into`, the target or what it is packed from."""
        found = []
        for piece in self.pieces:
            due, part = self.shape_of(piece), piece.of(into)
            if list(part.shape) != due:
                raise ManifestMismatch(
                    f"{self.spec.name} has shape {due}, but its place in vLLM's "
                    f"{self.target.name} has {list(part.shape)}"
                )
            slab = slab_of(self.spec, piece.axis, piece.first, piece.size)
            found.append(SlabPlace(self.spec, slab, part))
        return found


def find_places(model: nn.Module, manifest: Manifest) -> dict[str, TensorPlace]:
    """Return the place of each tensor by its name.

    Raises:
        ManifestMismatch: a tensor has no place, or a parameter of the model is left over.
    """
    layers = {name: _plain(each) for name, each in model.named_modules()}
    fused: Mapping[str, list[str]] = getattr(model, "packed_modules_mapping", None) or {}
    mapper = getattr(model, "hf_to_vllm_mapper", None)
    targets: dict[str, Target] = {}
    places: dict[str, TensorPlace] = {}
    index_of: dict[str, int] = {}
    for spec in manifest:
        path, attribute, part = _layer_part(spec.name, layers, fused)
        if getattr(layers.get(path), attribute, None) is None and mapper is not None:
            name = mapper.map_name(spec.name) or spec.name
            path, attribute, part = _layer_part(name, layers, fused)
        if path not in layers and path.endswith(ROUTER):
            path = f"{path.removesuffix(ROUTER)}{GATE}"
        layer = layers.get(path)
        if attribute == DECAY_LOGARITHM and not hasattr(layer, attribute):
            attribute = DECAY
        if layer is None or getattr(layer, attribute, None) is None:
            raise ManifestMismatch(f"{spec.name}: vLLM's {type(model).__name__} has no {path}")
        target = targets.get(f"{path}.{attribute}")
        if target is None:
            is_packed = attribute == DECAY or _is_packed(layer, getattr(layer, attribute))
            target = Target(f"{path}.{attribute}", layer, attribute, [], is_packed)
            targets[target.name] = target
        places[spec.name] = TensorPlace(target, spec, _pieces(target, part, spec.shape))
        index_of[spec.name] = part.number
    _check_filled(model, targets)
    _check_rows(places)
    for name in sorted(places, key=index_of.__getitem__):  # within each target, in row order
        places[name].target.parts.append(name)
    return places


def _layer_part(
    tensor: str, layers: Mapping[str, nn.Module], fused: Mapping[str, list[str]]
) -> tuple[str, str, FusedPart]:
    """Return vLLM's layer and attribute for a Hugging Face tensor, and which part of it that is."""
    path, _, attribute = tensor.rpartition(".")
    if attribute in EXPERTS and f"{path}.routed_experts" in layers:
        return f"{path}.routed_experts", EXPERTS[attribute], FusedPart()
    parent, _, last = path.rpartition(".")
    for whole, parts in fused.items():
        name = f"{parent}.{whole}" if parent else whole
        if last in parts and name in layers:
            return name, attribute, FusedPart(parts.index(last), len(parts))
    return path, attribute, FusedPart()


def _plain(layer: Any) -> Any:
    """Return the layer that vLLM has put one of its adapters around, or the layer itself."""
    return layer.base_layer if hasattr(layer, "lora_a_stacked") else layer


def has_experts(layer: nn.Module) -> bool:
    """Return whether the layer holds the experts of a mixture."""
    return hasattr(layer, "w13_weight")


def _is_packed(layer: nn.Module, weight: Tensor) -> bool:
    """Return whether the layer computes with a packed form of the weight. Raises `ManifestMismatch`
    if a GPU's experts use a backend other than Triton: the others pack them, and CUDA graphs forbid
    packing them again; or if a CPU packs a convolution, of which vLLM keeps other copies."""
    if hasattr(layer, "_cpu_unpacked_conv_weight"):
        raise ManifestMismatch(
            "vLLM packs convolutions on this CPU in bfloat16; set model.dtype = 'float32'"
        )
    if not has_experts(layer):
        return weight.numel() == 0  # on CPUs vLLM empties a parameter once it has packed it
    if weight.device.type == "cpu":
        return True
    backend = getattr(layer.quant_method, "unquantized_backend", None)
    if getattr(backend, "name", None) != "TRITON":
        raise ManifestMismatch(f"vLLM computes experts with {backend}, but rollout needs TRITON")
    return False


def _tensor_parallel(layer: nn.Module) -> tuple[int, int]:
    """Return the layer's tensor-parallel rank in this process, and the number of ranks."""
    if has_experts(layer):
        parallel: Any = layer.moe_config.moe_parallel_config  # type: ignore[union-attr]
        assert not parallel.use_ep, "expert parallelism is not supported"
        return parallel.tp_rank, parallel.tp_size
    return getattr(layer, "tp_rank", 0), getattr(layer, "tp_size", 1)


def _pieces(target: Target, part: FusedPart, shape: tuple[int, ...]) -> list[Piece]:
    """Return what this process holds of a tensor of this shape, which is `part` of the target."""
    layer: Any = target.layer
    if has_experts(layer):
        return _expert_pieces(target, shape)
    indices = getattr(layer, "shard_indices", None)
    if indices is not None:  # an embedding or a head, padded after the end of the vocabulary
        first, end = indices.org_vocab_start_index, indices.org_vocab_end_index
        return [Piece(0, first, end - first, 0)]
    if getattr(layer, "output_partition_sizes", None) is not None:
        return [_linear_piece(layer, part, shape)]
    return [Piece(0, 0, shape[0], 0)]


def _linear_piece(layer: Any, part: FusedPart, shape: tuple[int, ...]) -> Piece:
    """See `_pieces`, for a linear layer, which is sharded by rows or by columns."""
    rank, num_ranks = _tensor_parallel(layer)
    sizes = layer.output_partition_sizes  # this process's rows of each output
    if part.total < len(sizes):  # the first tensor, or the last, is several outputs
        if num_ranks > 1:
            raise ManifestMismatch(f"a tensor of {len(sizes)} outputs is not split over processes")
        return Piece(0, 0, shape[0], 0 if part.number == 0 else sum(sizes) - shape[0])
    num_rows, first_row = sizes[part.number], sum(sizes[: part.number])
    num_columns = getattr(layer, "input_size_per_partition", None)
    is_matrix = len(shape) == 2  # a convolution, [channels, 1, width], has other columns
    if num_columns is not None and is_matrix and num_columns != shape[1]:
        return Piece(1, rank * num_columns, num_columns, 0)
    if part.number > 0:  # each key and value head may be held by several processes
        rank //= getattr(layer, "num_kv_head_replicas", 1)
    return Piece(0, rank * num_rows if num_rows != shape[0] else 0, num_rows, first_row)


def _expert_pieces(target: Target, shape: tuple[int, ...]) -> list[Piece]:
    """Return this process's rows of each expert's gate and up, or the same columns of down."""
    rank, num_ranks = _tensor_parallel(target.layer)
    if target.attribute == EXPERTS["down_proj"]:
        size = shape[2] // num_ranks
        return [Piece(2, rank * size, size, 0)]
    num_gate_rows = shape[1] // 2  # as many rows of up follow
    size = num_gate_rows // num_ranks
    if num_ranks == 1:
        return [Piece(1, 0, shape[1], 0)]
    return [
        Piece(1, first + rank * size, size, n * size) for n, first in enumerate((0, num_gate_rows))
    ]


def shape_of(target: Target, places: Mapping[str, TensorPlace]) -> tuple[int, ...]:
    """Return the target's shape before packing."""
    ends = [
        places[name].shape_of(piece._replace(size=piece.into + piece.size))
        for name in target.parts
        for piece in places[name].pieces
    ]
    return tuple(map(max, zip(*ends, strict=True)))


def _check_filled(model: nn.Module, targets: Mapping[str, Target]) -> None:
    """Raise `ManifestMismatch` unless each parameter of the model is a target, or tied to one, and
    no two targets are tied: the second would overwrite the first."""
    filled: dict[int, Target] = {}
    for target in targets.values():
        first = filled.setdefault(id(target.tensor()), target)
        if first is not target:
            raise ManifestMismatch(
                f"{target.name} and {first.name} are one parameter in vLLM, but two tensors"
            )
    for name, parameter in model.named_parameters(remove_duplicate=False):
        if id(parameter) not in filled:
            raise ManifestMismatch(f"{name} of vLLM's model is not in the weight store's manifest")


def _check_rows(places: Mapping[str, TensorPlace]) -> None:
    """Raise `ManifestMismatch` unless each fused parameter gets all the tensors that it is made of:
    without a value projection, say, its rows would stay as they were."""
    given = Counter[Target]()
    for place in places.values():
        is_padded = hasattr(place.target.layer, "shard_indices")  # an embedding or a head
        if hasattr(place.target.layer, "output_partition_sizes") and not is_padded:
            given[place.target] += sum(place.shape_of(piece)[0] for piece in place.pieces)
    for target, rows in given.items():
        due = sum(target.layer.output_partition_sizes)  # type: ignore[arg-type]
        if rows != due:
            raise ManifestMismatch(f"{target.name} has {due} rows in vLLM, but is given {rows}")
