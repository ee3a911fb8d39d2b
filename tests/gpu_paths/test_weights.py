"""Weights between a device and the host: in pinned memory alone, once, hashed where they are."""

import pytest
import torch

from rhymeflow.learner.ranks import Ranks
from rhymeflow.weights import install, on_device
from rhymeflow.weights.install import Installation, SlabPlace
from rhymeflow.weights.manifest import manifest_of, slab_of
from rhymeflow.weights.proof import ChecksumMismatch
from rhymeflow.weights.shared_memory import SharedMemoryWeightStore
from tests.gpu_paths.test_learner import learner_on, step, weights
from tests.weights.made_up import bits, checksum_of

STAGED = 100_000  # bytes of a buffer

SMALL = 2**17  # bytes of tables of keys and of digests, which are not weights


def made_up(version):
    torch.manual_seed(0)
    tensors = {
        "embed": torch.randn(2000, 300).bfloat16(),
        "layer": torch.randn(500, 777),
        "norm": torch.ones(33).bfloat16(),
    }
    tensors["embed"][version::97, :7] += version
    return tensors


def on(device, tensors):
    return {name: each.to(device) for name, each in tensors.items()}


@pytest.fixture(autouse=True)
def no_tables(monkeypatch):
    """Of another simulation."""
    for each in (on_device.Staging, on_device.Outbox):
        monkeypatch.setattr(each.__init__, "__defaults__", (STAGED,))
    on_device._keys.cache_clear()
    yield
    on_device._keys.cache_clear()


def sizes(tensors):
    return sum(each.nbytes for each in tensors.values())


def test_published_and_pulled_through_pinned_memory_once(sim):
    num_bytes = sizes(made_up(0))
    store = SharedMemoryWeightStore(manifest_of(made_up(0)), keep=2)
    try:
        there = on("cuda", made_up(0))
        sim.reset()
        assert store.publish(0, there) == checksum_of(made_up(0))
        assert sim.bytes["to host", "pinned"] == num_bytes + 8 * len(there)
        assert sim.bytes["to host", "pageable"] == 0
        assert sim.num_bytes("to device") < SMALL
        waits = sum(sim.waits.values())
        assert waits <= num_bytes // STAGED + 2 * len(there) + 1, sim.waits

        into, reader = on("cuda", {n: -t for n, t in made_up(0).items()}), store.handle.open()
        installed = Installation(into)
        sim.reset()
        assert installed.pull(reader).version == 0
        assert sim.bytes["to device", "pinned"] == num_bytes
        assert sim.num_bytes("to device") - num_bytes < SMALL
        assert sim.num_bytes("to host") == 8 * len(there)
        assert bits(on("cpu", into)) == bits(made_up(0))

        there = on("cuda", made_up(1))
        assert store.publish(1, there) == checksum_of(made_up(1))
        sim.reset()
        assert installed.pull(reader, 1).version == 1
        assert 0 < sim.bytes["to device", "pinned"] < num_bytes / 100
        assert sim.num_bytes("to host") < 100
        assert bits(on("cpu", into)) == bits(made_up(1))
    finally:
        store.close()


def units_of(tensors):
    return torch.cat([each.contiguous().view(torch.int16).flatten() for each in tensors.values()])


@pytest.mark.parametrize("is_ordered", [True, False])
def test_a_step_waits_for_no_copy_of_the_weights(is_ordered, sim):
    """It computes its gradients meanwhile, and the device alone puts its step after the copies. It
    must: they would else be of other weights."""
    learner = learner_on("cuda", dtype=torch.bfloat16)
    store = SharedMemoryWeightStore(learner.manifest())
    try:
        store.publish(0, learner.rows())
        step(learner, 0)
        before, checksum = weights(learner), learner.checksum()
        sim.reset()
        begun = store.begin(learner.rows())
        assert (sim.waits, sim.bytes) == ({}, {("to host", "pinned"): sum(sim.bytes.values())})
        assert sim.num_bytes("to host") == sizes(before) + 8 * len(before)
        learner.copied = begun.copied if is_ordered else None
        step(learner, 1, early=8)
        assert sim.waits.total() <= 2 + 1, sim.waits
        assert not [line for line in sim.waits if "weights/" in line]
        assert bits(weights(learner)) != bits(before)
        assert store.finish(1, begun) == checksum
        pulled = {name: torch.zeros_like(each) for name, each in before.items()}
        if is_ordered:
            assert Installation(pulled).pull(store.handle.open()) == (1, checksum)
            assert bits(pulled) == bits(before)
        else:
            with pytest.raises(ChecksumMismatch):
                Installation(pulled).pull(store.handle.open())
    finally:
        store.close()


class AsIfAlone(Ranks):
    """A rank whose sums are its own."""

    def summed(self, values):
        return values


def test_a_rank_copies_its_rows(sim):
    ranks, tensors = AsIfAlone(1, 4), made_up(0)
    store = SharedMemoryWeightStore(manifest_of(tensors), ranks=ranks)
    try:
        rows = {name: each[ranks.rows(len(each))] for name, each in tensors.items()}
        rows = on("cuda", rows)
        sim.reset()
        begun = store.begin(rows)
        assert not sim.waits
        store.finish(0, begun)
        assert sim.bytes["to host", "pinned"] == sizes(rows) + 8 * len(rows)
        assert sizes(rows) <= sizes(tensors) / 4 + 64
        assert sim.bytes["to host", "pageable"] == 0
    finally:
        store.close()


@pytest.mark.parametrize("rank", [0, 3])
def test_a_process_of_four_takes_its_quarter(rank, sim, monkeypatch):
    """Rows of one tensor, columns of another, a copy of the third; of changes, its own."""
    hashed, taken = [], {"embed": (0, 500 * rank, 500), "layer": (1, 194 * rank, 194)}
    tensors = made_up(0) | {"embed": torch.zeros(2000, 600).bfloat16()}
    tensors["layer"] = tensors["layer"][:, :776].clone()
    store = SharedMemoryWeightStore(manifest_of(tensors), keep=2)
    parts = {name: each.narrow(*taken.get(name, (0, 0, 33))) for name, each in tensors.items()}
    into = {
        name: torch.empty(each.shape, dtype=each.dtype).to("cuda") for name, each in parts.items()
    }

    def places(spec):
        return [SlabPlace(spec, slab_of(spec, *taken.get(spec.name, (0, 0, 33))), into[spec.name])]

    hash_of = install.hash_of
    monkeypatch.setattr(
        install,
        "hash_of",
        lambda tensor, slab: hashed.append(tensor.nbytes) or hash_of(tensor, slab),
    )
    try:
        store.publish(0, tensors)
        reader, installed = store.handle.open(), Installation(places)
        sim.reset()
        installed.pull_part(reader, 0)
        assert sum(hashed) == sizes(parts) == sim.bytes["to device", "pinned"]
        assert sim.num_bytes("to device") - sizes(parts) < 2 * SMALL  # with tables for each size
        assert bits(on("cpu", into)) == bits({n: each.clone() for n, each in parts.items()})

        before = units_of(parts)
        for name in taken:
            tensors[name].view(-1)[::31] += 1
        store.publish(1, tensors)
        sim.reset()
        assert installed.pull_part(reader, 1).weights.version == 1
        changed = (before != units_of(parts)).sum()
        num_blocks = sum(-(-tensors[name].nbytes // 2**17) for name in taken)
        assert sim.bytes["to device", "pinned"] == 4 * (changed + num_blocks)
        assert sim.num_bytes("to host") < 100
        assert sim.waits.total() <= 12, sim.waits
        assert bits(on("cpu", into)) == bits({n: each.clone() for n, each in parts.items()})
    finally:
        store.close()
