"""The choice of drafts against all there are."""

from __future__ import annotations

from dataclasses import replace
from itertools import product
from math import inf

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from rhymeflow.core.cost import CostModel
from rhymeflow.sim.continuous_batching import ROUNDING
from rhymeflow.sim.drafts import BAND, CLASSES, Counts, Drafts
from tests.sim.test_instance import COST


def choosing(cost: CostModel, max_draft: int, acceptance: float = 0.7) -> Drafts:
    return Drafts(
        cost, acceptance=acceptance, first_acceptance=0.3, max_draft=max_draft, kv_capacity=10_000
    )


def generated(chance: float, drafted: int) -> float:
    """By one trajectory in an iteration, on average."""
    return (1 - chance ** (drafted + 1)) / (1 - chance)


def rate(drafts: Drafts, counts: Counts, kv_tokens: float) -> float:
    """Tokens a second as chosen."""
    choice = drafts.choose(counts, kv_tokens)
    tokens = sum(count * gain for count, gain in zip(counts, choice.gains, strict=True))
    return tokens / drafts.cost.iteration(choice.rows, kv_tokens)


costs = st.builds(
    lambda k2, k3, c, k4: replace(COST, k1=0.0, k2=k2, k3=k3, c=c, k4=k4),
    st.sampled_from([1e-3, 6e-3, 2e-2]), st.sampled_from([0.0, 1e-4, 1e-3]),
    st.sampled_from([-1e-3, 0.0, 2e-3]), st.sampled_from([1e-4, 5e-3]),
)  # fmt: skip


@settings(max_examples=200, deadline=None)
@given(costs, st.lists(st.integers(0, CLASSES - 1), min_size=1, max_size=4))
def test_nothing_is_better_of_all_drafts_of_each_trajectory(cost, classes) -> None:
    drafts = choosing(cost, 4)
    counts = tuple(classes.count(index) for index in range(CLASSES))
    best = max(
        sum(
            generated(drafts.acceptance[index], d)
            for index, d in zip(classes, drafted, strict=True)
        )
        / cost.iteration(len(classes) + sum(drafted), 0)
        for drafted in product(range(5), repeat=len(classes))
    )
    assert rate(drafts, counts, 0) == pytest.approx(best)


@given(st.tuples(*[st.integers(0, 30)] * CLASSES).filter(any), st.integers(0, 10_000))
def test_it_is_near_the_best_in_all_of_a_band(counts, kv_tokens) -> None:
    drafts = choosing(replace(COST, k1=1e-5), 4)
    exact = choosing(replace(COST, k1=0.0, k4=COST.k4 + 1e-5 * kv_tokens), 4)
    ours = rate(drafts, counts, kv_tokens)
    assert ours >= rate(exact, counts, 0) * (1 - BAND / 10)
    until = drafts.choose(counts, kv_tokens).until
    assert until > kv_tokens
    assert drafts.choose(counts, min(until - 2 * ROUNDING, 1e9)).until == until
    if until < inf:
        assert drafts.choose(counts, until - ROUNDING / 2).until > until


def test_gains_are_those_of_the_drafts() -> None:
    choice = choosing(replace(COST, k3=0.0), 5).choose((2, 3), 100)
    assert choice.gains == pytest.approx((generated(0.3, 5), generated(0.7, 5)))
    assert choice.generated == pytest.approx(2 * generated(0.3, 5) + 3 * generated(0.7, 5))
    assert choice.rows == 5 + 25
    none = choosing(COST, 5).none((2, 3))
    assert none[:3] == ((1,) * 2, 5, 5)
