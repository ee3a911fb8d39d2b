"""The benchmarks of simulated clusters: the search for a split, what is compared with what."""

from __future__ import annotations

import itertools
import random
from types import SimpleNamespace

import pytest

from benchmarks import faults_simulated as faults
from benchmarks import histopipe, schedules, staleflow
from benchmarks.simulated import schedules as simulated_schedules
from benchmarks.simulated import splits
from benchmarks.simulated.schedules import cells
from rhymeflow.errors import UserError
from rhymeflow.sim.faults import HOUR
from rhymeflow.sim.simulate import run as simulate
from rhymeflow.sim.workload import workload
from tests.benchmarks.test_real_runs import arguments

TINY = {
    "schedule.name": "staleflow",
    "schedule.cost_model": "qwen2.5-32b-h20",
    "learner.groups_per_batch": "4",
    "rollout.num_generations": "4",
    "rollout.max_completion_length": "512",
    "simulation.workload.mean_length": "128",
    "learner.max_steps": "6",
}


@pytest.mark.parametrize("at", [2, 12, 24, 26, 38, 62])
def test_the_peak_is_found_in_ever_finer_steps(at):
    tried = []

    def measured(rollout):
        tried.append(rollout)
        return {"tokens/s": 1000.0 - abs(rollout - at)}

    one = splits.case(64, {"schedule.cost_model": "qwen2.5-14b-h20"}, parts=(16, 32))
    found = splits.uphill(measured, one)
    assert found["tokens/s"] == 1000
    assert len(set(tried)) == len(tried), "no split is measured twice"
    assert len(tried) <= 6 + abs(at - 24) // 4


def test_equal_cases_are_run_once_and_figures_are_the_simulations():
    one = splits.case(8, TINY, uncounted=2)
    again = splits.case(8, dict(reversed(TINY.items())), uncounted=2)
    found = splits.best({"a": one, "b": again}, jobs=1)
    assert found["a"] is found["b"]
    rollout = found["a"]["rollout devices"]
    config = splits.configure(one, rollout)
    result = simulate(config, workload(config, None), uncounted=2)
    assert found["a"]["tokens/s"] == result.throughput
    assert found["a"]["idle in rollout"] == pytest.approx(result.idle_rollout)
    idle = rollout * result.idle_rollout + (8 - rollout) * result.idle_learner
    assert found["a"]["idle devices"] == pytest.approx(idle / 8)


def test_all_that_may_be_asked_for_can_be_configured():
    """Also where a schedule is told a bound, or how many steps are not counted."""
    seen = {}
    of_schedules, stages = (
        map(simulated_schedules.case, cells()),
        map(histopipe.case, histopipe.cells()),
    )
    for one in itertools.chain(of_schedules, stages):
        told = dict(one.settings)
        key = (told["schedule.name"], told.get("schedule.max_staleness"), told["drafting.window"])
        seen.setdefault(key, one)
    assert len(seen) > 20
    for one in seen.values():
        config = splits.configure(one, None if one.colocated else 2)
        assert config.simulation.colocated == one.colocated
        assert config.learner.max_steps - one.uncounted > config.simulation.skip_steps
        groups = config.learner.groups_per_batch
        assert config.simulation.workload.num_prompts == 4 * groups
        assert config.simulation.skip_steps >= 4, "the first epoch has no history"


@pytest.mark.parametrize(
    ("module", "options", "expected"),
    [
        (
            staleflow,
            ["--only", "model=14b", "--only", "devices=64"],
            {"synchronous": (2.5, False), "best of one_step and bounded, mean": (0.8333, False)},
        ),
        (
            schedules,
            ["--simulated"],
            {"synchronous without drafts, greatest": (4.5, True),
             "best of staleflow and histopipe, mean": (1.2, True)},
        ),
        (histopipe, [], {"14b, 16K, 128 devices": (3.0, True)}),
    ],
)  # fmt: skip
def test_tables_compare_with_the_stronger_baseline(monkeypatch, module, options, expected):
    """Every case has figures of its own, without a simulation; the rate is by the settings."""
    rates = {"synchronous": 100.0, "staleflow": 250.0, "histopipe": 200.0}

    def figures(one):
        told = dict(one.settings)
        drafts = 1.0 if told["drafting.window"] == "off" else 1.5
        rate = rates.get(told["schedule.name"], 300.0) * drafts
        return {"tokens/s": rate, "interrupted": 0.04}

    monkeypatch.setattr(
        splits, "best", lambda cases, jobs: {key: figures(one) for key, one in cases.items()}
    )
    targets = module.run(arguments(module, *options))["targets"]
    for name, found in expected.items():
        assert found in [(t["value"], t["met"]) for t in targets if name in t["name"]], name


def test_rows_can_be_asked_for():
    only = ["model=14b", "devices=64", "schedule=partial", "schedule=bounded", "bound=2"]
    found = splits.chosen(cells(), only)
    assert [(c[:2], c.schedule, c.bound) for c in found] == [
        (("14b", 64), name, 2) for name in ("bounded", "partial")
    ]
    assert splits.chosen(cells(), []) == cells()
    for wrong in ("model=15b", "modle=14b", "14b"):
        with pytest.raises(UserError, match=f"--only {wrong}: the table has no such row"):
            splits.chosen(cells(), [wrong])


# -- failures --------------------------------------------------------------------------------------


def test_a_job_that_restarts_does_its_steps_again():
    """As often as a simulated one."""
    cell, quiet = faults.Cell(1024, "synchronous", 0), SimpleNamespace(steps_per_second=1 / 254)
    rng, lost, done = random.Random(0), 0.0, 4000
    for _ in range(done):
        away = 0.0
        while (alive := rng.expovariate(100 * 1024 / (faults.MTBF_HOURS * HOUR))) < away + 254:
            lost, away = lost + alive, 190.0
        lost += away
    expected = 254 * done / (254 * done + lost)
    found = faults.restarting(cell, quiet, 1)
    assert found["100x"] == pytest.approx(expected, rel=0.01)
    assert found["100x"] < found["10x"] < found["1x"] < 1
