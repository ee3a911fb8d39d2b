"""Training with either engine: which runs are made, and what is said of them."""

import argparse

import pytest

from benchmarks import harness
from benchmarks.training import engines
from benchmarks.training.engines import Trained


def trained(engine, seed, after, steps=10):
    return Trained(engine, seed, steps, "float32", 0.1, after, 0.001, 60.0)


@pytest.fixture
def made(monkeypatch, tmp_path):
    """What was trained, in order; results go to a folder of their own."""
    calls = []

    def train(engine, seed, steps, python):
        calls.append((engine, seed))
        return trained(engine, seed, 0.4 + seed / 100, steps)

    monkeypatch.setattr(engines, "_train", train)
    monkeypatch.setattr(harness, "RESULTS", tmp_path)
    return calls


def options(**changes):
    given = {"seeds": 2, "steps": 10, "new_runs": 100, "record": True, "vllm_python": "python"}
    return argparse.Namespace(**given | changes)


def test_a_run_that_is_recorded_is_not_made_again(made):
    engines.training(options(new_runs=3))
    assert made == [("native", 0), ("vllm", 0), ("native", 1)]
    rows, targets = engines.training(options())
    assert made[3:] == [("vllm", 1)]
    assert [(row["engine"], row["runs"]) for row in rows] == [("native", 2), ("vllm", 2)]
    assert [target.met for target in targets] == [True]


def test_runs_of_other_lengths_do_not_count(made):
    engines.training(options(seeds=1))
    engines.training(options(seeds=1, steps=20))
    assert len(made) == 4


def test_nothing_is_kept_that_is_not_to_be_recorded(made):
    for _ in range(2):
        engines.training(options(seeds=1, record=False))
    assert len(made) == 4


def test_means_that_are_further_apart_than_seeds_miss_the_target():
    runs = [trained("native", seed, 0.40 + seed / 100) for seed in range(3)]
    (near,) = engines._targets([*runs, *(trained("vllm", s, 0.41 + s / 100) for s in range(3))])
    (far,) = engines._targets([*runs, *(trained("vllm", s, 0.45 + s / 100) for s in range(3))])
    assert near.met
    assert near.value == pytest.approx(0.5)
    assert not far.met
    assert engines._targets(runs) == []
