"""Weights in layers that look like vLLM's: places, packers, tied heads, and what is proved.

The layers fuse, split over processes, pad the vocabulary and pack as vLLM's do; vLLM is not needed.
"""

from types import SimpleNamespace

import pytest
import torch
from torch import nn

from rhymeflow.engine.vllm.places import find_places
from rhymeflow.engine.vllm.weights import InstalledWeights
from rhymeflow.weights.base import VersionUnavailable, prove
from rhymeflow.weights.install import SlabPlace
from rhymeflow.weights.manifest import ManifestMismatch, manifest_of
from rhymeflow.weights.proof import ChecksumMismatch
from rhymeflow.weights.shared_memory import SharedMemoryWeightStore

HIDDEN, HEADS, KV_HEADS, HEAD, INNER, VOCABULARY, PADDED = 16, 4, 2, 4, 24, 50, 64
EXPERTS, EXPERT_INNER = 3, 8


class Packer:
    """`quant_method`: packs by transposing; what it made of a weight stays until it packs again."""

    def __init__(self, *, empties):
        self.empties = empties

    def process_weights_after_loading(self, layer):
        packed = layer.weight.data.t().clone()
        layer.cpu_linear = lambda x: x @ packed
        if self.empties:
            layer.weight = nn.Parameter(torch.empty(0, dtype=packed.dtype), requires_grad=False)

    def apply(self, layer, x):
        return layer.cpu_linear(x)


class Linear(nn.Module):
    def __init__(self, rows, columns, *, rank=0, size=1, replicas=None, whole_rows=False):
        super().__init__()
        self.output_partition_sizes = rows if whole_rows else [each // size for each in rows]
        self.input_size_per_partition = columns // size if whole_rows else columns
        self.tp_rank, self.tp_size = rank, size
        if replicas is not None:
            self.num_kv_head_replicas = replicas
        self.quant_method = Packer(empties=True)
        shape = sum(self.output_partition_sizes), self.input_size_per_partition
        self.weight = nn.Parameter(torch.randn(shape), requires_grad=False)
        self.quant_method.process_weights_after_loading(self)


class Embedding(nn.Module):
    def __init__(self, rank, size):
        super().__init__()
        held = PADDED // size
        self.shard_indices = SimpleNamespace(
            org_vocab_start_index=min(rank * held, VOCABULARY),
            org_vocab_end_index=min((rank + 1) * held, VOCABULARY),
        )
        self.tp_size = size
        self.quant_method = Packer(empties=False)
        self.weight = nn.Parameter(torch.zeros(PADDED // size, HIDDEN), requires_grad=False)
        self.quant_method.process_weights_after_loading(self)


class ExpertPacker:
    """Packs two weights together, by reversing rows; only when it makes its kernel, as vLLM's."""

    moe_kernel = None

    def process_weights_after_loading(self, layer):
        if self.moe_kernel is None:
            self.moe_kernel = object()
            for name in ("w13_weight", "w2_weight"):
                packed = nn.Parameter(getattr(layer, name).flip(1), requires_grad=False)
                setattr(layer, name, packed)


class RoutedExperts(nn.Module):
    def __init__(self, rank, size):
        super().__init__()
        parallel = SimpleNamespace(tp_rank=rank, tp_size=size, use_ep=False)
        self.moe_config = SimpleNamespace(moe_parallel_config=parallel)
        inner = EXPERT_INNER // size
        self.w13_weight = nn.Parameter(torch.randn(EXPERTS, 2 * inner, HIDDEN), requires_grad=False)
        self.w2_weight = nn.Parameter(torch.randn(EXPERTS, HIDDEN, inner), requires_grad=False)
        self.quant_method = ExpertPacker()
        self.quant_method.process_weights_after_loading(self)

    def unpacked(self):
        return self.w13_weight.flip(1), self.w2_weight.flip(1)


class Block(nn.Module):
    def __init__(self, rank, size):
        super().__init__()
        kv = KV_HEADS * HEAD
        replicas = max(1, size // KV_HEADS)
        sizes = [HEADS * HEAD, kv * replicas, kv * replicas]
        self.qkv_proj = Linear(sizes, HIDDEN, rank=rank, size=size, replicas=replicas)
        self.o_proj = Linear([HIDDEN], HEADS * HEAD, rank=rank, size=size, whole_rows=True)
        self.gate_up_proj = Linear([INNER, INNER], HIDDEN, rank=rank, size=size)
        self.norm = nn.RMSNorm(HIDDEN).requires_grad_(False)
        self.experts = nn.ModuleDict({"routed_experts": RoutedExperts(rank, size)})


class Model(nn.Module):
    def __init__(self, rank=0, size=1):
        super().__init__()
        self.packed_modules_mapping = {
            "qkv_proj": ["q_proj", "k_proj", "v_proj"],
            "gate_up_proj": ["gate_proj", "up_proj"],
        }
        self.embed_tokens = Embedding(rank, size)
        self.block = Block(rank, size)
        self.lm_head = Embedding(rank, size)
        self.lm_head.weight = self.embed_tokens.weight
        self.lm_head.quant_method.process_weights_after_loading(self.lm_head)


def published(seed=0):
    torch.manual_seed(seed)
    kv = KV_HEADS * HEAD
    shapes = {
        "embed_tokens.weight": (VOCABULARY, HIDDEN),
        "block.q_proj.weight": (HEADS * HEAD, HIDDEN),
        "block.k_proj.weight": (kv, HIDDEN),
        "block.v_proj.weight": (kv, HIDDEN),
        "block.o_proj.weight": (HIDDEN, HEADS * HEAD),
        "block.gate_proj.weight": (INNER, HIDDEN),
        "block.up_proj.weight": (INNER, HIDDEN),
        "block.norm.weight": (HIDDEN,),
        "block.experts.gate_up_proj": (EXPERTS, 2 * EXPERT_INNER, HIDDEN),
        "block.experts.down_proj": (EXPERTS, HIDDEN, EXPERT_INNER),
    }
    return {name: torch.randn(shape) for name, shape in shapes.items()}


class Deployed:
    """Published weights, and a model that was given them once."""

    def __init__(self, dtype=torch.float32, keep=0):
        self.tensors = {name: tensor.to(dtype) for name, tensor in published().items()}
        self.store = SharedMemoryWeightStore(manifest_of(self.tensors), keep=keep)
        self.version = 0
        self.checksum = self.store.publish(0, self.tensors)
        self.reader, self.model = self.store.handle.open(), model_of(dtype)
        self.weights = InstalledWeights(self.model, self.reader)
        self.weights.install(self.reader, compare=dtype == torch.float32)

    def publish(self, *names):
        """Others than before in these tensors."""
        for name in names:
            self.tensors[name].view(-1)[3] += 1
        self.version += 1
        self.checksum = self.store.publish(self.version, self.tensors)

    def install(self, **options):
        pulled = self.weights.install(self.reader, self.version, **options)
        assert prove(self.reader.manifest, [pulled]) == (self.version, self.checksum)


def model_of(dtype):
    model = Model().to(dtype)
    for layer in (model.embed_tokens, model.lm_head):
        layer.quant_method.process_weights_after_loading(layer)
    return model


@pytest.fixture(params=[{}])
def deployed(request):
    made = Deployed(**request.param)
    yield made
    made.store.close()


by_changes = pytest.mark.parametrize(
    "deployed", [{"dtype": torch.bfloat16, "keep": 4}], indirect=True, ids=["by changes"]
)


def never(*_, **__):
    raise AssertionError


def products(model, x):
    """What each layer makes of x."""
    block = model.block
    return {
        name: layer.quant_method.apply(layer, x)
        for name, layer in (
            ("qkv", block.qkv_proj),
            ("gate_up", block.gate_up_proj),
            ("head", model.lm_head),
        )
    }


@pytest.mark.parametrize("size", [1, 2, 4])
def test_processes_hold_their_parts_of_what_was_published(deployed, size):
    """Two processes split the key and value heads, four share them by twos."""
    reader, tensors = deployed.reader, deployed.tensors
    models = [Model(rank, size) for rank in range(size)]
    installed = [InstalledWeights(model, reader) for model in models]
    for version in (0, 1):
        tensors.update(published(version))
        deployed.publish()
        pulled = [weights.install(reader, compare=True) for weights in installed]
        assert prove(reader.manifest, pulled) == (deployed.version, deployed.checksum)
        x, y = torch.randn(3, HIDDEN), torch.randn(3, HEADS * HEAD)
        made = [products(model, x) for model in models]
        heads, kv = HEADS * HEAD // size, max(HEAD, KV_HEADS * HEAD // size)
        for rank, each in enumerate(made):
            q, k, v = each["qkv"].split([heads, kv, kv], dim=1)
            first = rank * KV_HEADS // size * HEAD
            for name, found, begin in (("q", q, rank * heads), ("k", k, first), ("v", v, first)):
                due = tensors[f"block.{name}_proj.weight"][begin : begin + found.shape[1]]
                torch.testing.assert_close(found, x @ due.T)
        gates, ups = zip(*(each["gate_up"].chunk(2, dim=1) for each in made), strict=True)
        for name, parts in (("gate", gates), ("up", ups)):
            due = x @ tensors[f"block.{name}_proj.weight"].T
            torch.testing.assert_close(torch.cat(parts, dim=1), due)
        whole = torch.cat([each["head"] for each in made], dim=1)[:, :VOCABULARY]
        torch.testing.assert_close(whole, x @ tensors["embed_tokens.weight"].T)
        parts = zip(models, y.split(HEADS * HEAD // size, dim=1), strict=True)
        summed = sum(model.block.o_proj.cpu_linear(part) for model, part in parts)
        torch.testing.assert_close(summed, y @ tensors["block.o_proj.weight"].T)
        experts = [model.block.experts["routed_experts"].unpacked() for model in models]
        gates, ups = zip(*(gate_up.chunk(2, dim=1) for gate_up, _ in experts), strict=True)
        assert torch.equal(torch.cat([*gates, *ups], dim=1), tensors["block.experts.gate_up_proj"])
        downs = torch.cat([down for _, down in experts], dim=2)
        assert torch.equal(downs, tensors["block.experts.down_proj"])
        for model in models:
            assert torch.equal(model.block.norm.weight, tensors["block.norm.weight"])


def test_experts_that_were_not_packed_again_are_noticed(deployed, monkeypatch):
    experts = deployed.model.block.experts["routed_experts"]
    pack = ExpertPacker.process_weights_after_loading

    def stale(self, layer):
        old = layer.w2_weight
        pack(self, layer)
        if layer is experts:
            layer.w2_weight = nn.Parameter(old + 1, requires_grad=False)

    monkeypatch.setattr(ExpertPacker, "process_weights_after_loading", stale)
    with pytest.raises(ChecksumMismatch, match="w2_weight of a RoutedExperts"):
        deployed.install(compare=True)


def test_experts_that_a_gpu_has_otherwise_are_refused():
    model = Model()
    experts = model.block.experts["routed_experts"]
    for name in ("w13_weight", "w2_weight"):
        weight = nn.Parameter(getattr(experts, name).to("meta"), requires_grad=False)
        setattr(experts, name, weight)
    experts.quant_method.unquantized_backend = SimpleNamespace(name="FLASHINFER_CUTLASS")
    with pytest.raises(ManifestMismatch, match="rollout needs TRITON"):
        find_places(model, manifest_of(published()))
    experts.quant_method.unquantized_backend.name = "TRITON"
    places = find_places(model, manifest_of(published()))
    assert not places["block.experts.down_proj"].target.is_packed


class Convolution(nn.Module):
    """As vLLM has it: a linear layer whose weight is no matrix, and is not packed."""

    def __init__(self, rows, width):
        super().__init__()
        self.output_partition_sizes, self.input_size_per_partition = rows, width
        self.quant_method = Packer(empties=False)
        self.weight = nn.Parameter(torch.zeros(sum(rows), 1, width), requires_grad=False)


class Mixer(nn.Module):
    """A state space: one tensor for several parts of a layer, and -exp(A_log) for A_log."""

    def __init__(self):
        super().__init__()
        self.in_proj = Linear([8, 8, 4, 2], HIDDEN)
        self.conv1d = Convolution([8, 4, 4], 3)
        self.A = nn.Parameter(torch.zeros(2), requires_grad=False)


class Hybrid(nn.Module):
    def __init__(self):
        super().__init__()
        self.packed_modules_mapping = {"in_proj_qkvz": ["in_proj_qkv", "in_proj_z"]}
        self.mixer = Mixer()
        self.delta = nn.ModuleDict({"in_proj_qkvz": Linear([8, 8, 4, 4], HIDDEN)})


def test_layers_that_carry_a_state_get_theirs():
    torch.manual_seed(0)
    tensors = {
        "mixer.in_proj.weight": torch.randn(22, HIDDEN),
        "mixer.conv1d.weight": torch.randn(16, 1, 3),
        "mixer.A_log": torch.randn(2),
        "delta.in_proj_qkv.weight": torch.randn(20, HIDDEN),
        "delta.in_proj_z.weight": torch.randn(4, HIDDEN),
    }
    store, model = SharedMemoryWeightStore(manifest_of(tensors)), Hybrid()
    try:
        checksum, reader = store.publish(0, tensors), store.handle.open()
        memory = model.mixer.A.data_ptr(), model.mixer.conv1d.weight.data_ptr()
        pulled = InstalledWeights(model, reader).install(reader, compare=True)
        assert prove(reader.manifest, [pulled]) == (0, checksum)
    finally:
        store.close()
    mixer, x = model.mixer, torch.randn(3, HIDDEN)
    assert torch.equal(mixer.A, -tensors["mixer.A_log"].exp())
    assert torch.equal(mixer.conv1d.weight, tensors["mixer.conv1d.weight"])
    assert memory == (mixer.A.data_ptr(), mixer.conv1d.weight.data_ptr())  # vLLM has views of it
    torch.testing.assert_close(mixer.in_proj.cpu_linear(x), x @ tensors["mixer.in_proj.weight"].T)
    due = torch.cat([tensors["delta.in_proj_qkv.weight"], tensors["delta.in_proj_z.weight"]])
    torch.testing.assert_close(model.delta["in_proj_qkvz"].cpu_linear(x), x @ due.T)


@pytest.mark.parametrize("name", ["q_proj", "v_proj", "up_proj"])
def test_a_fused_parameter_gets_all_its_tensors(name):
    tensors = published()
    del tensors[f"block.{name}.weight"]
    with pytest.raises(ManifestMismatch, match=r"block\.\w+_proj\.weight has .* is given"):
        find_places(Model(), manifest_of(tensors))


def test_a_head_that_is_not_packed_again_is_noticed(deployed, monkeypatch):
    deployed.tensors.update(published(1))
    deployed.publish()
    head = deployed.model.lm_head
    assert deployed.weights._output_heads() == [head]
    answers = iter([[], [head]])
    monkeypatch.setattr(deployed.weights, "_output_heads", lambda: next(answers))
    with pytest.raises(ChecksumMismatch, match="does not compute"):
        deployed.install(compare=True)


def test_a_packer_that_gets_something_else_is_noticed(deployed, monkeypatch):
    """The digest is of what the packer is given."""
    places = deployed.weights._places
    place = places["block.k_proj.weight"]
    (piece,) = place.pieces
    (other,) = places["block.v_proj.weight"].pieces
    place.pieces = [piece._replace(into=other.into)]
    deployed.install()  # its own digest is right, for it is where it was put
    monkeypatch.setattr(SlabPlace, "copy", lambda place, *given: 1)
    with pytest.raises(ChecksumMismatch, match="the checksum is not the published one"):
        deployed.install()


def test_newer_weights_if_those_that_are_wanted_are_gone(deployed):
    for _ in "12":
        deployed.publish()
    assert deployed.weights.install(deployed.reader, 0).weights.version == 2
    empty = SharedMemoryWeightStore(deployed.store.handle.manifest)
    try:
        with pytest.raises(VersionUnavailable):
            deployed.weights.install(empty.handle.open())
    finally:
        empty.close()


@pytest.mark.parametrize("name", ["block.q_norm.weight", "block.norm.weight"])
def test_a_tensor_without_a_place_and_a_place_without_a_tensor_are_refused(name):
    tensors = published()
    if tensors.pop(name, None) is None:
        tensors[name] = torch.ones(HEAD)
    with pytest.raises(ManifestMismatch, match=name):
        find_places(Model(), manifest_of(tensors))


def test_the_router_of_granites_experts_is_vllms_gate():
    model = nn.Module()
    model.block_sparse_moe = nn.ModuleDict({"gate": Linear([EXPERTS], HIDDEN)})
    name = "block_sparse_moe.router.weight"
    places = find_places(model, manifest_of({name: torch.ones(EXPERTS, HIDDEN)}))
    assert places[name].target.name == "block_sparse_moe.gate.weight"


@by_changes
def test_changes_are_put_in_and_only_layers_that_changed_are_packed_again(deployed, monkeypatch):
    model, packed = deployed.model, []
    deployed.publish()
    deployed.install()  # is told of changes for the first time: whole, and kept
    monkeypatch.setattr(deployed.weights, "_pack_if_whole", never)
    pack = Packer.process_weights_after_loading

    def watched(self, layer):
        packed.append(layer)
        pack(self, layer)

    monkeypatch.setattr(Packer, "process_weights_after_loading", watched)
    for names, times, layers in (
        (("block.k_proj.weight",), 1, [model.block.qkv_proj]),
        (("block.norm.weight",), 1, []),
        (("embed_tokens.weight",), 1, [model.lm_head]),
        (
            ("block.up_proj.weight", "block.o_proj.weight"),
            1,
            [model.block.o_proj, model.block.gate_up_proj],
        ),
        ((), 1, []),
        (("block.q_proj.weight",), 6, [model.block.qkv_proj]),  # too old for changes: comes whole
    ):
        for _ in range(times):
            deployed.publish(*names)
        packed.clear()
        deployed.install()
        assert {id(layer) for layer in packed} == {id(layer) for layer in layers}
        fresh, reader = model_of(torch.bfloat16), deployed.store.handle.open()
        InstalledWeights(fresh, reader).install(reader, deployed.version)
        x = torch.randn(3, HIDDEN).bfloat16()
        for name, due in products(fresh, x).items():
            assert torch.equal(products(model, x)[name], due), name
        assert torch.equal(model.block.norm.weight, deployed.tensors["block.norm.weight"])


@by_changes
def test_a_buffer_that_somebody_changed_is_noticed(deployed):
    """By the digest, if a change is put where something else stands than it was found against."""
    for _ in "12":
        deployed.publish("block.q_proj.weight")
        deployed.install()
    deployed.weights._buffers["block.qkv_proj.weight"].view(-1)[3] += 1
    deployed.publish("block.q_proj.weight")
    with pytest.raises(ChecksumMismatch, match=r"block\.q_proj"):
        deployed.install()


@by_changes
@pytest.mark.parametrize("size", [2, 4])
def test_processes_with_parts_take_their_changes(deployed, size, monkeypatch):
    reader, specs = deployed.reader, {spec.name: spec for spec in deployed.reader.manifest}
    models = [Model(rank, size).bfloat16() for rank in range(size)]
    installed = [InstalledWeights(model, reader) for model in models]
    for number in range(3):
        for name in specs:
            deployed.tensors[name].view(-1)[number * 7 :: 29] += 1
        deployed.publish()
        if number == 2:  # they were told of changes before
            monkeypatch.setattr(InstalledWeights, "_pack_if_whole", never)
            assert reader.update(installed[0].holds, None).steps
        pulled = [weights.install(reader) for weights in installed]
        assert prove(reader.manifest, pulled) == (deployed.version, deployed.checksum)
    for weights in installed:  # what they were packed from is what a whole pull brings
        for name, place in weights._places.items():
            target = place.target
            into = weights._buffers[target.name] if target.is_packed else target.tensor()
            for piece in place.pieces:
                due = deployed.tensors[name].narrow(piece.axis, piece.first, piece.size)
                assert torch.equal(piece.of(into), due), name


def test_parts_that_differ_and_parts_that_are_missing_are_noticed(deployed):
    reader = deployed.reader
    pulled = [InstalledWeights(Model(rank, 4), reader).install(reader) for rank in range(4)]
    prove(reader.manifest, pulled)
    with pytest.raises(ChecksumMismatch, match="embed_tokens"):
        prove(reader.manifest, pulled[:3])
    numbers = {spec.name: n for n, spec in enumerate(reader.manifest)}
    for name, rank in (("block.norm.weight", 2), ("block.k_proj.weight", 1)):  # of which are copies
        held = list(pulled[rank].held)
        held[numbers[name]] = {slab: 7 for slab in held[numbers[name]]}
        wrong = [*pulled]
        wrong[rank] = pulled[rank]._replace(held=held)
        with pytest.raises(ChecksumMismatch, match=name):
            prove(reader.manifest, wrong)
