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
from benchmarks.simulated.schedules import Cell, cells
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


@pytest.fixture
def simulated(monkeypatch):
    """Every case has figures of its own, without a simulation; the rate is by the settings."""

    def figures(one):
        told = dict(one.settings)
        name = told["schedule.name"]
        rate = {"synchronous": 100.0, "staleflow": 250.0, "histopipe": 200.0}.get(name, 300.0)
        if told["drafting.window"] != "off":
            rate *= 1.5
        return {"tokens/s": rate, "steps/s": 0.1, "push": 1.0, "interrupted": 0.04}

    monkeypatch.setattr(
        splits, "best", lambda cases, jobs: {key: figures(one) for key, one in cases.items()}
    )


def peak(one, at, tried, idle_learner=0.9, idle_rollout=0.1):
    """The search where the rate falls away from `at`; and the splits it tried."""

    def measured(rollout):
        tried.append(rollout)
        return {
            "tokens/s": 1000.0 - abs(rollout - at),
            "steps/s": 0.01,
            "push": 0.0,
            "idle learner": idle_learner if rollout <= at else idle_rollout,
            "idle rollout": idle_rollout if rollout <= at else idle_learner,
        }

    return splits.uphill(measured, one), tried


@pytest.mark.parametrize("at", [2, 12, 24, 26, 38, 62])
def test_the_peak_is_found_in_ever_finer_steps(at):
    one = splits.case(64, {"schedule.cost_model": "qwen2.5-14b-h20"}, parts=(16, 32))
    found, tried = peak(one, at, [])
    assert found["tokens/s"] == 1000
    assert len(set(tried)) == len(tried), "no split is measured twice"
    assert len(tried) <= 6 + abs(at - 24) // 4


def test_the_learners_limit_is_what_it_reaches():
    """Busy 60 of 100 s, 10 of them for a push: a never idle one on half the devices takes 110 s."""
    figures = {"tokens/s": 5.0, "steps/s": 0.01, "idle learner": 0.4, "push": 10.0}
    assert splits.learner_limit(figures, 8, 4) == pytest.approx(500 / 110)


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


def test_staleflow_is_compared_with_the_stronger_baseline_at_its_own_bound(simulated):
    result = staleflow.run(arguments(staleflow, "--only", "model=14b", "--only", "devices=64"))
    assert len(result["rows"]) == 2 * (2 + 3 * 3)
    ours = [r for r in result["rows"] if r["schedule"] == "staleflow"]
    assert len({(r["bound"], r["prompt"]) for r in ours}) == len(ours) == 6
    assert {r["over synchronous"] for r in ours} == {2.5}
    assert {r["over bounded"] for r in ours} == {0.8333}
    values = {t["name"]: (t["value"], t["met"]) for t in result["targets"]}
    assert values["staleflow/synchronous"] == (2.5, False)
    assert values["staleflow/best of one_step and bounded, mean"] == (0.8333, False)
    base = staleflow.Cell("staleflow", "14b", 64, 2048, 0).baselines()["bounded"]
    assert base.bound == 1, "an asynchronous baseline is never at a bound of 0"


def test_histopipe_reports_each_stage_and_the_published_place_is_the_target(simulated):
    result = histopipe.run(arguments(histopipe))
    assert len(result["rows"]) == len(histopipe.STAGES) * 3 * 2 * 3
    there = [r for r in result["rows"] if (r["model"], r["devices"]) == ("14b", 128)]
    stages = {r["stage"]: r["over synchronous"] for r in there}
    assert list(stages.values()) == [1.0, 1.5, 2.0, 3.0]
    assert [t["met"] for t in result["targets"]] == [True] * 4
    assert "14b, 16K, 128 devices" in result["targets"][0]["name"]
    assert result["targets"][-1]["value"] == pytest.approx(0.04)


def test_the_subset_compares_with_the_better_of_both_at_the_same_bound(simulated):
    result = schedules.run(arguments(schedules, "--simulated"))
    assert result["name"] == "schedules-simulated"
    rows = [r for r in result["rows"] if r["schedule"] == "rhymeflow"]
    assert {r["bound"] for r in rows} == {0, 1, 2, 3}
    assert all(("over histopipe" in r) == (r["bound"] > 0) for r in rows)
    assert {r["over staleflow"] for r in rows} == {1.2}
    assert {r["over synchronous"] for r in rows if r["drafts"]} == {4.5}
    assert {r["over synchronous, drafts"] for r in rows if r["drafts"]} == {3.0}
    values = {t["name"]: (t["value"], t["met"]) for t in result["targets"]}
    assert values["rhymeflow/synchronous without drafts, greatest"] == (4.5, True)
    assert values["rhymeflow/best of staleflow and histopipe, mean"] == (1.2, True)
    assert values["rhymeflow/either, least of all cells"] == (1.2, True)
    assert "1.200 to 1.200" in result["notes"]
    there = [Cell(*(r[name] for name in Cell._fields)) for r in result["rows"]]
    assert len(set(there)) == len(there), "a baseline that is shown anyway has one row"


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


def test_ratios_follow_from_what_a_death_costs(monkeypatch):
    """An instance's costs 1 s, any other 100 s; ten in a run."""

    def one(cell, dying):
        victims = [] if dying is None else [f.victim for f in itertools.islice(dying, 10)]
        lost = sum(1.0 if isinstance(victim, int) else 100.0 for victim in victims)
        seconds = 100.0 * faults.STEPS + lost
        return SimpleNamespace(
            seconds=seconds, steps_per_second=0.01, throughput=1000.0 / seconds,
            deaths={"any": len(victims)} if victims else {},
        )  # fmt: skip

    monkeypatch.setattr(faults, "one", one)
    report = faults.run(arguments(faults, "--devices", "64", "--devices", "128"))
    rows = {(r["devices"], r["bound"], r["recovery"]): r for r in report["rows"]}
    ours = rows[64, 3, "resume"]
    assert (ours["s lost/instance"], ours["s lost/learner"]) == (1, 100)
    assert (ours["deaths/instance"], ours["deaths/learner"]) == (30, 30)
    lost = (16 * 1 + 48 * 100) / (faults.MTBF_HOURS * HOUR)
    assert ours["100x"] == round(1 / (1 + 100 * lost), 4)
    assert rows[64, 0, "resume"]["100x"] < ours["100x"] < ours["10x"] < ours["1x"] <= 1
    assert faults.SIMULATED in rows[128, 3, "resume"]
    assert len(report["targets"]) == 3
    every = rows[128, 0, "restart, checkpoint every 1"]
    assert rows[128, 0, "restart, checkpoint every 20"]["100x"] < every["100x"] < 1
