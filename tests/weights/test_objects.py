"""Weights by reference: what is fetched, and what a lost learner leaves."""

from __future__ import annotations

import numpy as np
import pytest
import torch

from rhymeflow.weights import objects
from rhymeflow.weights.base import StoreLost, VersionUnavailable
from rhymeflow.weights.install import Installation, install
from rhymeflow.weights.manifest import manifest_of
from rhymeflow.weights.objects import ObjectWeightStore
from rhymeflow.weights.proof import ChecksumMismatch
from tests.weights.made_up import bits, changed, random_bits
from tests.weights.shared_objects import sharing
from tests.weights.test_changes import prepared

RNG = np.random.default_rng(0)
TENSORS = {f"t{i}": random_bits((40_000,), torch.bfloat16, RNG) for i in range(3)}


def empty():
    return {name: torch.zeros_like(tensor) for name, tensor in TENSORS.items()}


@pytest.fixture(params=[1 << 28, 1000])
def shared(request, monkeypatch):
    """All tensors in one part, and each in one of its own."""
    monkeypatch.setattr(objects, "PART_BYTES", request.param)
    with sharing() as fake:
        yield fake


def test_only_what_changed_is_fetched(shared):
    store = ObjectWeightStore(manifest_of(TENSORS), keep=2)
    store.publish(0, TENSORS)
    reader, into = store.handle.open(), empty()
    installation = Installation(into)
    installation.pull(reader)
    some = {**TENSORS, "t1": changed(TENSORS["t1"], 0.01, RNG)}
    store.publish(1, some)
    shared.fetched.clear()
    prepared(reader, installation.holds, 1)
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
        assert install(reader, empty(), version).version == version
    with pytest.raises(VersionUnavailable, match=r"it holds \[2, 3\]"):
        install(reader, empty(), 1)
    assert Installation(empty()).pull_at_least(reader, 1).version == 3


@pytest.mark.parametrize("keep", [0, 2])
def test_a_lost_learner_is_noticed_before_anything_was_brought(shared, keep):
    store = ObjectWeightStore(manifest_of(TENSORS), keep=keep)
    store.publish(0, TENSORS)
    reader, into = store.handle.open(), empty()
    installation = Installation(into)
    held = installation.pull(reader)
    store.publish(1, {name: changed(t, 0.01, RNG) for name, t in TENSORS.items()})
    shared.lost.add("learner")
    with pytest.raises(StoreLost, match="learner"):
        prepared(reader, held, 1)
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
        install(store.handle.open(), empty())
