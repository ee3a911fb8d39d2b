"""Trust: the states of sequences, and what is learned of each."""

from __future__ import annotations

import numpy as np
import pytest

from rhymeflow.histospec.expand import Proposals
from rhymeflow.histospec.trust import Trust

SIZE = 4


def proposals(tokens: list[list[int]], chance: float = 0.9) -> Proposals:
    """Paths of `SIZE` tokens at most, each token with the same chance."""
    n = len(tokens)
    table = np.full((n, SIZE), -1, np.int32)
    for i, row in enumerate(tokens):
        table[i, : len(row)] = row
    return Proposals(
        table,
        np.tile(np.arange(-1, SIZE - 1, dtype=np.int32), (n, 1)),
        np.tile(np.cumprod(np.full(SIZE, chance)), (n, 1)).astype(np.float32),
        np.zeros((n, SIZE), np.int32),
        np.array([len(row) for row in tokens], np.int64),
    )


def see(trust: Trust, handle: int, drafted: list[int], made: list[int]) -> None:
    trust.observe(
        proposals([drafted]), np.array([0]), np.array([handle]),
        np.array(made, np.int32), np.array([0, len(made)]),
    )  # fmt: skip


def reach(trust: Trust, handle: int, chance: float = 0.9) -> np.ndarray:
    return trust.temper(proposals([[1, 2, 3, 4]], chance), np.array([handle]))[0]


def test_a_sequence_that_has_just_begun_is_believed() -> None:
    trust = Trust(2)
    trust.begin(0)
    assert reach(trust, 0) == pytest.approx(np.cumprod([0.9] * 4), rel=1e-5)


def test_one_that_left_a_proposal_is_believed_less_until_it_begins_anew() -> None:
    trust = Trust(2)
    trust.begin(0)
    trust.begin(1)
    see(trust, 0, [1, 2, 3], [1, 7])
    see(trust, 1, [1, 2, 3], [1, 2, 3, 4])
    assert reach(trust, 0)[0] < 0.8
    assert reach(trust, 1)[0] > 0.83
    trust.begin(0)
    assert reach(trust, 0)[0] > 0.83


def test_one_that_went_on_without_proposals_is_believed_less() -> None:
    trust = Trust(1)
    trust.begin(0)
    trust.rested(np.array([0]))
    assert reach(trust, 0)[0] < 0.8


def test_what_comes_true_is_learned_by_state() -> None:
    trust = Trust(2)
    for _ in range(100):
        trust.begin(0)
        see(trust, 0, [1, 2, 3], [7])  # leaves at once
        see(trust, 0, [1, 2, 3], [1, 2, 3, 4])  # but follows from there
        trust.begin(1)
        see(trust, 1, [1, 2, 3], [1, 2, 3, 4])
    trust.begin(1)
    assert reach(trust, 1)[0] == pytest.approx(0.9 * (300 / (400 * 0.9)), abs=0.05)
    see(trust, 1, [1], [7])
    assert reach(trust, 1)[0] > 0.95


def test_reach_never_rises_along_a_path() -> None:
    trust = Trust(1)
    chance = np.random.default_rng(0)
    for _ in range(200):
        trust.begin(0)
        for _ in range(3):
            see(trust, 0, [1, 2, 3, 4], [1, 2, 3, 4, 5][: chance.integers(1, 6)])
        for likely in (0.05, 0.5, 0.999):
            found = reach(trust, 0, likely)
            assert (found <= 1).all()
            assert (np.diff(found) <= 0).all()


def test_credit_is_what_came_of_what_was_verified_and_is_given_anew() -> None:
    trust = Trust(1)
    first = trust.credit
    assert 0.8 < first < 1
    for _ in range(10):
        trust.verified(20.0, 10)
    assert trust.credit == pytest.approx(0.5, abs=0.05)
    for _ in range(500):
        trust.verified(0.0, 0)
    assert trust.credit == pytest.approx(first, abs=0.05)
    for _ in range(100):
        trust.verified(10.0, 11)
    assert trust.credit == 1.0
