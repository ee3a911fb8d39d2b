"""The noise: golden bits, the fast draw against its definition, and its statistics."""

import itertools
import math
from unittest import mock

import numpy as np
import pytest
import torch
from hypothesis import example, given, settings
from hypothesis import strategies as st
from torch.utils._python_dispatch import TorchDispatchMode

from rhymeflow.engine.base import NoiseKey
from rhymeflow.engine.native import noise

CPU = torch.device("cpu")


def keys_of(count, seed=0):
    """`count` keys: 100 positions of as many responses as it takes."""
    pairs = [divmod(i, 100) for i in range(count)]
    streams = [noise.stream(seed, NoiseKey(p, 0, 0)) for p, _ in pairs]
    return noise.row_keys(streams, [position for _, position in pairs], CPU)


def test_golden_values():
    """Written down once; a change of them changes every sample of every run."""
    assert noise.stream(0, NoiseKey(0, 0, 0)) == GOLDEN_STREAMS[0]
    assert noise.stream(2**63 + 1, NoiseKey(5, 4, 3)) == GOLDEN_STREAMS[1]
    keys = noise.row_keys(list(GOLDEN_STREAMS), [0, 1000], CPU)
    assert keys.tolist() == GOLDEN_KEYS
    words = noise.words(keys, torch.tensor([0, 49151]))
    assert words.tolist() == GOLDEN_WORDS
    assert noise.exponentials(keys, 70)[:, [0, 1, 63, 69]].flatten().tolist() == pytest.approx(
        GOLDEN_NOISE, rel=1e-14
    )


@settings(max_examples=80)
@given(
    vocabulary=st.integers(1, 400),
    spread=st.sampled_from([0.0, 0.5, 4.0, 30.0]),
    left_out=st.sampled_from([0.0, 0.5, 0.99]),
    seed=st.integers(0, 2**31),
    small=st.sampled_from([0, noise.SMALL]),
    waits=st.booleans(),
    room=st.sampled_from([1, 99, noise.ROOM]),
)
@example(vocabulary=49152, spread=2.0, left_out=0.0, seed=0, small=0, waits=True, room=1)
@example(vocabulary=49152, spread=2.0, left_out=0.0, seed=0, small=0, waits=False, room=noise.ROOM)
def test_draw_is_argmax_over_all_noise(vocabulary, spread, left_out, seed, small, waits, room):
    """With too little room it says so, of every row; never is a token wrong."""
    torch.manual_seed(seed)
    x = torch.randn(8, vocabulary) * spread
    out = torch.rand(8, vocabulary) < left_out
    out.scatter_(1, torch.randint(vocabulary, (8, 1)), False)
    x = x.masked_fill(out, -torch.inf)
    keys = keys_of(8, seed)
    scores = x.double() - noise.exponentials(keys, vocabulary).log()
    expected = scores.argmax(1).tolist()
    with mock.patch.multiple(noise, SMALL=small, ROOM=room, ROOM_PER_ROW=0):
        drawn = noise.draw(x, keys, waits=waits).tolist()
    if not waits and vocabulary > small and room == 1:
        assert drawn == [noise.UNKNOWN] * 8
    else:
        assert drawn == expected or (room == 99 and drawn == [noise.UNKNOWN] * 8)


@pytest.mark.parametrize("logits", ["flat", "normal", "peaked", "one of each block", "pairs"])
def test_few_tokens_can_win_whatever_the_logits_are(logits):
    """At most 64 a row on average, and more than n by less than n trials' failing (see `noise`)."""
    rows, vocabulary = 400, 5000
    torch.manual_seed(0)
    x = {
        "flat": torch.zeros(rows, vocabulary),
        "normal": torch.randn(rows, vocabulary),
        "peaked": torch.randn(rows, vocabulary) * 20,
        "one of each block": (torch.arange(vocabulary) % 64 == 7) * 50.0 + torch.zeros(rows, 1),
        "pairs": (torch.arange(vocabulary) % 64 < 2) * 50.0 + torch.rand(rows, vocabulary),
    }[logits]
    keys = keys_of(rows)
    with mock.patch.object(noise, "_places", side_effect=noise._places) as places:
        noise.draw(x, keys, waits=False)
    blocks, tokens = (call.args[0].sum().item() for call in places.call_args_list)
    _, needed, least, _ = noise._bounds(x, keys)
    bound = x - least.log().repeat_interleave(64, 1)[:, :vocabulary]
    counts = (bound >= needed[:, None]).sum(1)
    assert counts.sum().item() == tokens >= blocks
    assert tokens / rows < 64 * (1 + 4.5 / math.sqrt(rows))
    for n in (128, 256):  # equal bounds of a block count together
        share = (63 / 64) ** (n - 64)
        assert (counts > n).float().mean() < share + 4.5 * math.sqrt(share / rows)


def test_the_room_is_enough_but_for_one_call_in_fifty_trillion():
    """The bound of the docstring; and that it is one, at a size where it can be computed."""
    rooms = [(rows, noise.ROOM_PER_ROW * rows + noise.ROOM) for rows in (1, 8, 64, 512)]
    bounds = [math.exp(-((n / 64 - rows) ** 2) / (n / 32)) for rows, n in rooms]
    assert max(bounds) < 2e-14
    too_few = sum(math.comb(800, k) * 63 ** (800 - k) for k in range(4)) / 64**800
    assert too_few < math.exp(-((800 / 64 - 4) ** 2) / (800 / 32))


class WaitsForTheDeviceError(Exception):
    """An operation has a result whose size, or value, the host must know."""


class NothingWaits(TorchDispatchMode):
    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        name = func._schema.name
        index = args[1] if "index" in name and isinstance(args[1], list | tuple) else ()
        is_masked = any(x is not None and x.dtype == torch.bool for x in index)
        if name in WAITING or is_masked:
            raise WaitsForTheDeviceError(name)
        return func(*args, **(kwargs or {}))


WAITING = {"aten::nonzero", "aten::_local_scalar_dense", "aten::masked_select", "aten::equal"}


def test_nothing_waits_for_the_device():
    x, keys = torch.randn(5, 1000), keys_of(5)
    with NothingWaits():
        noise.draw(x, keys, waits=False)
        with pytest.raises(WaitsForTheDeviceError):
            noise.draw(x, keys)


def test_the_hash_is_the_same_in_int64():
    """As it is computed on devices that are not CPUs."""
    word = torch.randint(-(2**63), 2**63 - 1, (1000,))
    expected = noise._mixed(word.numpy().view(np.uint64).copy()).view(np.int64)
    assert noise._mixed_on_device(word).tolist() == expected.tolist()


def chi_square(counts, probabilities):
    total = sum(counts)
    return sum(
        (c - total * p) ** 2 / (total * p) for c, p in zip(counts, probabilities, strict=True)
    )


def upper_limit(freedom, sigmas=4.5):
    """Chi-square's quantile at `sigmas` (Wilson and Hilferty): passed by chance once in 3e5."""
    a = 2 / (9 * freedom)
    return freedom * (1 - a + sigmas * math.sqrt(a)) ** 3


@pytest.mark.parametrize("neighbour", ["position", "prompt", "sample", "epoch", "seed"])
def test_neighbours_are_independent(neighbour):
    """Chi-square of the joint table of two rows' tokens, 5 x 5, 40,000 pairs."""

    def key(i, shift):
        parts = {"position": i % 200, "prompt": i // 200, "sample": 0, "epoch": 0, "seed": 0}
        parts[neighbour] = 2 * parts[neighbour] + shift
        return parts

    def tokens(shift):
        rows = [key(i, shift) for i in range(40_000)]
        streams = [
            noise.stream(r["seed"], NoiseKey(r["prompt"], r["epoch"], r["sample"])) for r in rows
        ]
        if neighbour != "position" and neighbour != "prompt":
            # vary the rest by prompt, so that pairs differ
            assert len(set(streams)) == 200
        keys = noise.row_keys(streams, [r["position"] for r in rows], CPU)
        return noise.draw(torch.zeros(5).expand(40_000, -1), keys)

    joint = (tokens(0) * 5 + tokens(1)).bincount(minlength=25).tolist()
    assert chi_square(joint, [1 / 25] * 25) < upper_limit(24)


def test_noise_is_exponential_within_and_across_blocks():
    """Kolmogorov-Smirnov against 1 - exp(-E); and tokens of one block are not correlated."""
    values = noise.exponentials(keys_of(2000), 130)
    u = (1 - (-values).exp()).flatten().sort().values
    n = len(u)
    distance = (u - torch.arange(1, n + 1) / n).abs().max()
    assert distance < 2.2 / math.sqrt(n)  # passed by chance once in 8,000
    uniform = 1 - (-values).exp()
    for a, b in itertools.pairwise([0, 1, 37, 63, 64, 127, 128, 129]):
        pair = torch.stack([uniform[:, a], uniform[:, b]])
        assert abs(torch.corrcoef(pair)[0, 1]) < 4.5 / math.sqrt(2000)


def test_noise_is_finite_and_positive_at_the_ends_of_the_hash():
    words = torch.tensor([0, -1, 2**63 - 1, -(2**63), 4095])
    values = noise._exponential(words)
    assert values.min() == values[0] == pytest.approx(2.0**-53, rel=1e-12)
    assert values.max() == values[1] == pytest.approx(53 * math.log(2))


@pytest.mark.gpu
def test_cuda_has_the_same_bits():
    keys = keys_of(300)
    counters = torch.arange(1000)
    words = noise.words(keys[:, None], counters)
    assert torch.equal(noise.words(keys.cuda()[:, None], counters.cuda()).cpu(), words)
    x = torch.randn(300, 5000)
    for waits in (True, False):
        drawn = noise.draw(x.cuda(), keys.cuda(), waits=waits)
        assert torch.equal(drawn.cpu(), noise.draw(x, keys))


GOLDEN_STREAMS = (0x3B9D11EB55856BAF, 0xB52BE9B0D4C94B8F)
GOLDEN_KEYS = [-421928066886645377, -8406876010492286543]
GOLDEN_WORDS = [-5147094953545825910, 6293581325385914383]
GOLDEN_NOISE = [
    1.294204156633332,
    1.2050331045834497,
    3.100363448338125,
    0.3600483209757323,
    7.241631236698033,
    1.5251764458872235,
    0.9549741759921817,
    2.985980100143524,
]
