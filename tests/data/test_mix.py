"""Prompts of several kinds: shares, epochs of each, and purity."""

from __future__ import annotations

from collections import Counter

from hypothesis import given
from hypothesis import strategies as st

from rhymeflow.data import Prompt
from rhymeflow.data.stream import BLOCK, MixedStream, counts

SHARES = st.lists(st.floats(0.01, 100.0), min_size=1, max_size=6)


def mixed(sizes: list[int], shares: list[float], seed: int, shuffle: bool = True) -> MixedStream:
    source = [Prompt(row, f"p{row}", {}) for row in range(sum(sizes))]
    ends = [sum(sizes[: kind + 1]) for kind in range(len(sizes))]
    kinds = [list(range(end - size, end)) for size, end in zip(sizes, ends, strict=True)]
    return MixedStream(source, kinds, shares, seed, shuffle)


@given(SHARES)
def test_whole_numbers_near_the_shares(shares):
    found = counts(shares)
    assert sum(found) == BLOCK
    assert min(found) >= 1
    if min(shares) * BLOCK >= sum(shares):  # nobody was given one for nothing
        exact = [share / sum(shares) * BLOCK for share in shares]
        assert all(abs(a - b) < 1 for a, b in zip(found, exact, strict=True))


@given(st.data(), SHARES, st.integers(0, 2**40))
def test_every_block_has_the_shares_and_every_kind_its_epochs(data, shares, seed):
    sizes = [data.draw(st.integers(1, 30)) for _ in shares]
    stream, due = mixed(sizes, shares, seed), counts(shares)
    ends = [sum(sizes[: kind + 1]) for kind in range(len(sizes))]
    drawn: dict[int, list[tuple[int, int]]] = {kind: [] for kind in range(len(sizes))}
    for block in range(3):
        of_block: Counter[int] = Counter()
        for number in range(block * BLOCK, (block + 1) * BLOCK):
            epoch, prompt = stream.at(number)
            kind = next(k for k, end in enumerate(ends) if prompt.row < end)
            of_block[kind] += 1
            drawn[kind].append((epoch, prompt.row))
        assert [of_block[kind] for kind in range(len(sizes))] == due
    for kind, size in enumerate(sizes):
        assert [epoch for epoch, _ in drawn[kind]] == [n // size for n in range(len(drawn[kind]))]
        whole = len(drawn[kind]) // size
        for epoch in range(whole):
            rows = [row for e, row in drawn[kind] if e == epoch]
            assert sorted(rows) == list(range(ends[kind] - size, ends[kind]))


@given(st.lists(st.integers(0, 1000), min_size=1, max_size=10), st.integers(0, 2**40))
def test_at_depends_on_the_number_only(numbers, seed):
    used = mixed([3, 5], [1.0, 2.0], seed)
    for number in numbers:
        assert used.at(number) == mixed([3, 5], [1.0, 2.0], seed).at(number)


def test_seeds_give_different_orders():
    orders = [[mixed([9, 9], [1, 1], seed).at(n)[1].row for n in range(40)] for seed in (0, 1)]
    assert orders[0] != orders[1]
