"""What benchmarks say of real runs, from their logs and metrics to ratios and targets, and of
simulated clusters: the search for a split, what is compared with what."""

import argparse
import json
import random
from pathlib import Path
from statistics import fmean
from types import SimpleNamespace

import msgspec
import pytest

from benchmarks import emulated, harness, histopipe, resume, schedules, simulator, staleflow
from benchmarks import faults_simulated as faults
from benchmarks.clusters import runs as clusters
from benchmarks.logs.made_up import Size, kept
from benchmarks.schedules import Evaluation, Run
from benchmarks.simulated import schedules as simulated_schedules
from benchmarks.simulated import splits
from benchmarks.simulated.schedules import cells
from rhymeflow.core import events as e
from rhymeflow.errors import UserError
from rhymeflow.runtime import event_log
from rhymeflow.sim.faults import HOUR
from rhymeflow.sim.simulate import run as simulate
from rhymeflow.sim.workload import workload
from tests.observe.runs import stored
from tests.store import stores


def arguments(module, *given: str) -> argparse.Namespace:
    parser = argparse.ArgumentParser(allow_abbrev=False)
    harness.add_common_arguments(parser)
    module.add_arguments(parser)
    return parser.parse_args(given)


def test_a_run_is_read_from_its_log(tmp_path):
    with stored(tmp_path) as store:
        store.record(5.0, [e.LearnerReady(0)])
        store.record(7.5, [e.InstanceJoined("rollout-0", 0, 8, 100)])
        store.record(8.0, [e.InstanceJoined("rollout-1", 0, 8, 100)])
        stores.group(store, 0)
        stores.segment(store, (0, 0), 3)
        stores.finished(store, (0, 0), 3, 1.0)
        store.put_consumed(0, version=0, members=(0,))
        store.record(9.0, [e.VersionPublished(1)])
        store.record(9.5, [e.Evaluated("rollout-0", 1, 0.5)])
        store.record(9.75, [e.Evaluated("rollout-1", 1, 0.75)])
        store.record(11.0, [e.VersionPublished(2)])
    row = {"step_time": 4.0, "idle/learner": 0.25, "completions/mean_length": 3.0}
    (tmp_path / "metrics.jsonl").write_text(json.dumps(row) + "\n")
    for goal, found in {0.5: (True, 2.0, 1), 0.75: (True, 2.25, 1), 0.8: (False, 3.5, 2)}.items():
        assert schedules.read(tmp_path, goal) == Run(*found, 0.5, staleness=0, training=0.75)
    assert schedules.phases_allow(schedules.read(tmp_path, 0.5)) == 0.75


def test_the_goal_is_reached_when_an_evaluation_is_known_or_counts_with_all_its_time():
    rewards = [0.3, 0.8, 0.86, 0.9]
    evaluations = [Evaluation(4.0 * i + 0.5, 2 * i, reward) for i, reward in enumerate(rewards)]
    published = [2.0 * step for step in range(1, 7)]
    assert schedules.reached(evaluations, published, 0.85) == (True, 8.5, 4)
    assert schedules.reached(evaluations, published, 0.86) == (True, 8.5, 4)
    assert schedules.reached(evaluations, published, 0.861) == (True, 12.5, 6)
    assert schedules.reached(evaluations, published, 0.95) == (False, 12.5, 6)
    assert schedules.reached(evaluations[:2], published, 0.85) == (False, 12.0, 6)


def test_the_first_step_is_not_counted_and_errors_are_medians_of_rounds():
    rows = [
        {"time": 10.0, "step_time": 9.0, "idle/rollout": 1.0, "idle/learner": 1.0},
        {"time": 11.0, "step_time": 1.0, "idle/rollout": 0.0, "idle/learner": 0.5},
        {"time": 14.0, "step_time": 3.0, "idle/rollout": 0.4, "idle/learner": 0.1},
    ]
    assert simulator.figures(rows) == pytest.approx((0.5, 0.3, 0.2))
    made = simulator.Figures
    pairs = [
        (made(1.0, 0.2, 0.0), made(1.1, 0.1, 0.04)),
        (made(2.0, 0.4, 0.5), made(1.9, 0.5, 0.52)),
        (made(4.0, 0.5, 0.5), made(5.0, 0.8, 0.59)),
    ]
    speed, rollout, learner = simulator.compared("x", pairs)
    assert (speed["real"], speed["simulated"], speed["relative"]) == (2.0, 1.9, 0.1)
    assert (rollout["error"], rollout["relative"]) == (0.1, 0.25)
    assert learner["error"] == 0.04
    assert learner["relative"] == pytest.approx(0.11)  # of the rounds in which it was idle
    assert [(t.value, t.met) for t in map(simulator.target, (speed, rollout, learner))] == [
        (0.1, True), (0.1, True), (0.04, True),
    ]  # fmt: skip
    assert [simulator.target(r).met for r in simulator.compared("x", pairs[2:])] == [
        False, False, True,
    ]  # fmt: skip


def test_a_long_log_is_resumed_up_to_its_first_command(monkeypatch):
    monkeypatch.setattr(event_log, "SNAPSHOT_EVENTS", 1500)
    with kept(None, Size(2000), till_snapshot=True) as folder:
        times = resume.resume(folder)
    assert {"replay", "first command", *resume.BESIDE} <= times.keys()


TINY = {
    "schedule.name": "staleflow",
    "schedule.cost_model": "qwen2.5-32b-h20",
    "learner.groups_per_batch": "4",
    "rollout.num_generations": "4",
    "rollout.max_completion_length": "512",
    "simulation.workload.mean_length": "128",
}


@pytest.mark.parametrize("at", [2, 12, 24, 26, 38, 62])
def test_the_peak_is_found_in_ever_finer_steps(at):
    tried = []

    def measured(rollout):
        tried.append(rollout)
        return {"tokens/s": 1000.0 - abs(rollout - at)}

    one = splits.case(64, {**TINY, "schedule.cost_model": "qwen2.5-14b-h20"}, 6, parts=(16, 32))
    found = splits.searched(measured, one)
    assert found["tokens/s"] == 1000
    assert len(set(tried)) == len(tried), "no split is measured twice"
    assert len(tried) <= 7 + 2 + 2


def test_the_higher_of_two_peaks_is_found():
    rates = {20: 12143, 24: 12692, 28: 12963, 32: 12230, 36: 13325, 40: 17617, 44: 22287, 48: 18038}
    one = splits.case(64, {**TINY, "schedule.cost_model": "qwen2.5-14b-h20"}, 6)
    found = splits.searched(lambda rollout: {"tokens/s": rates.get(rollout, 1)}, one)
    assert found["tokens/s"] == 22287, "of `bounded`, bound 1, 14B on 64 devices"


def test_figures_are_means_of_seeds_at_the_split_of_the_first(monkeypatch):
    def measure(_, rollout, seed=0):
        rate = 100.0 - abs(rollout - 40) + 10 * seed if seed else 100.0 - abs(rollout - 24)
        return {"rollout devices": rollout, "tokens/s": rate, "greatest staleness": seed}

    monkeypatch.setattr(splits, "measure", measure)
    one = splits.case(64, {**TINY, "schedule.cost_model": "qwen2.5-14b-h20"}, 6)
    assert splits.best_split(one) == {
        "rollout devices": 24, "tokens/s": 298 / 3, "spread": 104 / 94, "greatest staleness": 2,
    }  # fmt: skip


def test_equal_cases_are_run_once_and_figures_are_the_simulations():
    one = splits.case(8, TINY, 6, uncounted=2)
    again = splits.case(8, dict(reversed(TINY.items())), 6, uncounted=2)
    found = splits.best({"a": one, "b": again}, jobs=1)
    assert found["a"] is found["b"]
    rollout = found["a"]["rollout devices"]
    results = []
    for seed in range(3):
        config = splits.configure(one, rollout, seed)
        results.append(simulate(config, workload(config, None), uncounted=2))
    rates, idle_rollout, idle_learner = (
        [getattr(each, name) for each in results]
        for name in ("throughput", "idle_rollout", "idle_learner")
    )
    assert found["a"]["tokens/s"] == pytest.approx(fmean(rates))
    assert found["a"]["spread"] == pytest.approx(max(rates) / min(rates))
    assert found["a"]["idle in rollout"] == pytest.approx(fmean(idle_rollout))
    idle = rollout * fmean(idle_rollout) + (8 - rollout) * fmean(idle_learner)
    assert found["a"]["idle devices"] == pytest.approx(idle / 8)


def test_all_that_may_be_asked_for_can_be_configured():
    """Also where a schedule is told a bound, or how many steps are not counted."""
    seen = {}
    cases = [simulated_schedules.case(cell) for cell in cells()]
    for one in [*cases, *map(histopipe.case, histopipe.cells())]:
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


@pytest.mark.parametrize("name", clusters.SETTINGS)
def test_what_an_emulated_run_does_not_count_is_an_epoch(name):
    """From the second on there are drafts: a longer epoch has none to measure."""
    config = clusters.configure(name, clusters.OURS, 0, 4, Path("unused"))
    assert config.data.size == clusters.SKIPPED * config.learner.groups_per_batch


def test_the_table_of_emulated_runs_says_nothing_of_what_there_is_not():
    """An environment's run has no goal, and a run without long responses no drafts of them."""
    one = clusters.Run(
        "guess", clusters.OURS, 0, 4, 20.0, [10.0 * i for i in range(1, 41)], {},
        tokens_per_iteration=1.5, long_tokens_per_iteration=0.0, idle_rollout=0.1,
        idle_learner=0.1, learner_behind=0.0, rollout_behind=0.0, simulated=[0.1, 0.1, 0.1],
    )  # fmt: skip
    several = [one, msgspec.structs.replace(one, seed=1, long_tokens_per_iteration=3.0)]
    assert [row["reached"] for row in emulated.table("guess", several)] == [""]
    assert [row["long"] for row in emulated.table("guess", several)] == [3.0]
    assert [row["long"] for row in emulated.table("guess", several[:1])] == [""]
