"""Sampling in chunks: the same tokens and log-probabilities, in memory that is known before."""

import weakref
from unittest import mock

import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_map_only

from rhymeflow.engine.base import Sampling
from rhymeflow.engine.native import noise, sampler
from rhymeflow.engine.native.sampler import Draws, drawn, sample, sampling_bytes

CPU = torch.device("cpu")
SHAPINGS = [(1.0, 0, 1.0), (0.8, 0, 1.0), (0.7, 20, 1.0), (1.3, 0, 0.9), (0.0, 0, 1.0)]


def draws_of(counts, shapings):
    """One sequence with so many rows for each count."""
    return [
        Draws(Sampling(t, p, k, 9, frozenset()), 7 * i, list(range(i, i + count)))
        for i, (count, (t, k, p)) in enumerate(zip(counts, shapings, strict=True))
    ]


@pytest.mark.parametrize("shapings", [SHAPINGS, SHAPINGS[:1] * 5, SHAPINGS[3:4] * 5])
@pytest.mark.parametrize("rows", [2, 3, 7])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_chunks_change_nothing(shapings, rows, dtype):
    torch.manual_seed(0)
    draws = draws_of([1, 9, 4, 1, 8], shapings)
    logits = (torch.randn(23, 700) * 3).to(dtype)
    expected = sample(logits.float(), draws)
    with mock.patch.object(sampler, "CHUNK_BYTES", rows * 4 * 700):
        sizes = []
        with mock.patch.object(sampler, "shaped", side_effect=seen(sizes)):
            assert sample(logits, draws) == expected
    assert sum(sizes) == 23
    assert max(sizes) <= rows
    if shapings[1:] == shapings[:-1]:
        assert max(sizes) - min(sizes) <= 1


def seen(sizes):
    shaped = sampler.shaped

    def of(logits, **how):
        sizes.append(len(logits))
        return shaped(logits, **how)

    return of


def test_what_has_no_room_is_drawn_again():
    """As on a GPU, where the first try does not wait."""
    torch.manual_seed(0)
    logits, draws = torch.randn(6, 1000), draws_of([4, 2], SHAPINGS[:1] * 2)
    expected = sample(logits, draws)
    tries = []

    def without_waiting(logits, keys, shaping, waits, rows):
        tries.append(waits)
        return drawn(logits, keys, shaping, len(tries) > 1, rows)

    with (
        mock.patch.multiple(noise, ROOM=1, ROOM_PER_ROW=0),
        mock.patch.object(sampler, "drawn", without_waiting),
    ):
        assert sample(logits, draws) == expected
    assert len(tries) == 2


class Peak(TorchDispatchMode):
    """Counts the bytes of all that is allocated."""

    def __init__(self):
        super().__init__()
        self.now = self.peak = 0
        self.sizes = {}

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        # It computes the exponentials of what it sums.
        inside = args[0].nbytes if func._schema.name == "aten::logsumexp" else 0
        out = func(*args, **(kwargs or {}))

        def count(x):
            storage = x.untyped_storage()
            if storage._cdata not in self.sizes:
                self.sizes[storage._cdata] = storage.nbytes()
                self.now += storage.nbytes()
                weakref.finalize(storage, self.free, storage._cdata)
            self.peak = max(self.peak, self.now + inside)
            return x

        tree_map_only(torch.Tensor, count, out)
        return out

    def free(self, key):
        self.now -= self.sizes.pop(key)


@pytest.mark.parametrize("vocabulary", [5_000, 49_152])
@pytest.mark.parametrize("shaping", SHAPINGS[:4])
def test_the_memory_is_what_the_plan_counts(vocabulary, shaping, monkeypatch):
    """Of the tensors that the drawing on a GPU would have, two chunks of rows."""
    monkeypatch.setattr(sampler, "CHUNK_BYTES", 32 * 4 * vocabulary)
    monkeypatch.setattr(noise, "words", words_as_on_a_gpu)
    logits = torch.randn(64, vocabulary).bfloat16()
    keys = noise.row_keys(range(64), [0] * 64, CPU)
    with torch.inference_mode(), Peak() as memory:
        drawn(logits, keys, shaping, waits=False)
    truncates = shaping[1:] != (0, 1.0)
    counted = sampling_bytes(64, vocabulary, 2, truncates=truncates) - logits.nbytes
    assert (0.3 if truncates else 0.8) * counted < memory.peak <= counted
    assert sampling_bytes(10_000, vocabulary, 2, truncates=False) == 2 * 10_000 * vocabulary + (
        sampling_bytes(64, vocabulary, 0, truncates=False)
    )


def words_as_on_a_gpu(keys, counter):
    return noise._mixed_on_device(keys + (counter + 1) * noise._signed(noise._STEP))
