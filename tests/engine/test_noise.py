"""The noise: golden bits, the fast draw against its definition, and its statistics."""

import itertools
import math

import pytest
import torch
from hypothesis import example, given, settings
from hypothesis import strategies as st

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
    words = noise._words(keys, torch.tensor([0, 49151]))
    assert words.tolist() == GOLDEN_WORDS
    assert noise.exponentials(keys, 70)[:, [0, 1, 63, 69]].flatten().tolist() == pytest.approx(
        GOLDEN_NOISE, rel=1e-14
    )


@settings(max_examples=60)
@given(
    vocabulary=st.integers(1, 400),
    spread=st.sampled_from([0.0, 0.5, 4.0, 30.0]),
    left_out=st.sampled_from([0.0, 0.5, 0.99]),
    seed=st.integers(0, 2**31),
)
@example(vocabulary=49152, spread=2.0, left_out=0.0, seed=0)
def test_draw_is_argmax_over_all_noise(vocabulary, spread, left_out, seed):
    torch.manual_seed(seed)
    x = torch.randn(8, vocabulary) * spread
    out = torch.rand(8, vocabulary) < left_out
    out.scatter_(1, torch.randint(vocabulary, (8, 1)), False)
    x = x.masked_fill(out, -torch.inf)
    keys = keys_of(8, seed)
    scores = x.double() - noise.exponentials(keys, vocabulary).log()
    assert noise.draw(x, keys).tolist() == scores.argmax(1).tolist()


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
    words = noise._words(keys[:, None], counters)
    assert torch.equal(noise._words(keys.cuda()[:, None], counters.cuda()).cpu(), words)
    x = torch.randn(300, 5000)
    assert torch.equal(noise.draw(x.cuda(), keys.cuda()).cpu(), noise.draw(x, keys))


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
