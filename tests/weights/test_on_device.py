"""Parts of tensors: what slices of them hash to, and what goes through two buffers of memory."""

from itertools import pairwise

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from rhymeflow.weights import on_device, proof
from rhymeflow.weights.changes import Finder
from rhymeflow.weights.install import SlabPlace
from rhymeflow.weights.manifest import Slab, manifest_of, slab_of
from rhymeflow.weights.on_device import Outbox, Staging, as_ints, hash_of
from tests.weights.made_up import changed, random_bits

CPU = torch.device("cpu")
SHAPES = [(5000,), (1, 1), (7, 1024), (40, 130), (6, 3072), (3, 96, 33), (2, 5, 700), (64, 40)]


def hashed_there(tensor, slab):
    """By what computes on other devices."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(on_device, "is_on_host", lambda tensor: False)
        return as_ints([hash_of(tensor, slab)])[0]


@st.composite
def cut_tensors(draw):
    """A tensor, and parts, in order, into which one of its dimensions is cut."""
    dtype = draw(st.sampled_from([torch.bfloat16, torch.float32, torch.float64]))
    rng = np.random.default_rng(draw(st.integers(0, 2**32)))
    tensor = random_bits(draw(st.sampled_from(SHAPES)), dtype, rng)
    axis = draw(st.integers(0, tensor.dim() - 1))
    size = tensor.shape[axis]
    ends = sorted({0, size, *draw(st.lists(st.integers(0, size), max_size=3))})
    return rng, tensor, [(axis, first, end - first) for first, end in pairwise(ends)]


@given(cut_tensors())
@settings(max_examples=80)
def test_hashes_of_slices_add_up(found):
    _, tensor, parts = found
    (spec,) = manifest_of({"w": tensor})
    due = proof.digest(proof.bytes_of(tensor))
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(on_device, "HASHED_AT_A_TIME", 2048)
        slabs = [(tensor.narrow(*part), slab_of(spec, *part)) for part in parts]
        assert sum(as_ints([hash_of(*each) for each in slabs])) % 2**64 == due
        assert sum(hashed_there(*each) for each in slabs) % 2**64 == due


@given(cut_tensors(), st.data())
@settings(max_examples=80)
def test_places_take_their_parts_of_rows_and_of_changes(found, data):
    """Rows come from several ranks; a place is somewhere in memory, in its order or in none."""
    rng, tensor, parts = found
    (spec,) = manifest_of({"w": tensor})
    raw, row = proof.bytes_of(tensor), spec.num_bytes // spec.shape[0]
    middle = data.draw(st.integers(0, spec.shape[0])) * row
    rows = [(0, raw[:middle]), (middle, raw[middle:])]
    new = changed(tensor, 0.05, rng)
    new_raw = proof.bytes_of(new)
    differences = [
        (first, Finder(manifest_of({"w": tensor})).find(new_raw[first : first + len(old)], old))
        for first, old in rows
    ]
    for part in parts:
        shape, slab = tensor.narrow(*part).shape, slab_of(spec, *part)
        into = torch.zeros(shape, dtype=tensor.dtype)
        match data.draw(st.sampled_from(["dense", "wide", "transposed", "device"])):
            case "wide":
                into = torch.zeros(*shape[:-1], shape[-1] + 3, dtype=tensor.dtype)[..., 2:-1]
            case "transposed":
                into = torch.zeros(shape[::-1], dtype=tensor.dtype).permute(
                    *range(len(shape))[::-1]
                )
        place, staging = SlabPlace(spec, slab, into), Staging(CPU, 1000)
        if place._rows is not None and data.draw(st.booleans()):
            place.view = None  # as if it were on another device
        due = as_ints([hash_of(tensor.narrow(*part).clone(), slab)])
        assert as_ints([place.copy(rows, staging)]) == due
        assert proof.bytes_of(into).tobytes() == proof.bytes_of(tensor.narrow(*part)).tobytes()
        added = 0
        for first, difference in differences:
            if difference.listed is None or not difference.changed:  # an update has none of these
                continue
            added += as_ints([place.put(first, difference.listed, staging)])[0]
        if all(difference.listed is not None for _, difference in differences):
            assert proof.bytes_of(into).tobytes() == proof.bytes_of(new.narrow(*part)).tobytes()
            assert (due[0] + added) % 2**64 == as_ints([hash_of(new.narrow(*part).clone(), slab)])[
                0
            ]


@pytest.mark.parametrize("num_bytes", [0, 1, 99, 100, 101, 200, 299, 1000])
def test_bytes_go_out_through_pieces_of_memory(num_bytes):
    data = (torch.arange(num_bytes) % 251).to(torch.uint8)
    outbox = Outbox(CPU, num_bytes, 100)
    for _ in range(2):
        into = np.zeros(num_bytes, np.uint8)
        with outbox.filling():
            outbox.put(data[:150])
            outbox.put(data[150:])
        outbox.take(into[:30])
        outbox.take(into[30:])
        assert into.tolist() == data.tolist()
        data = data.flip(0)


@pytest.mark.parametrize("first", [0, 1, 1024, 5000])
def test_nothing_hashes_to_nothing(first):
    assert hashed_there(torch.empty(0, 4), Slab(4 * first, 0)) == 0
