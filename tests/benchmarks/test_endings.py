"""The test of lengths finds what skipping long responses does, and nothing where nothing is."""

from __future__ import annotations

import numpy as np
import pytest

from benchmarks import endings, endings_fake


def runs(count: int, seed: int, *, skipped: float = 0.0) -> list[np.ndarray]:
    """Lengths of runs, each with a mean of its own; of those above 60, a share is left out."""
    rng = np.random.default_rng(seed)
    found = []
    for _ in range(count):
        lengths = rng.geometric(1 / rng.normal(50, 2), size=4000)
        found.append(lengths[(lengths < 60) | (rng.random(4000) >= skipped)])
    return found


def p_value(straight: list[np.ndarray], killed: list[np.ndarray]) -> float:
    bounds = endings.quantile_bounds([*straight, *killed])
    counts = np.array([endings.histogram(each, bounds) for each in [*straight, *killed]])
    chosen = np.array([False] * len(straight) + [True] * len(killed))
    return endings.permutation_p_value(counts, chosen)


def test_long_responses_that_are_skipped_are_noticed():
    assert p_value(runs(5, 0), runs(5, 1, skipped=0.3)) == 2 / 252, "this choice and its opposite"


def test_p_values_are_as_small_as_they_should_be_by_chance():
    found = [p_value(runs(4, 2 * seed), runs(4, 2 * seed + 1)) for seed in range(60)]
    assert np.mean(np.array(found) <= 0.2) < 0.35
    assert np.mean(found) == pytest.approx(0.5, abs=0.15)


def test_quantiles_hold_as_many_each():
    lengths = [np.arange(1, 101)]
    bounds = endings.quantile_bounds(lengths)
    assert list(bounds) == [21, 41, 61, 81]
    assert list(endings.histogram(lengths[0], bounds)) == [20] * 5
    assert list(endings.quantile_bounds([np.ones(50, int)])) == [1], "all equal: one bound"


def test_in_pairs_of_runs_the_same_is_noticed_with_fewer_responses():
    rng = np.random.default_rng(0)

    def pairs(skipped: float) -> float:
        before, after = [], []
        for _ in range(60):
            lengths = rng.geometric(1 / 6, size=50)
            kept = (lengths < 9) | (rng.random(50) >= skipped)
            before.append(endings.histogram(rng.permutation(lengths)[:45], endings_fake.BOUNDS))
            after.append(endings.histogram(lengths[kept][:45], endings_fake.BOUNDS))
        return endings_fake.swap_p_value(np.array(before), np.array(after))

    assert pairs(skipped=0.3) < 0.01
    assert np.mean([pairs(skipped=0.0) for _ in range(20)]) == pytest.approx(0.5, abs=0.25)
    same = np.full((10, 5), 3)
    assert endings_fake.swap_p_value(same, same) == 1.0
