"""Acceptance: what counts as a trial, the states of sequences, and that the estimates come true."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from rhymeflow.histospec import acceptance
from rhymeflow.histospec.acceptance import Acceptance
from rhymeflow.histospec.build_draft import Proposals

SHARE = 6
"""Of the votes, in eighths: what most tokens here have."""


def line(*tokens: int) -> list[tuple[int, int]]:
    """A linear proposal: (token, parent)."""
    return [(token, node - 1) for node, token in enumerate(tokens)]


def see(
    model: Acceptance,
    handle: int,
    nodes: list[tuple[int, int]],
    generated: list[int],
    *,
    verified: int = 0,
    numbers: list[int] | None = None,
    probability: float = 0.9,
) -> int:
    """One sequence's proposal and what it got; return how many verified tokens were accepted."""
    state = int(model.states(np.array([handle]))[0])
    numbers = numbers or [acceptance.bucket(SHARE / 8, state, 1, 4)] * len(nodes)
    proposals = Proposals(
        np.array([[token for token, _ in nodes]], np.int32),
        np.array([[parent for _, parent in nodes]], np.int32),
        np.full((1, len(nodes)), probability, np.float32),
        np.array([numbers], np.int32),
        np.array([len(nodes)]),
    )
    (accepted,) = model.observe(
        proposals, np.array([verified]), np.array([0]), np.array([handle]),
        np.array(generated, np.int32), np.array([0, len(generated)]),
    )  # fmt: skip
    return int(accepted)


def state_of(model: Acceptance, handle: int) -> int:
    return int(model.states(np.array([handle]))[0])


def rates(model: Acceptance) -> np.ndarray:
    return model.rates.reshape(acceptance.SHAPE)


def trials(model: Acceptance) -> np.ndarray:
    """Trials and acceptances by bucket, int [NUM_BUCKETS, 2]."""
    return model._trials[-1]


def feed(model: Acceptance, number: int, tried: int, accepted: int) -> None:
    """Trials of one bucket, those that are accepted evenly among them."""
    for i in range(tried):
        is_right = (i + 1) * accepted // tried > i * accepted // tried
        see(model, 0, line(1), [1 if is_right else 2], numbers=[number])


def test_rates_begin_with_the_share_of_the_votes_and_less_for_those_that_left() -> None:
    found = rates(Acceptance(1))
    assert found[:, acceptance.BEGUN, 0, 0] == pytest.approx((np.arange(8) + 0.5) / 8)
    lower = found[SHARE] / found[SHARE, acceptance.BEGUN]
    assert lower[:, 0, 0] == pytest.approx([1.0, 1.0, 0.8, 0.7, 0.8])
    assert (found == found[:, :, :1, :1]).all()


def test_a_sequence_that_leaves_its_proposals_is_in_another_state() -> None:
    model = Acceptance(2)
    assert state_of(model, 0) == acceptance.BEGUN
    see(model, 0, line(1, 2, 3), [1, 2, 3, 4])
    assert state_of(model, 0) == acceptance.FOLLOWS
    see(model, 0, line(1, 2, 3), [1, 7])
    assert state_of(model, 0) == acceptance.LEFT_LATELY
    see(model, 0, line(1, 2, 3), [1, 2, 3, 4])
    assert state_of(model, 0) == acceptance.LEFT_LATELY
    see(model, 0, line(1, 2, 3), [1, 2, 3, 4])
    assert state_of(model, 0) == acceptance.LEFT_BEFORE
    assert state_of(model, 1) == acceptance.BEGUN
    model.begin(0)
    assert state_of(model, 0) == acceptance.BEGUN


def test_one_that_went_on_without_proposals_is_unknown_until_it_leaves_one() -> None:
    model = Acceptance(1)
    model.went_on(np.array([0]))
    assert state_of(model, 0) == acceptance.UNKNOWN
    see(model, 0, line(1, 2), [1, 2, 3])
    assert state_of(model, 0) == acceptance.UNKNOWN
    see(model, 0, line(1), [7])
    assert state_of(model, 0) == acceptance.LEFT_LATELY
    for _ in range(5):
        model.went_on(np.array([0]))
    assert state_of(model, 0) == acceptance.LEFT_BEFORE


def test_a_proposal_of_nothing_is_no_proposal() -> None:
    model = Acceptance(1)
    proposals = Proposals(
        np.zeros((1, 2), np.int32), np.zeros((1, 2), np.int32), np.zeros((1, 2), np.float32),
        np.zeros((1, 2), np.int32), np.array([0]),
    )  # fmt: skip
    nothing = np.array([0])
    model.observe(proposals, nothing, nothing, nothing, np.array([5], np.int32), np.array([0, 1]))
    assert state_of(model, 0) == acceptance.UNKNOWN
    assert not trials(model).any()


def test_what_comes_true_is_learned_by_state() -> None:
    model = Acceptance(1)
    for _ in range(100):
        model.begin(0)
        see(model, 0, line(1, 2, 3), [7])  # leaves at once
        see(model, 0, line(1, 2, 3), [1, 2, 3, 4])  # but follows from there
    found = rates(model)[SHARE, :, 1, acceptance.LENGTH_CLASSES[4]]
    assert found[acceptance.BEGUN] < 0.1
    assert found[acceptance.LEFT_LATELY] > 0.95


def test_a_bucket_without_trials_takes_after_its_groups_the_nearest_most() -> None:
    model = Acceptance(1)
    feed(model, acceptance.bucket(SHARE / 8, acceptance.FOLLOWS, 1, 4), 1000, 100)
    found = rates(model)
    same_kind = found[SHARE, acceptance.FOLLOWS, 1, 0]
    same_state = found[SHARE, acceptance.FOLLOWS, 2, 0]
    same_share = found[SHARE, acceptance.BEGUN, 2, 0]
    assert [same_kind, same_state, same_share] == pytest.approx([0.1] * 3, abs=0.02)
    assert same_kind <= same_state <= same_share
    assert found[SHARE - 1] == pytest.approx(rates(Acceptance(1))[SHARE - 1])


def test_what_was_tried_in_a_bucket_outweighs_its_groups() -> None:
    model = Acceptance(1)
    one, other = (acceptance.bucket(0.8, acceptance.FOLLOWS, 1, length) for length in (4, 32))
    feed(model, one, 1900, 1900)
    feed(model, other, 200, 20)
    assert model.rates[other] == pytest.approx(0.1, abs=0.04)


def test_estimates_follow_a_change_of_policy() -> None:
    model = Acceptance(1)
    number = acceptance.bucket(0.8, acceptance.FOLLOWS, 1, 4)
    feed(model, number, 6000, 5400)
    assert model.rates[number] == pytest.approx(0.9, abs=0.02)
    feed(model, number, 6000, 1200)
    assert model.rates[number] == pytest.approx(0.2, abs=0.1)


def test_rates_are_changed_in_place() -> None:
    model = Acceptance(1)
    held, number = model.rates, acceptance.bucket(0.8, acceptance.FOLLOWS, 1, 4)
    feed(model, number, 20, 0)
    assert held[number] < 0.4


def test_a_chain_counts_up_to_its_first_mistake() -> None:
    model = Acceptance(1)
    accepted = see(model, 0, line(5, 6, 7, 8), [5, 6, 9], verified=4, numbers=[0, 1, 2, 3])
    assert trials(model)[:4].tolist() == [[1, 1], [1, 1], [1, 0], [0, 0]]
    assert accepted == 2


def test_what_was_not_verified_counts_as_far_as_the_response_went() -> None:
    model = Acceptance(1)
    accepted = see(model, 0, line(5, 6, 7), [5, 6], verified=1, numbers=[0, 1, 2])
    assert trials(model)[:3].tolist() == [[1, 1], [1, 1], [0, 0]]
    assert accepted == 1
    assert state_of(model, 0) == acceptance.FOLLOWS


@settings(deadline=None)
@given(st.data())
def test_the_walk_counts_what_a_plain_walk_down_the_tree_counts(data: st.DataObject) -> None:
    size = data.draw(st.integers(1, 10))
    tokens = data.draw(st.lists(st.integers(0, 2), min_size=size, max_size=size))
    parents = [data.draw(st.integers(-1, node - 1)) for node in range(size)]
    generated = data.draw(st.lists(st.integers(0, 2), min_size=1, max_size=6))
    verified = data.draw(st.integers(0, size))
    model = Acceptance(1)
    nodes, numbers = list(zip(tokens, parents, strict=True)), list(range(size))
    accepted = see(model, 0, nodes, generated, verified=verified, numbers=numbers)
    count = 0
    for node in range(size):
        path = [node]
        while parents[path[0]] >= 0:
            path.insert(0, parents[path[0]])
        parent_came = [tokens[i] for i in path[:-1]] == generated[: len(path) - 1]
        is_tried = parent_came and len(path) <= len(generated)
        is_right = is_tried and tokens[node] == generated[len(path) - 1]
        assert trials(model)[node].tolist() == [is_tried, is_right]
        count += is_right and node < verified
    assert accepted == count


def test_the_discount_is_what_came_of_what_was_verified_and_is_given_anew() -> None:
    model = Acceptance(1)
    first = model.discount
    assert 0.8 < first < 1
    for _ in range(100):
        see(model, 0, line(1, 2, 3, 4), [1, 2, 7], verified=4, probability=1.0)
    assert model.discount == pytest.approx(0.5, abs=0.1)
    for _ in range(500):
        see(model, 0, line(1), [7], verified=0)
    assert model.discount == pytest.approx(first, abs=0.05)
    for _ in range(100):
        see(model, 0, line(1, 2, 3, 4), [1, 2, 3, 4], verified=4, probability=0.8)
    assert model.discount == 1.0
