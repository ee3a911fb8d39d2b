"""The choice of drafts against all there are."""

from dataclasses import replace
from itertools import product
from math import ceil, inf, sqrt
from random import Random
from statistics import fmean

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from rhymeflow.core.cost import CostModel
from rhymeflow.core.types import TrajectoryId
from rhymeflow.sim.continuous_batching import ROUNDING, Admitted, DecodeBatch
from rhymeflow.sim.drafts import (
    BAND,
    NEW,
    RATES,
    Counts,
    Drafts,
    assumed,
    expected_rate,
    rate_of,
)
from rhymeflow.sim.response import Response
from tests.sim.test_instance import COST

CLASSES = 2
ENOUGH = 1_000_000


def choosing(cost: CostModel, max_draft: int) -> Drafts:
    return Drafts(cost, acceptance=(0.3, 0.7), max_draft=max_draft, kv_capacity=10_000)


def generated(chance: float, drafted: int) -> float:
    """By one trajectory in an iteration, on average."""
    return (1 - chance ** (drafted + 1)) / (1 - chance)


def rate(drafts: Drafts, counts: Counts, kv_tokens: float, room: int = ENOUGH) -> float:
    """Tokens a second of what was chosen, as the drafter expects."""
    choice = drafts.choose(counts, kv_tokens, room)
    assert sum(choice.drafted) <= room
    tokens = 0.0
    for count, drafted, own in zip(counts, choice.drafted, drafts.acceptance, strict=True):
        whole, more = divmod(drafted, max(count, 1))
        chance = assumed(own)
        tokens += count * generated(chance, whole) + more * chance ** (whole + 1)
    return tokens / drafts.cost.iteration(sum(counts) + sum(choice.drafted), kv_tokens)


costs = st.builds(
    lambda k2, k3, c, k4: replace(COST, k1=0.0, k2=k2, k3=k3, c=c, k4=k4),
    st.sampled_from([1e-3, 6e-3, 2e-2]), st.sampled_from([0.0, 1e-4, 1e-3]),
    st.sampled_from([-1e-3, 0.0, 2e-3]), st.sampled_from([1e-4, 5e-3]),
)  # fmt: skip


@settings(max_examples=200, deadline=None)
@given(
    costs,
    st.lists(st.integers(0, CLASSES - 1), min_size=1, max_size=4),
    st.integers(0, 8) | st.just(ENOUGH),
)
def test_nothing_is_better_of_all_drafts_of_each_trajectory(cost, classes, room):
    drafts = choosing(cost, 4)
    counts = tuple(classes.count(index) for index in range(CLASSES))
    best = max(
        sum(
            generated(assumed(drafts.acceptance[index]), d)
            for index, d in zip(classes, drafted, strict=True)
        )
        / cost.iteration(len(classes) + sum(drafted), 0)
        for drafted in product(range(5), repeat=len(classes))
        if sum(drafted) <= room
    )
    assert rate(drafts, counts, 0, room) == pytest.approx(best)


@given(st.tuples(*[st.integers(0, 30)] * CLASSES).filter(any), st.integers(0, 10_000))
def test_it_is_near_the_best_in_all_of_a_band(counts, kv_tokens):
    drafts = choosing(replace(COST, k1=1e-5), 4)
    exact = choosing(replace(COST, k1=0.0, k4=COST.k4 + 1e-5 * kv_tokens), 4)
    ours = rate(drafts, counts, kv_tokens)
    assert ours >= rate(exact, counts, 0) * (1 - BAND / 5)
    until = drafts.choose(counts, kv_tokens, ENOUGH).until
    assert until > kv_tokens
    assert drafts.choose(counts, min(until - 2 * ROUNDING, 1e9), ENOUGH).until == until
    if until < inf:
        assert drafts.choose(counts, until - ROUNDING / 2, ENOUGH).until > until


def test_a_drafter_takes_low_acceptance_for_higher():
    """As in runs: at 0.4 and 0.54 it drafts 3.3 and 5.9 tokens where 2.7 and 3.8 were best."""
    rates = [assumed(tenth / 1000) for tenth in range(1001)]
    assert rates == sorted(rates)
    assert assumed(0.541) == pytest.approx(0.65, abs=0.01)
    assert [rate for rate in RATES if assumed(rate) == rate] == [0.861, 0.907, 0.949, 0.986]


def test_gains_are_those_of_the_drafts():
    choice = choosing(replace(COST, k3=0.0), 5).choose((2, 3), 100, ENOUGH)
    assert choice.gains == pytest.approx((generated(0.3, 5), generated(0.7, 5)))
    assert choice.generated == pytest.approx(2 * generated(0.3, 5) + 3 * generated(0.7, 5))
    assert choice.drafted == (10, 15)
    none = choosing(COST, 5).none((2, 3))
    assert none[:3] == ((1,) * 2, (0, 0), 5)


def test_looking_for_drafts_takes_its_time_and_is_left_out_where_it_does_not_pay():
    for seconds, is_drafted in ((1e-5, True), (1.0, False)):
        drafts = Drafts(COST, max_draft=4, kv_capacity=10_000, search_seconds=seconds)
        counts = (0,) * (len(RATES) - 1) + (3,)
        choice = drafts.choose(counts, 100, ENOUGH)
        assert (sum(choice.drafted) > 0) == is_drafted
        assert choice.searching == (3 * seconds if is_drafted else 0.0)


def test_a_response_is_in_the_class_whose_tokens_in_an_iteration_are_nearest_to_its_own():
    drafts = Drafts(COST, max_draft=16, kv_capacity=10_000)
    for index, rate in enumerate(RATES):
        assert drafts.class_of(rate) == index
    assert (drafts.class_of(0.0), drafts.class_of(1.0)) == (0, len(RATES) - 1)
    for tenth in range(200, 987):
        own = generated(tenth / 1000, 16)
        assert generated(RATES[drafts.class_of(tenth / 1000)], 16) == pytest.approx(own, rel=0.15)


def decoded(rate: float, drafted: int, length: int, random: Random) -> tuple[int, int]:
    """Iterations and drafted tokens that `length` tokens take, one by one."""
    steps = looked_at = 0
    while length > 0:
        steps, draft = steps + 1, min(drafted, length)
        looked_at += draft
        length -= 1 + next((n for n in range(draft) if random.random() >= rate), draft)
    return steps, looked_at


def taken(rate: float, drafted: float, lengths: list[int]) -> int:
    """Iterations of the simulator, where each makes as many tokens as there are in the mean."""
    whole, part = divmod(drafted, 1)
    gain = generated(rate, int(whole)) + part * rate ** (whole + 1)
    return sum(ceil(length / gain) for length in lengths)


@pytest.mark.parametrize("rate", [0.3, 0.6, 0.77, 0.95])
@pytest.mark.parametrize(
    ("drafted", "lengths"), [(16, (1, 6)), (1, (60, 400)), (4, (60, 400)), (16, (60, 400))]
)
def test_decodes_take_as_many_iterations_as_in_the_run(rate, drafted, lengths):
    """Short turns too, of which most drafts are longer than what is left."""
    random = Random(5)
    made = [[random.randint(*lengths) for _ in range(random.randint(1, 3))] for _ in range(300)]
    steps = [sum(decoded(rate, drafted, length, random)[0] for length in each) for each in made]
    rates = [rate_of(each, n, n * drafted) for each, n in zip(made, steps, strict=True)]
    found = [taken(own, drafted, each) for own, each in zip(rates, made, strict=True)]
    assert sum(found) == pytest.approx(sum(steps), rel=0.05)
    if lengths == (60, 400):
        assert fmean(rates) == pytest.approx(rate, abs=0.03)


def test_the_acceptance_is_amid_those_that_would_do():
    assert taken(rate_of([3, 3], 4, 8), 2, [3, 3]) == 4
    assert 1 + sum(rate_of([3, 3], 4, 8) ** n for n in (1, 2)) == pytest.approx(
        sqrt(1.5 * 3), abs=0.06
    )
    assert rate_of([3], 1, 3) > 0.85, "a gain between 3 and 4, the most there is"
    assert rate_of([200] * 10, 760, 3.5 * 760) == pytest.approx(0.7, abs=0.02)
    assert rate_of([40], 40, 12) == rate_of([1], 1, 0) == RATES[0]
    assert rate_of([50], 40, 10) == RATES[-1]


def test_long_responses_accept_less():
    """As in runs: at 2.7 mean lengths 0.87 where short ones have 0.98."""
    assert expected_rate(0.7, 1.0, is_known=True) == pytest.approx(0.7)
    assert expected_rate(0.9, 1.0, is_known=False) == pytest.approx(NEW)
    assert expected_rate(0.965, 0.57, is_known=True) == pytest.approx(0.98, abs=0.005)
    assert expected_rate(0.965, 2.67, is_known=True) == pytest.approx(0.88, abs=0.02)
    for known in (False, True):
        rates = [expected_rate(0.7, length, is_known=known) for length in (0.01, 0.5, 2, 4, 50)]
        assert rates == sorted(rates, reverse=True)
        assert 0 < rates[-1] < rates[0] < 1
    assert expected_rate(0.0, 2.0, is_known=True) == 0.0


@pytest.mark.parametrize(
    ("remaining", "past"),
    [(2, 0.75), (4, 0.5), (8, 0.3125), (40, 0.0625), (9, 2.5 / 9)],
    ids=["its only draft", "still its only one", "two drafts", "eight drafts", "a part"],
)
def test_what_of_its_drafts_is_past_the_end_of_a_response(remaining, past):
    """Of drafts of 8 tokens, with which an iteration makes 5: of the last in the mean half, but of
    one that is the only one what is more than the response has left."""
    batch = DecodeBatch()
    batch.gain = 5.0
    for number in range(3):
        batch.enter(Admitted(Response(TrajectoryId(0, number), 1, remaining)), remaining)
    assert batch.past_ends(3 * 8) == pytest.approx(past)
