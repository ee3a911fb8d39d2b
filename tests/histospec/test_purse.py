"""When to try: what trying can cost at most, and how soon what pays is found."""

from __future__ import annotations

from itertools import pairwise

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from rhymeflow.histospec.purse import Purse

PLAIN = 0.010


def play(purse: Purse, iterations: int, *, saved: float, search: float = 0.0005, n: int = 8):
    """Run iterations; a search saves as much each time. Return the places of searches."""
    searched = []
    for i in range(iterations):
        if purse.is_open(n):
            purse.tried(n, search=search, saved=saved, plain=PLAIN)
            searched.append(i)
        else:
            purse.rested(PLAIN)
    return searched


@settings(max_examples=50, deadline=None)
@given(st.floats(0.00005, 0.002), st.floats(0.0, 0.5))
def test_trying_in_vain_costs_less_than_a_hundredth(search: float, refused: float) -> None:
    loss = search + refused * PLAIN
    purse = Purse()
    searched = play(purse, 10_000, saved=-loss, search=search)
    stake = 3 * search + 0.1 * PLAIN
    beginning = 8 * (stake + loss)
    assert len(searched) * loss < 0.01 * 10_000 * PLAIN + beginning


def test_pauses_grow_to_a_bound() -> None:
    searched = play(Purse(), 20_000, saved=-0.0005)
    gaps = [b - a for a, b in pairwise(searched) if b - a > 1]
    assert gaps == sorted(gaps)
    assert gaps[0] < 20
    assert gaps[-1] == gaps[-2] < 100


def test_what_pays_is_gone_on_with() -> None:
    assert len(play(Purse(), 1000, saved=0.001)) == 1000


def test_a_few_bad_iterations_do_not_end_what_has_paid() -> None:
    purse = Purse()
    play(purse, 100, saved=0.002)
    assert len(play(purse, 10, saved=-0.003)) == 10
    assert len(play(purse, 100, saved=-0.003)) < 20


def test_a_batch_that_fell_by_half_is_a_reason_to_try_at_once() -> None:
    purse = Purse()
    play(purse, 5000, saved=-0.0005)
    while purse.is_open(8):
        play(purse, 1, saved=-0.0005)
    assert not purse.is_open(5)
    assert purse.is_open(4)


def test_fewer_sequences_are_a_reason_only_once() -> None:
    purse = Purse()
    play(purse, 5000, saved=-0.0005)
    play(purse, 20, saved=-0.0005, n=4)
    assert len(play(purse, 100, saved=-0.0005, n=4)) < 60


def test_what_begins_to_pay_is_found_within_a_few_dozen_iterations() -> None:
    purse = Purse()
    play(purse, 5000, saved=-0.0005)
    assert play(purse, 200, saved=0.002)[0] < 100


def test_no_more_is_risked_than_a_stake_and_what_was_saved() -> None:
    purse = Purse()
    assert purse.risk(PLAIN) == pytest.approx(0.1 * PLAIN)
    purse.tried(8, search=0.0, saved=0.002, plain=PLAIN)
    assert purse.risk(PLAIN) == pytest.approx(0.1 * PLAIN + 0.002)


def test_a_first_search_that_was_held_up_is_no_reason_for_a_large_stake() -> None:
    purse = Purse()
    purse.tried(8, search=0.5, saved=-0.5, plain=PLAIN)
    assert purse.risk(PLAIN) < 0.5 * PLAIN
    purse.tried(8, search=0.0001, saved=0.0, plain=PLAIN)
    assert purse.risk(PLAIN) < 0.5 * PLAIN


def test_a_first_search_that_was_held_up_does_not_put_off_the_next() -> None:
    purse = Purse()
    purse.tried(8, search=0.5, saved=-0.5, plain=PLAIN)
    assert play(purse, 100, saved=0.002)[0] < 5


def poor() -> Purse:
    """One that has tried in vain for long, and rests."""
    purse = Purse()
    play(purse, 5000, saved=-0.0005)
    while purse.is_open(8):
        play(purse, 1, saved=-0.0005)
    return purse


def test_a_hurry_is_a_reason_to_try_at_once_but_only_once() -> None:
    purse = poor()
    assert purse.is_open(8, hurried=True)
    for _ in range(20):
        if purse.is_open(8, hurried=True):
            purse.tried(8, search=0.0005, saved=-0.0005, plain=PLAIN)
    assert not purse.is_open(8, hurried=True)
    assert not purse.is_open(8)
    assert not purse.is_open(8, hurried=True), "it came and went, and nothing was tried since"


@settings(max_examples=50, deadline=None)
@given(st.lists(st.booleans(), min_size=1, max_size=40), st.integers(1, 50))
def test_hurries_that_come_and_go_cost_no_more(hurries: list[bool], length: int) -> None:
    purse, loss, searches = Purse(), 0.0005, 0
    for i in range(10_000):
        if purse.is_open(8, hurried=hurries[i // length % len(hurries)]):
            purse.tried(8, search=loss, saved=-loss, plain=PLAIN)
            searches += 1
        else:
            purse.rested(PLAIN)
    assert searches * loss < 0.01 * 10_000 * PLAIN + 8 * (3 * loss + 0.1 * PLAIN + loss)


def test_what_a_hurry_brought_in_is_not_spent_once_it_is_over() -> None:
    purse = Purse()
    assert purse.is_open(8, hurried=True)
    for _ in range(100):
        purse.tried(8, search=0.0005, saved=0.002, plain=PLAIN)
    assert purse.risk(PLAIN) > 4 * PLAIN
    assert purse.is_open(8)
    assert purse.risk(PLAIN) == pytest.approx(3 * 0.0005 + 0.1 * PLAIN)
