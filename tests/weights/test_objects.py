"""Weights by reference: the same bits and the same checksum as from shared memory."""

from __future__ import annotations

import time

import msgspec
import numpy as np
import pytest
import torch
from hypothesis import given, settings

from rhymeflow.weights import objects, proof
from rhymeflow.weights.base import ChecksumMismatch, Pulled, StoreLost, VersionUnavailable
from rhymeflow.weights.handle import AnyWeightHandle
from rhymeflow.weights.install import Installation, install
from rhymeflow.weights.manifest import manifest_of
from rhymeflow.weights.objects import ObjectWeightStore
from tests.weights.shared_objects import sharing
from tests.weights.test_delta import bits, changed, random_bits, stories

RNG = np.random.default_rng(0)
TENSORS = {f"t{i}": random_bits((40_000,), torch.bfloat16, RNG) for i in range(3)}


def empty(tensors):
    return {name: torch.zeros_like(tensor) for name, tensor in tensors.items()}


@pytest.fixture
def shared():
    with sharing() as fake:
        yield fake


@pytest.fixture(autouse=True, params=[1 << 28, 1000])
def part_bytes(request, monkeypatch):
    """All tensors in one part, and each in one of its own."""
    monkeypatch.setattr(objects, "PART_BYTES", request.param)


@settings(max_examples=40, deadline=None)
@given(story=stories())
def test_an_updated_instance_has_the_bits_of_what_was_published(story):
    rng, tensors, keep, steps = story
    with sharing():
        store = ObjectWeightStore(manifest_of(tensors), keep=keep)
        store.publish(0, tensors)
        readers = [store.handle.open() for _ in range(2)]
        into = [empty(tensors) for _ in readers]
        installed = [Installation(each) for each in into]
        version = 0
        for what, value in [*steps, ("pull", 0), ("pull", 1)]:
            if what == "publish":
                version += 1
                tensors = {name: changed(t, value, rng) for name, t in tensors.items()}
                assert store.publish(version, tensors) == proof.checksum_of(
                    store.handle.manifest, tensors
                )
                continue
            held, want = installed[value].holds, version if what == "pull exactly" else None
            if held is not None and want is not None:
                wait_for(readers[value], held, want)
            assert installed[value].pull(readers[value], want).version == version
            assert bits(into[value]) == bits(tensors)


def wait_for(reader, held, want):
    while not reader.prepare(held, want):
        time.sleep(0.001)


def test_only_what_changed_is_fetched(shared):
    store = ObjectWeightStore(manifest_of(TENSORS), keep=2)
    store.publish(0, TENSORS)
    reader, into = store.handle.open(), empty(TENSORS)
    installation = Installation(into)
    installation.pull(reader)
    some = {**TENSORS, "t1": changed(TENSORS["t1"], 0.01, RNG)}
    store.publish(1, some)
    assert 0 < store.metrics["params/changed_share"] < 0.01
    shared.fetched.clear()
    wait_for(reader, installation.holds, 1)
    assert installation.pull(reader, 1).version == 1
    assert bits(into) == bits(some)
    assert sum(shared.fetched) < 10_000


def test_the_two_newest_versions_can_be_had_whole_and_no_others(shared):
    store = ObjectWeightStore(manifest_of(TENSORS), keep=0)
    for version in range(4):
        store.publish(version, TENSORS)
    reader = store.handle.open()
    assert reader.version == 3
    for version in (2, 3):
        assert install(reader, empty(TENSORS), version).version == version
    with pytest.raises(VersionUnavailable, match=r"it holds \[2, 3\]"):
        install(reader, empty(TENSORS), 1)
    assert Installation(empty(TENSORS)).pull_at_least(reader, 1).version == 3


@pytest.mark.parametrize("keep", [0, 2])
def test_a_lost_learner_is_noticed_before_anything_was_brought(shared, keep):
    store = ObjectWeightStore(manifest_of(TENSORS), keep=keep)
    store.publish(0, TENSORS)
    reader, into = store.handle.open(), empty(TENSORS)
    installation = Installation(into)
    installation.pull(reader)
    held = installation.holds
    store.publish(1, {name: changed(t, 0.01, RNG) for name, t in TENSORS.items()})
    shared.lost.add("learner")
    with pytest.raises(StoreLost, match="learner"):
        wait_for(reader, held, 1)
    with pytest.raises(StoreLost):
        installation.pull(reader, 1)
    assert bits(into) == bits(TENSORS)


def test_weights_that_went_bad_on_the_way_are_noticed(shared, monkeypatch):
    store = ObjectWeightStore(manifest_of(TENSORS), keep=0)
    store.publish(0, TENSORS)
    honest = shared.get

    def get(references):
        buffers = [buffer.copy() for buffer in honest(references)]
        buffers[0][17] ^= 1
        return buffers

    monkeypatch.setattr(shared, "get", get)
    with pytest.raises(ChecksumMismatch, match="1 of 3 tensors differ, first t0"):
        install(store.handle.open(), empty(TENSORS))


def test_changes_are_put_into_nothing_but_what_they_were_found_against(shared):
    """A learner that was restarted may come to other bits under the same number."""
    store = ObjectWeightStore(manifest_of(TENSORS), keep=2)
    store.publish(0, TENSORS)
    store.publish(1, {name: changed(t, 0.01, RNG) for name, t in TENSORS.items()})
    assert store.handle.open().changes(Pulled(0, 12345), 1) is None


def test_a_handle_goes_through_messages(shared):
    handle = ObjectWeightStore(manifest_of(TENSORS), keep=0).handle
    packed = msgspec.msgpack.encode(handle)
    assert msgspec.msgpack.decode(packed, type=AnyWeightHandle) == handle
