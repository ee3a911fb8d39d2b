"""Chances of acceptance: what counts as a trial, and that the estimates come true."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from rhymeflow.histospec.chances import Chances, walk

CELLS = 16
GROUPS = np.stack([np.arange(CELLS) // 8, np.arange(CELLS) // 4, np.arange(CELLS)])


def fresh(prior: float = 0.5) -> Chances:
    return Chances(GROUPS, np.full(CELLS, prior))


def trials(cell: int, tried: int, accepted: int) -> tuple[np.ndarray, np.ndarray]:
    """Counts for `observe` with one cell's."""
    counts = np.zeros((2, CELLS), np.int64)
    counts[:, cell] = tried, accepted
    return counts[0], counts[1]


def feed(chances: Chances, truth: np.ndarray, seed: int, rounds: int = 400) -> None:
    """Trials of all cells, 5 a round on average, accepted by `truth`."""
    chance = np.random.default_rng(seed)
    for _ in range(rounds):
        tried = chance.poisson(5, CELLS)
        chances.observe(tried, chance.binomial(tried, truth))


@settings(max_examples=25, deadline=None)
@given(st.lists(st.floats(0, 1), min_size=CELLS, max_size=CELLS), st.integers(0, 99))
def test_estimates_converge(truth: list[float], seed: int) -> None:
    chances = fresh()
    feed(chances, np.array(truth), seed)
    # 2,000 trials a cell: five standard errors, and what the prior still weighs.
    assert np.abs(chances.values - truth).max() < 5 * 0.5 / np.sqrt(2000) + 8 / 2000


def test_the_error_of_calibration_is_small_once_learned_and_large_before() -> None:
    truth = np.linspace(0.05, 0.6, CELLS)
    chances = fresh(0.95)
    feed(chances, truth, seed=0, rounds=1)
    assert chances.calibration_error > 0.3
    feed(chances, truth, seed=1, rounds=3000)
    assert chances.calibration_error < 0.02


def test_estimates_follow_a_change_of_policy() -> None:
    chances = fresh()
    feed(chances, np.full(CELLS, 0.9), seed=0, rounds=3000)
    feed(chances, np.full(CELLS, 0.2), seed=1, rounds=1600)
    assert np.abs(chances.values - 0.2).max() < 0.1


def test_a_cell_without_trials_takes_after_its_group() -> None:
    chances = fresh(0.5)
    chances.observe(*trials(0, 1000, 900))
    others = chances.values[[1, 5, 12]]
    # Of the same small group, of the same large one, of another: 0.9 diluted by the prior.
    assert others[0] == pytest.approx(0.9, abs=0.01)
    assert others[1] == pytest.approx(0.9, abs=0.01)
    assert others[2] == 0.5


def test_what_was_tried_in_a_cell_outweighs_its_group() -> None:
    chances = fresh(0.5)
    chances.observe(*trials(0, 2000, 2000))
    chances.observe(*trials(1, 200, 20))
    assert chances.values[1] == pytest.approx(0.1, abs=0.04)


def test_values_are_changed_in_place() -> None:
    chances = fresh()
    held = chances.values
    chances.observe(*trials(3, 10, 10))
    assert held[3] > 0.7


class Seen:
    """`walk` over one sequence, cells numbered as the nodes."""

    def __init__(self, tokens: list[int], parents: list[int], made: list[int], verified: int):
        self.tried = np.zeros(len(tokens), np.int64)
        self.accepted = np.zeros(len(tokens), np.int64)
        taken = walk(
            np.array([tokens], np.int32),
            np.array([parents], np.int32),
            np.arange(len(tokens), dtype=np.int32)[None],
            np.array([len(tokens)]),
            np.array([0]),
            np.array(made, np.int32),
            np.array([0, len(made)]),
            np.array([verified]),
            self.tried,
            self.accepted,
        )
        self.taken = int(taken[0])


def test_a_chain_counts_up_to_its_first_mistake() -> None:
    seen = Seen([5, 6, 7, 8], [-1, 0, 1, 2], made=[5, 6, 9], verified=4)
    assert seen.tried.tolist() == [1, 1, 1, 0]
    assert seen.accepted.tolist() == [1, 1, 0, 0]
    assert seen.taken == 2


def test_what_was_not_verified_counts_as_far_as_the_response_went() -> None:
    seen = Seen([5, 6, 7], [-1, 0, 1], made=[5, 6], verified=1)
    assert seen.tried.tolist() == [1, 1, 0]
    assert seen.accepted.tolist() == [1, 1, 0]
    assert seen.taken == 1


def test_a_response_that_ended_leaves_the_rest_untried() -> None:
    seen = Seen([5, 2, 7], [-1, 0, 1], made=[5, 2], verified=3)
    assert seen.tried.tolist() == [1, 1, 0]
    assert seen.taken == 2


def test_of_a_tree_all_children_of_what_came_true_count() -> None:
    #      4 - 6
    #     /
    #  root - 5 - 7 - 9
    #          \ 8 - 9
    seen = Seen([4, 5, 6, 7, 8, 9, 9], [-1, -1, 0, 1, 1, 3, 4], made=[5, 8, 9, 3], verified=7)
    assert seen.tried.tolist() == [1, 1, 0, 1, 1, 0, 1]
    assert seen.accepted.tolist() == [0, 1, 0, 0, 1, 0, 1]
    assert seen.taken == 3


@given(st.data())
def test_a_walk_counts_what_a_plain_walk_down_the_tree_counts(data: st.DataObject) -> None:
    size = data.draw(st.integers(1, 10))
    tokens = data.draw(st.lists(st.integers(0, 2), min_size=size, max_size=size))
    parents = [data.draw(st.integers(-1, node - 1)) for node in range(size)]
    made = data.draw(st.lists(st.integers(0, 2), min_size=1, max_size=6))
    seen = Seen(tokens, parents, made, verified=size)
    for node in range(size):
        path = [node]
        while parents[path[0]] >= 0:
            path.insert(0, parents[path[0]])
        came_true = [tokens[i] for i in path[:-1]] == made[: len(path) - 1]
        tried = came_true and len(path) <= len(made)
        assert seen.tried[node] == tried
        assert seen.accepted[node] == (tried and tokens[node] == made[len(path) - 1])
