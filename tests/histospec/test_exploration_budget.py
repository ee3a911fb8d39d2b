"""When to try: what trying can cost at most, and how soon what pays is found."""

from __future__ import annotations

from itertools import pairwise

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from rhymeflow.histospec.exploration_budget import ExplorationBudget

PLAIN = 0.010


def play(
    budget: ExplorationBudget, iterations: int, *, saved: float, search: float = 0.0005, n: int = 8
):
    """Run iterations; a search saves as much each time. Return the places of searches."""
    searched = []
    for i in range(iterations):
        if budget.allows_search(n):
            budget.searched(n, search=search, saved=saved, plain=PLAIN)
            searched.append(i)
        else:
            budget.rested(PLAIN)
    return searched


@settings(max_examples=50, deadline=None)
@given(st.floats(0.00005, 0.002), st.floats(0.0, 0.5))
def test_trying_in_vain_costs_less_than_a_hundredth(search: float, refused: float) -> None:
    loss = search + refused * PLAIN
    budget = ExplorationBudget()
    searched = play(budget, 10_000, saved=-loss, search=search)
    initial = 3 * search + 0.1 * PLAIN
    beginning = 8 * (initial + loss)
    assert len(searched) * loss < 0.01 * 10_000 * PLAIN + beginning


def test_pauses_grow_to_a_bound() -> None:
    searched = play(ExplorationBudget(), 20_000, saved=-0.0005)
    gaps = [b - a for a, b in pairwise(searched) if b - a > 1]
    assert gaps == sorted(gaps)
    assert gaps[0] < 20
    assert gaps[-1] == gaps[-2] < 100


def test_what_pays_is_gone_on_with() -> None:
    assert len(play(ExplorationBudget(), 1000, saved=0.001)) == 1000


def test_a_few_bad_iterations_do_not_end_what_has_paid() -> None:
    budget = ExplorationBudget()
    play(budget, 100, saved=0.002)
    assert len(play(budget, 10, saved=-0.003)) == 10
    assert len(play(budget, 100, saved=-0.003)) < 20


def test_a_batch_that_fell_by_half_is_a_reason_to_try_at_once() -> None:
    budget = ExplorationBudget()
    play(budget, 5000, saved=-0.0005)
    while budget.allows_search(8):
        play(budget, 1, saved=-0.0005)
    assert not budget.allows_search(5)
    assert budget.allows_search(4)


def test_fewer_sequences_are_a_reason_only_once() -> None:
    budget = ExplorationBudget()
    play(budget, 5000, saved=-0.0005)
    play(budget, 20, saved=-0.0005, n=4)
    assert len(play(budget, 100, saved=-0.0005, n=4)) < 60


def test_what_begins_to_pay_is_found_within_a_few_dozen_iterations() -> None:
    budget = ExplorationBudget()
    play(budget, 5000, saved=-0.0005)
    assert play(budget, 200, saved=0.002)[0] < 100


def test_no_more_is_risked_than_an_initial_budget_and_what_was_saved() -> None:
    budget = ExplorationBudget()
    assert budget.max_loss(PLAIN) == pytest.approx(0.1 * PLAIN)
    budget.searched(8, search=0.0, saved=0.002, plain=PLAIN)
    assert budget.max_loss(PLAIN) == pytest.approx(0.1 * PLAIN + 0.002)


def test_a_first_search_that_was_held_up_is_no_reason_for_a_large_initial_budget() -> None:
    budget = ExplorationBudget()
    budget.searched(8, search=0.5, saved=-0.5, plain=PLAIN)
    assert budget.max_loss(PLAIN) < 0.5 * PLAIN
    budget.searched(8, search=0.0001, saved=0.0, plain=PLAIN)
    assert budget.max_loss(PLAIN) < 0.5 * PLAIN


def test_a_first_search_that_was_held_up_does_not_put_off_the_next() -> None:
    budget = ExplorationBudget()
    budget.searched(8, search=0.5, saved=-0.5, plain=PLAIN)
    assert play(budget, 100, saved=0.002)[0] < 5
