"""Weights as differences: the same bits and the same checksum as a whole pull, whatever happens."""

from __future__ import annotations

import multiprocessing
import time
from itertools import pairwise

import msgspec
import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from rhymeflow.errors import UserError
from rhymeflow.utils import shared_memory
from rhymeflow.weights import changes, on_device, proof
from rhymeflow.weights.base import ChecksumMismatch, Pulled, VersionUnavailable
from rhymeflow.weights.changes import Changes, Finder, pack
from rhymeflow.weights.delta import DeltaWeightReader, DeltaWeightStore
from rhymeflow.weights.handle import AnyWeightHandle
from rhymeflow.weights.install import Installation, install
from rhymeflow.weights.kernels import BLOCK
from rhymeflow.weights.keys import HASH_BLOCK, INNER, mixed
from rhymeflow.weights.manifest import manifest_of

SPAWN = multiprocessing.get_context("spawn")
DTYPES = (torch.bfloat16, torch.float32, torch.float16, torch.uint8, torch.float64)
PATTERNS = (0x0000, 0x8000, 0x7FC0, 0x7FC1, 0xFFFF, 0x7F80, 0x3F80, 0x3F81)
"""bfloat16: 0, -0, two NaNs, a NaN of all ones, infinity, 1 and the next number."""


def random_bits(shape, dtype, rng):
    num_bytes = int(np.prod(shape)) * dtype.itemsize
    raw = torch.from_numpy(rng.integers(0, 256, num_bytes, dtype=np.uint8))
    return raw.view(dtype).reshape(shape) if num_bytes else torch.empty(shape, dtype=dtype)


def bits(tensors):
    return {name: proof.bytes_of(tensor).tobytes() for name, tensor in tensors.items()}


def changed(tensor, share, rng):
    """A copy in which about this share of the 16-bit units was set to awkward bits."""
    data = proof.bytes_of(tensor).copy()
    units = data[: len(data) // 2 * 2].view(np.uint16)
    chosen = rng.random(len(units)) < share
    units[chosen] = rng.choice(np.array(PATTERNS, np.uint16), chosen.sum())
    if not len(data):
        return tensor.clone()
    return torch.from_numpy(data).view(tensor.dtype).reshape(tensor.shape)


def slow_digest(data):
    """The formula of `keys.py`, term by term."""
    units = np.frombuffer(bytes(data) + b"\0" * (len(data) % 2), np.uint16)
    blocks = np.arange(len(units) // HASH_BLOCK + 1, dtype=np.uint64)
    outer = [int(key) for key in mixed(blocks)]
    terms = (
        outer[i // HASH_BLOCK] * int(INNER[i % HASH_BLOCK]) * int(unit)
        for i, unit in enumerate(units)
    )
    return sum(terms) % 2**64


@st.composite
def stories(draw):
    """Tensors, and what happens: publications with the share that changes, and pulls."""
    rng = np.random.default_rng(draw(st.integers(0, 2**32)))
    sizes = st.sampled_from([0, 1, 2, 3, 31, 32, 33, 1023, 1025, BLOCK - 1, BLOCK + 5])
    tensors = {
        f"t{i}": random_bits((draw(sizes),), draw(st.sampled_from(DTYPES)), rng)
        for i in range(draw(st.integers(1, 4)))
    }
    if draw(st.booleans()):
        tensors["matrix"] = random_bits((7, 129), torch.bfloat16, rng)
    steps = st.one_of(
        st.tuples(st.just("publish"), st.sampled_from([0.0, 0.001, 0.02, 0.1, 0.9])),
        st.tuples(st.just("pull"), st.sampled_from([0, 1])),
        st.tuples(st.just("pull exactly"), st.sampled_from([0, 1])),
    )
    return rng, tensors, draw(st.integers(1, 4)), draw(st.lists(steps, max_size=14))


@settings(max_examples=60, deadline=None)
@given(stories())
def test_an_updated_instance_has_the_bits_of_a_whole_pull(story):
    """Versions are skipped, and fall out of what is kept; some tensors go whole, some listed."""
    rng, tensors, keep, steps = story
    store = DeltaWeightStore.make(manifest_of(tensors), keep=keep)
    try:
        store.publish(0, tensors)
        reader = store.handle.open()
        instances = [
            ({k: torch.zeros_like(v) for k, v in tensors.items()}, reader) for _ in range(2)
        ]
        installed = [Installation(into) for into, _ in instances]
        version = 0
        for what, value in [*steps, ("pull", 0), ("pull", 1)]:
            if what == "publish":
                version += 1
                tensors = {name: changed(t, value, rng) for name, t in tensors.items()}
                checksum = store.publish(version, tensors)
                assert checksum == proof.checksum_of(store.handle.manifest, tensors)
                continue
            want = version if what == "pull exactly" else None
            pulled = installed[value].pull(reader, want)
            assert pulled.version == version
            assert bits(instances[value][0]) == bits(tensors)
    finally:
        store.close()


@given(st.binary(max_size=5000), st.data())
@settings(max_examples=80, deadline=None)
def test_digests_of_shards_add_up_and_follow_the_formula(raw, data):
    whole = np.frombuffer(raw, np.uint8)
    cuts = sorted(data.draw(st.lists(st.integers(0, len(raw)), max_size=4)))
    ends = [0, *cuts, len(raw)]
    parts = [proof.digest(whole[a:b].copy(), a) for a, b in pairwise(ends)]
    assert sum(parts) % 2**64 == slow_digest(raw)
    start = data.draw(st.integers(0, 5000))
    assert proof.by_kernel(whole, start) == proof.by_numpy(whole, start)


@given(st.integers(0, 2**32), st.sampled_from([torch.bfloat16, torch.float32]))
@settings(max_examples=20, deadline=None)
def test_on_other_devices_the_hashes_and_bits_are_the_same(seed, dtype):
    rng = np.random.default_rng(seed)
    old = random_bits((3, 30_011), dtype, rng)
    new = changed(old, 0.02, rng)
    found = Finder(manifest_of({"w": old})).find(proof.bytes_of(new), proof.bytes_of(old))
    into = old.clone()
    more = on_device.put_changes(into, found.listed)
    assert bits({"w": into}) == bits({"w": new})
    expected = proof.digest(proof.bytes_of(new))
    assert (proof.digest(proof.bytes_of(old)) + more) % 2**64 == expected
    assert on_device.digest_by_torch(new, 10_000) == expected
    assert on_device.digest(new) == expected


# -- what travels ---------------------------------------------------------------------------------


def weights(value, size=200_000):
    torch.manual_seed(0)
    tensors = {
        "embed.weight": torch.randn(size // 100, 100).bfloat16(),
        "layer.weight": torch.randn(300, 7),
        "norm": torch.ones(33).bfloat16(),
    }
    tensors["embed.weight"][value % 7, : 3 * value] = float(value)
    return tensors


@pytest.fixture
def store():
    store = DeltaWeightStore.make(manifest_of(weights(0)), keep=3)
    yield store
    store.close()


def test_only_what_changed_is_brought_and_measured(store):
    store.publish(0, weights(0))
    assert store.metrics == {}
    reader, into = store.handle.open(), weights(9)
    installed = Installation(into)
    installed.pull(reader)
    store.publish(1, weights(1))
    update = reader.changes(installed.holds, 1)
    assert [set(step) for step in update.steps] == [{"embed.weight"}]
    assert list(update.whole) == []
    assert store.metrics["params/changed_share"] < 0.001
    assert store.metrics["params/delta_bytes"] < 2000
    assert store.metrics["params/whole_share"] == 0
    assert installed.pull(reader, 1).version == 1
    other = {name: -tensor for name, tensor in weights(1).items()}
    store.publish(2, other)
    update = reader.changes(installed.holds, 2)
    assert [chunk.name for chunk in update.whole] == list(other)
    assert store.metrics["params/whole_share"] == 1


def test_what_was_fetched_stays_when_the_store_forgets_it(store):
    """Nothing that is read is written over; what comes too late is pulled whole."""
    store.publish(0, weights(0))
    early, late = ({k: torch.zeros_like(v) for k, v in weights(0).items()} for _ in range(2))
    reader, other = store.handle.open(), store.handle.open()
    installed, behind = Installation(early), Installation(late)
    held = installed.pull(reader)
    behind.pull(other)
    store.publish(1, weights(1))
    while not reader.prepare(held, 1):
        time.sleep(0.001)
    for version in range(2, 7):
        store.publish(version, weights(version))
    assert installed.pull(reader, 1).version == 1
    assert bits(early) == bits(weights(1))
    assert other.changes(behind.holds, 6) is None, "it was too long ago"
    with pytest.raises(VersionUnavailable):
        behind.pull(other, 1)
    assert behind.pull_at_least(other, 1).version == 6
    assert bits(late) == bits(weights(6))
    assert len(list(shared_memory.path_of("").glob(f"{store.handle.memory.name}.*"))) == 3


def test_changes_are_put_into_nothing_else_than_what_they_were_found_against(store):
    """A learner that was restarted may publish a version again that came out different."""
    store.publish(4, weights(4))
    store.publish(5, weights(5))
    reader = store.handle.open()
    other = Pulled(4, proof.checksum_of(store.handle.manifest, weights(3)))
    assert reader.changes(other, 5) is None
    assert reader.changes(Pulled(4, proof.checksum_of(reader.manifest, weights(4))), 5) is not None


def test_an_instance_that_was_changed_by_somebody_else_is_found_out(store):
    store.publish(0, weights(0))
    reader, into = store.handle.open(), weights(9)
    installed = Installation(into)
    installed.pull(reader)
    into["embed.weight"][1, 0] += 1  # one of those that change
    store.publish(1, weights(1))
    with pytest.raises(ChecksumMismatch, match=r"1 of 3 tensors differ, first embed\.weight"):
        installed.pull(reader, 1)
    assert installed.holds is None
    assert installed.pull(reader).version == 1, "whole, as nothing is known of it any more"
    assert bits(into) == bits(weights(1))


def test_a_damaged_change_is_found_out(store):
    store.publish(0, weights(0))
    reader = store.handle.open()
    installed = Installation(weights(9))
    installed.pull(reader)
    store.publish(1, weights(1))
    [path] = shared_memory.path_of("").glob(f"{store.handle.memory.name}.*")
    whole = bytearray(path.read_bytes())
    whole[-1] ^= 4
    path.write_bytes(whole)
    with pytest.raises(ChecksumMismatch, match="version 1"):
        installed.pull(reader, 1)


def test_a_change_whose_whole_tensors_are_written_over_is_pulled_anew(store):
    """Overtaken between the listed tensors and those that are copied."""
    store.publish(0, weights(0))
    reader, into = store.handle.open(), weights(9)
    installed = Installation(into)
    installed.pull(reader)
    store.publish(1, {**weights(1), "norm": torch.full((33,), 2.0).bfloat16()})
    plain = reader._chunks

    def overtaken(slot, names):
        for version in (2, 3, 4):
            store.publish(version, weights(version))
        return plain(slot, names)

    reader._chunks = overtaken
    with pytest.raises(VersionUnavailable):
        installed.pull(reader, 1)
    assert installed.pull_at_least(reader, 1).version >= 4
    assert bits(into) == bits(weights(installed.holds.version))


def test_tied_and_odd_tensors_of_a_model_arrive(store):
    """Tied parameters are given once, so both names show what was put in."""
    embed = torch.nn.Embedding(500, 8, dtype=torch.bfloat16)
    head = torch.nn.Linear(8, 500, bias=False, dtype=torch.bfloat16)
    head.weight = embed.weight
    model = torch.nn.ModuleDict({"embed": embed, "head": head}).requires_grad_(False)
    own = dict(model.named_parameters())
    made = DeltaWeightStore.make(manifest_of(own), keep=2)
    new = {name: t.detach().clone() for name, t in own.items()}
    made.publish(0, new)
    installed = Installation(own)
    installed.pull(made.handle.open())
    new["embed.weight"][7, 3] = -0.0
    made.publish(1, new)
    assert installed.pull(made.handle.open(), 1).version == 1
    assert head.weight[7, 3] == 0
    assert torch.signbit(head.weight[7, 3])
    made.close()


def test_the_buffer_says_all_there_is():
    """A transport needs to carry nothing but its bytes."""
    old, new = weights(0), weights(3)
    manifest = manifest_of(old)
    finder = Finder(manifest)
    found = [
        finder.find(proof.bytes_of(new[spec.name]), proof.bytes_of(old[spec.name]))
        for spec in manifest
    ]
    size, parts = pack(Pulled(7, 2**64 - 1), Pulled(8, 2**63), [1, 2, 2**64 - 1], found)
    buffer = np.concatenate(parts)
    assert len(buffer) == size
    read = Changes(manifest, buffer)
    assert (read.base, read.made) == ((7, 2**64 - 1), (8, 2**63))
    assert read.digests == [1, 2, 2**64 - 1]
    assert read.whole == set()
    assert set(read.listed) == {"embed.weight"}
    assert read.num_changed == 9


def test_handles_go_by_value(store):
    packed = msgspec.msgpack.encode(store.handle)
    assert msgspec.msgpack.decode(packed, type=AnyWeightHandle) == store.handle


def test_too_little_shared_memory_is_the_users_to_know(store, monkeypatch):
    store.publish(0, weights(0))

    def refuse(descriptor, start, size):
        raise OSError(28, "No space left on device")

    monkeypatch.setattr("os.posix_fallocate", refuse)
    with pytest.raises(UserError, match="no room for what changed in the weights"):
        store.publish(1, weights(1))


# -- several processes ----------------------------------------------------------------------------


def follow(handle, last, report):
    torch.set_num_threads(1)
    reader, into = handle.open(), weights(0)
    installed, updates = Installation(into), 0
    installed.pull(reader)
    report.send("up")
    while installed.holds.version < last:
        before = installed.holds
        updates += reader.changes(before, None) is not None
        after = installed.pull(reader)
        assert after.version >= before.version
        assert bits(into) == bits(weights(after.version)), after
    report.send(updates)


def test_readers_that_race_with_publications_have_whole_versions(store):
    store.publish(0, weights(0))
    ours, theirs = SPAWN.Pipe(duplex=False)
    process = SPAWN.Process(target=follow, args=(store.handle, 40, theirs), daemon=True)
    process.start()
    theirs.close()
    assert ours.poll(60)
    assert ours.recv() == "up"
    for version in range(1, 41):
        store.publish(version, weights(version))
        time.sleep((0.0, 0.0, 0.01)[version % 3])
    assert ours.poll(60), "the reader died"
    assert ours.recv() > 0
    process.join()


def test_a_dense_pull_of_the_same_store_needs_no_changes(store):
    """What knows nothing of changes (another engine) pulls as ever."""
    store.publish(0, weights(0))
    store.publish(1, weights(1))
    into = weights(9)
    assert install(store.handle.open(), into).version == 1
    assert bits(into) == bits(weights(1))
    assert isinstance(store.handle.open(), DeltaWeightReader)
    assert changes.MOST < 0.5
