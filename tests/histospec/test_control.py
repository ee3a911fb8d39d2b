"""What is drafted: acceptance, prices, the cut and the budget, each against what is true."""

from itertools import product

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from rhymeflow.histospec import build_draft, control
from rhymeflow.histospec.build_draft import Proposals
from rhymeflow.histospec.control import LEAST_GAIN, Acceptance, Aimd, Budget, Prices, best_cut

HANDLE = np.array([0])


def line(*tokens):
    """A linear proposal: (token, parent)."""
    return [(token, node - 1) for node, token in enumerate(tokens)]


def state_of(model):
    return int(model.states(HANDLE)[0])


def see(model, nodes, generated, *, verified=0, classes=None, probability=0.9):
    """One sequence's proposal and what it got; return how many verified tokens were accepted."""
    classes = classes or [build_draft.class_of(0.8, state_of(model), 1)] * len(nodes)
    proposals = Proposals(
        np.array([[token for token, _ in nodes]], np.int32).reshape(1, -1),
        np.array([[parent for _, parent in nodes]], np.int32).reshape(1, -1),
        np.full((1, len(nodes)), probability, np.float32),
        np.array([classes], np.int32).reshape(1, -1),
        np.array([len(nodes)]),
    )
    (accepted,) = model.observe(
        proposals, np.array([verified]), HANDLE, HANDLE,
        np.array(generated, np.int32), np.array([0, len(generated)]),
    )  # fmt: skip
    return int(accepted)


def feed(model, number, tried, accepted):
    """Trials of one class, those that are accepted evenly among them."""
    for i in range(tried):
        is_right = (i + 1) * accepted // tried > i * accepted // tried
        see(model, line(1), [1 if is_right else 2], classes=[number])


def test_rates_begin_with_the_share_of_the_votes_and_less_for_those_that_left():
    rates = Acceptance(1).rates.reshape(
        build_draft.NUM_SHARES, build_draft.NUM_STATES, build_draft.NUM_KINDS
    )
    assert rates[:, control.BEGUN, 0] == pytest.approx((np.arange(8) + 0.5) / 8)
    assert rates[6, :, 0] / rates[6, 0, 0] == pytest.approx([1.0, 1.0, 0.7, 0.8])
    assert (rates == rates[:, :, :1]).all()


@pytest.mark.parametrize(
    ("happened", "state"),
    [
        ([], control.BEGUN),
        ([([1, 2, 3], [1, 2, 3, 4])], control.FOLLOWS),
        ([([1, 2, 3], [1, 2])], control.FOLLOWS),  # as far as the response went
        ([([1, 2, 3], [1, 7])], control.LEFT_LATELY),
        ([([1, 2], [7]), ([1, 2, 3], [1, 2, 3, 4])], control.LEFT_LATELY),
        ([([1, 2], [7]), ([1, 2, 3, 4, 5], [1, 2, 3, 4, 5, 6])], control.LEFT_BEFORE),
        ([([1, 2], [1, 2, 3]), None], control.BEGUN),
        ([([1], [7]), *[None] * 5], control.LEFT_BEFORE),
        ([([], [5])], control.BEGUN),
        ([([1], [7]), "another"], control.BEGUN),
    ],
)
def test_states(happened, state):
    model = Acceptance(1)
    for one in happened:
        if one is None:
            model.observe_undrafted(HANDLE)
        elif one == "another":
            model.begin(0)
        else:
            see(model, line(*one[0]), one[1])
    assert state_of(model) == state


def test_rates_come_true_follow_the_policy_and_lend_to_those_that_saw_nothing():
    model = Acceptance(1)
    held, number = model.rates, build_draft.class_of(0.8, control.FOLLOWS, 1)
    feed(model, number, 4000, 3600)
    assert held[number] == pytest.approx(0.9, abs=0.02)
    feed(model, number, 4000, 800)
    assert held[number] == pytest.approx(0.2, abs=0.1)
    feed(model, number, 4000, 400)
    assert held[build_draft.class_of(0.8, control.BEGUN, 3)] == pytest.approx(0.1, abs=0.05)
    other = build_draft.class_of(0.6, control.BEGUN, 3)
    assert held[other] == Acceptance(1).rates[other]


@settings(deadline=None)
@given(st.data())
def test_the_walk_counts_what_a_plain_walk_down_the_tree_counts(data):
    size = data.draw(st.integers(1, 10))
    tokens = data.draw(st.lists(st.integers(0, 2), min_size=size, max_size=size))
    parents = [data.draw(st.integers(-1, node - 1)) for node in range(size)]
    generated = data.draw(st.lists(st.integers(0, 2), min_size=1, max_size=6))
    verified = data.draw(st.integers(0, size))
    model = Acceptance(1)
    nodes = list(zip(tokens, parents, strict=True))
    accepted = see(model, nodes, generated, verified=verified, classes=list(range(size)))
    count = 0
    for node in range(size):
        path = [node]
        while parents[path[0]] >= 0:
            path.insert(0, parents[path[0]])
        parent_came = [tokens[i] for i in path[:-1]] == generated[: len(path) - 1]
        is_tried = parent_came and len(path) <= len(generated)
        is_right = is_tried and tokens[node] == generated[len(path) - 1]
        assert model._trials[node].tolist() == [is_tried, is_right]
        count += is_right and node < verified
    assert accepted == count


def test_the_discount_is_what_came_of_what_was_verified_and_is_given_anew():
    model = Acceptance(1)
    first = model.discount
    assert 0.8 < first < 1
    for _ in range(100):
        see(model, line(1, 2, 3, 4), [1, 2, 7], verified=4, probability=1.0)
    assert model.discount == pytest.approx(0.5, abs=0.1)
    for _ in range(500):
        see(model, line(1), [7], verified=0)
    assert model.discount == pytest.approx(first, abs=0.05)
    for _ in range(100):
        see(model, line(1, 2, 3, 4), [1, 2, 3, 4], verified=4, probability=0.8)
    assert model.discount == 1.0


TRUTHS = {
    "line": lambda n, d, o: 2e-3 + 5e-5 * n + 2e-5 * d + 1e-5 * o,
    "rows": lambda n, d, o: 2e-3 + 5e-5 * (n + d + o),
    "steps": lambda n, d, o: 2e-3 + 1e-3 * -(-(n + d + o) // 32),
}


@pytest.mark.parametrize("truth", TRUTHS.values(), ids=TRUTHS)
@pytest.mark.parametrize("seed", [0, 1])
def test_times_within_what_was_seen(truth, seed):
    chance, prices = np.random.default_rng(seed), Prices()
    for _ in range(400):
        n = int(chance.integers(1, 64))
        d, o = int(chance.integers(0, 5)) * n, int(chance.choice([0, 0, 64]))
        held_up = 8 if chance.random() < 0.01 else 1
        seconds = truth(n, d, o) * held_up * (1 + 0.05 * chance.standard_normal())
        prices.observe(n, d, o, 1000, seconds)
    errors = [
        prices.seconds(n, 1000, 4 * n)[d * n] / truth(n, d * n, 0) - 1
        for n in range(4, 64, 7)
        for d in range(5)
    ]
    assert np.abs(errors).mean() < 0.08
    assert np.abs(errors).max() < 0.4


def test_few_iterations_say_what_drafts_cost_and_one_that_was_held_up_little():
    prices = Prices()
    for _ in range(4):
        prices.observe(64, 0, 0, 100, 0.100)
    assert prices.seconds(64, 100, 64)[64] < 0.12
    assert prices.seconds(64, 100, 64, at_worst=True)[64] > 0.13
    for _ in range(4):
        prices.observe(64, 32, 0, 100, 0.150)
    assert prices.seconds(64, 100, 64)[64] == pytest.approx(0.20, rel=0.15)
    for _ in range(20):
        prices.observe(64, 0, 0, 100, 0.100)
    prices.observe(64, 0, 0, 100, 100.0)
    assert prices.seconds(64, 100, 0)[0] == pytest.approx(0.10, rel=0.15)
    for _ in range(60):
        prices.observe(64, 0, 0, 100, 0.150)
    assert prices.seconds(64, 100, 0)[0] == pytest.approx(0.15, rel=0.1), "a slower machine"


def test_a_price_that_was_met_once_when_all_was_slow_is_doubted_and_what_was_met_often_is_not():
    once, often = Prices(), Prices()
    for i in range(60):
        once.observe(4, 0, 0, 0, 0.002)
        often.observe(4, 4 * (i % 3), 0, 0, 0.002 + 0.002 * (i % 3))
    once.observe(4, 4, 0, 0, 0.02)
    dear = float(np.ptp(once.seconds(4, 0, 4)))
    for _ in range(6):
        once.doubt_drafted()
        once.observe(4, 0, 0, 0, 0.002)
    assert np.ptp(once.seconds(4, 0, 4)) < dear / 2
    often.doubt_drafted()
    assert often.seconds(4, 0, 8)[8] == pytest.approx(0.006, rel=0.15)


counts = st.integers(0, 2000)
iterations = st.tuples(
    st.integers(1, 500), counts, counts, st.integers(0, 10_000), st.floats(1e-4, 10.0)
)


@settings(deadline=None)
@given(st.lists(iterations, min_size=1, max_size=60), st.integers(1, 500), st.booleans())
def test_times_are_positive_and_never_fall_with_rows(seen, n, at_worst):
    prices = Prices()
    for iteration in seen:
        prices.observe(*iteration)
    times = prices.seconds(n, 5_000, 6000, at_worst=at_worst)
    assert times[0] >= 0
    assert (np.diff(times) >= 0).all()


def proposals_of(rows):
    width = max(map(len, rows), default=0)
    probability = np.zeros((len(rows), width), np.float32)
    for i, row in enumerate(rows):
        probability[i, : len(row)] = np.cumprod(np.array(row, np.float32))
    empty = np.zeros((len(rows), width), np.int32)
    return Proposals(empty, empty, probability, empty, np.array([len(row) for row in rows]))


def cut(rows, seconds, *, worst=None, max_loss=np.inf, discount=1.0):
    worst = seconds if worst is None else worst
    return best_cut(proposals_of(rows), np.array(seconds), np.array(worst), max_loss, discount)


@settings(max_examples=200, deadline=None)
@given(
    st.lists(st.lists(st.floats(0.05, 0.99), max_size=3), min_size=1, max_size=4),
    st.lists(st.floats(0, 1), min_size=12, max_size=12),
)
def test_the_cut_makes_the_most_tokens_a_second(rows, rises):
    seconds = 1.0 + np.concatenate([[0.0], np.cumsum(rises)])
    proposals, lengths = proposals_of(rows), cut(rows, seconds)

    def rate(chosen):
        tokens = sum(
            float(row[:size].sum(dtype=float))
            for row, size in zip(proposals.path_probability, chosen, strict=True)
        )
        return (len(rows) + tokens) / seconds[sum(chosen)]

    chosen, none = tuple(lengths.tolist()), (0,) * len(rows)
    best = max(map(rate, product(*[range(len(row) + 1) for row in rows])))
    if best > rate(none) * (1 + LEAST_GAIN) * (1 + 1e-9):
        assert rate(chosen) == pytest.approx(best, rel=1e-9)
    elif best < rate(none) * (1 + LEAST_GAIN) * (1 - 1e-9):
        assert chosen == none


@pytest.mark.parametrize(
    ("more", "lengths"),
    [
        ({}, [4]),
        ({"max_loss": 0.21}, [2]),
        ({"max_loss": 0.41, "worst": [1.0, 1.2, 1.4, 1.6, 1.8]}, [2]),
        ({"max_loss": 0.0}, [1]),  # of one sequence nothing could be learned otherwise
        ({"discount": 0.1}, [0]),
    ],
)
def test_no_more_is_drafted_than_may_be_lost(more, lengths):
    found = cut([[0.9, 0.9, 0.9, 0.9]], [1.0, 1.1, 1.2, 1.3, 1.4], **more)
    assert found.tolist() == lengths


def test_aimd_adds_two_up_to_the_most_and_goes_back_to_two():
    """By sequence; one without a draft keeps its window, and a new one begins anew."""
    rule, windows = Aimd(2, 5), []
    for share in (1, 1, 1, 0.5, 1, 0):
        windows.append(int(rule.sizes[0]))
        rule.observe(np.arange(2), rule.sizes * [1, 0], (rule.sizes * [share, 0]).astype(int))
    assert windows == [2, 4, 5, 5, 2, 4]
    assert rule.sizes.tolist() == [2, 2]
    rule.observe(np.arange(2), np.array([2, 0]), np.array([2, 0]))
    assert rule.sizes.tolist() == [4, 2]
    rule.begin(0)
    assert rule.sizes.tolist() == [2, 2]


PLAIN = 0.010


def play(budget, iterations, *, saved, search=0.0005, n=8):
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
def test_trying_in_vain_costs_less_than_a_hundredth(search, refused):
    loss = search + refused * PLAIN
    searched = play(Budget(), 10_000, saved=-loss, search=search)
    beginning = 8 * (3 * search + 0.2 * PLAIN + loss)
    assert len(searched) * loss < 0.01 * 10_000 * PLAIN + beginning


def test_a_batch_that_fell_by_half_is_a_reason_to_try_at_once_and_only_once():
    budget = Budget()
    play(budget, 5000, saved=-0.0005)
    while budget.allows_search(8):
        play(budget, 1, saved=-0.0005)
    assert not budget.allows_search(5)
    assert budget.allows_search(4)
    play(budget, 20, saved=-0.0005, n=4)
    assert len(play(budget, 100, saved=-0.0005, n=4)) < 60


def test_no_more_is_risked_than_an_initial_budget_and_what_was_saved():
    budget, held_up = Budget(), Budget()
    assert budget.max_loss(PLAIN) == pytest.approx(0.2 * PLAIN)
    budget.searched(8, search=0.0, saved=0.002, plain=PLAIN)
    assert budget.max_loss(PLAIN) == pytest.approx(0.2 * PLAIN + 0.002)
    held_up.searched(8, search=0.5, saved=-0.5, plain=PLAIN)  # the first, which loads code
    assert held_up.max_loss(PLAIN) < 0.7 * PLAIN
    assert play(held_up, 100, saved=0.002)[0] < 5
