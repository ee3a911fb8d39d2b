"""How a step is laid out: nothing twice, nothing left out, completion times as they are to be."""

import random

import pytest
from hypothesis import given
from hypothesis import strategies as st

from rhymeflow.core.histopipe.layout import (
    RANKING_GROUPS,
    Ranked,
    Share,
    _equal_sizes,
    completion_time,
    duration,
    lay_out,
)
from tests.core.strategies.fleets import COST_14B


def ranked(number: int, *lengths: float) -> Ranked:
    return Ranked(number, 500, tuple(sorted(lengths)))


def skewed(count: int, seed: int = 0) -> list[Ranked]:
    """Groups of 16 whose lengths are lognormal, most of the variance being the group's."""
    draw = random.Random(seed)
    means = [draw.lognormvariate(8, 0.8) for _ in range(count)]
    return [
        ranked(i, *(min(20_000.0, mean * draw.lognormvariate(0, 0.4)) for _ in range(16)))
        for i, mean in enumerate(means)
    ]


def times(shares: list[Share], groups: list[Ranked], places: int = 64) -> list[float]:
    """Completion times of the ranking groups, the shortest first."""
    by_group = {each.group: each for each in groups}
    return [
        completion_time([by_group[g] for g in share.groups], share.num_instances, COST_14B, places)
        for share in shares
    ]


groups_of = st.lists(
    st.lists(st.floats(1, 20_000), min_size=2, max_size=2), min_size=1, max_size=24
)


@given(lengths=groups_of, num_instances=st.integers(1, 30))
def test_every_group_and_every_instance_once(lengths, num_instances):
    groups = [ranked(i, *each) for i, each in enumerate(lengths)]
    shares = lay_out(groups, num_instances, COST_14B, 8)
    assert sorted(g for share in shares for g in share.groups) == list(range(len(groups)))
    assert sum(share.num_instances for share in shares) == num_instances
    assert all(share.groups and share.num_instances >= 1 for share in shares)
    assert len(shares) == min(RANKING_GROUPS, num_instances, len(groups))
    means = [max(groups[g].mean for g in share.groups) for share in shares]
    assert means == sorted(means), "the shortest first"
    assert shares == lay_out(groups[::-1], num_instances, COST_14B, 8)


@pytest.mark.parametrize("seed", range(5))
def test_balanced_completion_times_grow_linearly(seed):
    groups = skewed(1024, seed)
    shares = lay_out(groups, 256, COST_14B, 64)
    found = times(shares, groups)
    low, high = found[0], found[-1]
    assert low < high == max(found)
    for rank, seconds in enumerate(found):
        line = low + (high - low) * rank / (len(found) - 1)
        assert seconds == pytest.approx(line, abs=0.1 * (low + high))
    assert [s.num_instances for s in shares] == sorted(s.num_instances for s in shares)


@pytest.mark.parametrize("num_instances", [9, 16, 40, 100])
@pytest.mark.parametrize("seed", range(3))
def test_two_steps_in_a_row_take_no_longer_than_evenly(seed, num_instances):
    groups = skewed(128, seed)
    shares = lay_out(groups, num_instances, COST_14B, 64)
    numbers = _equal_sizes(len(shares), num_instances)
    evenly = [share._replace(num_instances=n) for share, n in zip(shares, numbers, strict=True)]
    even, balanced = times(evenly, groups), times(shares, groups)
    assert balanced[0] + balanced[-1] <= 1.001 * (even[0] + even[-1])
    assert max(balanced) <= max(even)


# -- completion ------------------------------------------------------------------------------------


def one_after_another(lengths: list[int], prompt: int, places: int) -> float:
    """Every iteration by itself: places that come free are filled in this order."""
    waiting, running, total, cost = lengths[::-1], list[tuple[int, int]](), 0.0, COST_14B
    while waiting or running:
        while waiting and len(running) < places:
            running.append((waiting.pop(), 0))
        total += max(cost.k2, cost.k3 * len(running) + cost.c) + cost.k4
        total += cost.k1 * sum(prompt + made for _, made in running)
        running = [(end, made + 1) for end, made in running if made + 1 < end]
    return total


@given(lengths=st.lists(st.integers(1, 300), max_size=40), prompt=st.integers(1, 3000))
def test_seconds_of_what_begins_together(lengths, prompt):
    found = duration(COST_14B, sorted(lengths), prompt, 64)
    # Token 1 reads the prompt alone: half a token a response and iteration less than the integral.
    slack = COST_14B.k1 * sum(lengths) / 2
    assert found == pytest.approx(one_after_another(lengths, prompt, 64) + slack)
