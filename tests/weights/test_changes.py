"""Weights as differences and by reference: the same bits and the same checksum as a whole pull.

What holds of both transports is tried on both."""

import time
from contextlib import contextmanager
from itertools import pairwise

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from rhymeflow.utils import objects as shared
from rhymeflow.utils.objects import OwnerLost
from rhymeflow.weights import objects, on_device, proof
from rhymeflow.weights.base import VersionUnavailable
from rhymeflow.weights.changes import Finder
from rhymeflow.weights.install import Installation
from rhymeflow.weights.kernels import BLOCK
from rhymeflow.weights.manifest import Slab, manifest_of
from rhymeflow.weights.objects import ObjectWeightStore
from rhymeflow.weights.proof import HASH_BLOCK, INNER, ChecksumMismatch, ProvedWeights, mixed
from rhymeflow.weights.shared_memory import SharedMemoryWeightStore
from tests.weights.made_up import bits, changed, checksum_of, install, random_bits, weights
from tests.weights.shared_objects import sharing

DTYPES = (torch.bfloat16, torch.float32, torch.float16, torch.uint8, torch.float64)


@contextmanager
def open_store(kind, tensors, *, keep):
    """A store of that kind; `split`: objects of one tensor each."""
    with pytest.MonkeyPatch.context() as patch, sharing():
        patch.setattr(objects, "PART_BYTES", 1000 if kind == "split" else 1 << 28)
        made = SharedMemoryWeightStore if kind == "shared memory" else ObjectWeightStore
        store = made(manifest_of(tensors), keep=keep)
        yield store
        store.close()


on_every_store = pytest.mark.parametrize("kind", ["shared memory", "objects", "split"])


@pytest.fixture(params=["shared memory", "objects", "split"])
def store(request):
    with open_store(request.param, weights(0), keep=3) as store:
        yield store


def empty(tensors):
    return {name: torch.zeros_like(tensor) for name, tensor in tensors.items()}


def prepared(reader, held, want):
    while not reader.prepare(held, want):
        time.sleep(0.001)


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
        st.tuples(st.sampled_from(["pull", "pull exactly", "prepare"]), st.sampled_from([0, 1])),
    )
    return rng, tensors, draw(st.integers(0, 4)), draw(st.lists(steps, max_size=14))


@on_every_store
@settings(max_examples=40)
@given(story=stories())
def test_an_updated_instance_has_the_bits_of_what_was_published(kind, story):
    """Versions are skipped, and fall out of what is kept; some tensors go whole, some listed."""
    rng, tensors, keep, steps = story
    with open_store(kind, tensors, keep=keep) as store:
        store.publish(0, tensors)
        into = [empty(tensors) for _ in range(2)]
        installed = [Installation(each) for each in into]
        readers = [store.handle.open() for _ in into]
        version = 0
        for what, value in [*steps, ("pull", 0), ("pull", 1)]:
            if what == "publish":
                version += 1
                tensors = {name: changed(t, value, rng) for name, t in tensors.items()}
                checksum = store.publish(version, tensors)
                assert checksum == checksum_of(tensors)
                continue
            if what == "prepare":
                prepared(readers[value], installed[value].holds, version)
            want = None if what == "pull" else version
            assert installed[value].pull(readers[value], want).version == version
            assert bits(into[value]) == bits(tensors)


def slow_digest(data):
    """The formula of `proof.py`, term by term."""
    units = np.frombuffer(bytes(data) + b"\0" * (len(data) % 2), np.uint16)
    blocks = np.arange(len(units) // HASH_BLOCK + 1, dtype=np.uint64)
    outer = [int(key) for key in mixed(blocks)]
    terms = (
        outer[i // HASH_BLOCK] * int(INNER[i % HASH_BLOCK]) * int(unit)
        for i, unit in enumerate(units)
    )
    return sum(terms) % 2**64


@given(st.binary(max_size=5000), st.data())
@settings(max_examples=80)
def test_digests_of_shards_add_up_and_follow_the_formula(raw, data):
    whole = np.frombuffer(raw, np.uint8)
    cuts = sorted(data.draw(st.lists(st.integers(0, len(raw)), max_size=4)))
    ends = [0, *cuts, len(raw)]
    parts = [proof.digest(whole[a:b].copy(), a) for a, b in pairwise(ends)]
    assert sum(parts) % 2**64 == slow_digest(raw)


@given(st.integers(0, 2**32), st.sampled_from([torch.bfloat16, torch.float32]))
@settings(max_examples=20)
def test_on_other_devices_the_hashes_and_bits_are_the_same(seed, dtype):
    rng = np.random.default_rng(seed)
    old = random_bits((3, 30_011), dtype, rng)
    new = changed(old, 0.02, rng)
    found = Finder(manifest_of({"w": old})).find(proof.bytes_of(new), proof.bytes_of(old))
    into = old.clone().view(1, -1)
    slab, staging = Slab(0, into.nbytes), on_device.Staging(into.device)
    more = int(on_device.put_on_device(into, slab, found.listed, 0, staging))
    assert bits({"w": into}) == bits({"w": new})
    expected = proof.digest(proof.bytes_of(new))
    assert (proof.digest(proof.bytes_of(old)) + more) % 2**64 == expected


# -- every store ----------------------------------------------------------------------------------


def test_only_what_changed_is_brought_and_measured(store):
    store.publish(0, weights(0))
    assert store.metrics == {}
    reader, installed = store.handle.open(), Installation(weights(9))
    installed.pull(reader)
    store.publish(1, weights(1))
    shared.here().fetched.clear()
    update = reader.update(installed.holds, 1)
    assert sum(shared.here().fetched) < 2000
    assert [name for name, *_ in update.listed] == ["embed.weight"]
    assert list(update.whole) == []
    assert 0 < store.metrics["params/changed_share"] < 0.001
    assert store.metrics["params/delta_bytes"] < 2000
    assert store.metrics["params/whole_share"] == 0
    assert installed.pull(reader, 1).version == 1
    other = {name: -tensor for name, tensor in weights(1).items()}
    store.publish(2, other)
    update = reader.update(installed.holds, 2)
    assert [name for name, _ in update.whole] == list(other)
    assert update.steps, "it is known how many of them changed"
    assert store.metrics["params/whole_share"] == 1


def test_what_was_fetched_stays_when_the_store_forgets_it(store):
    """Nothing that is read is written over; what comes too late is pulled whole."""
    store.publish(0, weights(0))
    early, late = (empty(weights(0)) for _ in range(2))
    reader, other = store.handle.open(), store.handle.open()
    installed, behind = Installation(early), Installation(late)
    held = installed.pull(reader)
    behind.pull(other)
    store.publish(1, weights(1))
    prepared(reader, held, 1)
    for version in range(2, 7):
        store.publish(version, weights(version))
    assert installed.pull(reader, 1).version == 1
    assert bits(early) == bits(weights(1))
    assert other.update(behind.holds, 6).steps is None, "it was too long ago"
    with pytest.raises(VersionUnavailable):
        behind.pull_part(other, 1)
    assert behind.pull(other, 1).version == 6
    assert bits(late) == bits(weights(6))


def test_changes_are_put_into_nothing_else_than_what_they_were_found_against(store):
    """A learner that was restarted may publish a version again that came out different."""
    store.publish(4, weights(4))
    store.publish(5, weights(5))
    reader = store.handle.open()
    other = ProvedWeights(4, checksum_of(weights(3)))
    assert reader.update(other, 5).steps is None
    assert reader.update(ProvedWeights(4, checksum_of(weights(4))), 5).steps


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


def test_two_versions_are_held_whole_and_older_ones_are_not(store):
    reader, into = store.handle.open(), weights(9)
    with pytest.raises(VersionUnavailable, match=r"it holds \[\]"):
        install(reader, into)
    for version in range(3):
        store.publish(version, weights(version))
    for want, expected in ((1, 1), (None, 2)):
        assert install(reader, into, want).version == expected
        assert bits(into) == bits(weights(expected))
    with pytest.raises(VersionUnavailable, match=r"version 3; it holds \[1, 2\]"):
        Installation(into).pull_part(reader, 3)
    with pytest.raises(VersionUnavailable, match="version 0"):
        Installation(into).pull_part(reader, 0)
    assert install(reader, into, 0).version == 2


@pytest.mark.parametrize("kind", ["objects", "split"])
@pytest.mark.parametrize("keep", [0, 2])
def test_a_lost_learner_is_noticed_before_anything_was_brought(kind, keep):
    with open_store(kind, weights(0), keep=keep) as store:
        store.publish(0, weights(0))
        reader, into = store.handle.open(), empty(weights(0))
        installation = Installation(into)
        held = installation.pull(reader)
        store.publish(1, weights(1))
        shared.here().lost.add("learner")
        with pytest.raises(OwnerLost, match="learner"):
            prepared(reader, held, 1)
        with pytest.raises(OwnerLost):
            installation.pull(reader, 1)
        assert bits(into) == bits(weights(0))
