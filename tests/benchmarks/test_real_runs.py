"""What benchmarks say of real runs: from their logs and metrics to ratios and targets."""

from __future__ import annotations

import argparse
import json
from pathlib import Path

import pytest

from benchmarks import harness, resume, schedules, simulator
from benchmarks.logs.made_up import Size, kept
from benchmarks.schedules import Evaluation, Reached, Run
from rhymeflow.core import events as e
from rhymeflow.runtime import event_log
from rhymeflow.store.writer import SqliteTrajectoryStore
from tests.store import stores


def arguments(module, *given: str) -> argparse.Namespace:
    parser = argparse.ArgumentParser(allow_abbrev=False)
    harness.add_common_arguments(parser)
    module.add_arguments(parser)
    return parser.parse_args(given)


# -- the log of a run ------------------------------------------------------------------------------


def test_a_run_is_read_from_its_log(tmp_path: Path) -> None:
    store = SqliteTrajectoryStore(tmp_path / "events.db")
    store.record(5.0, [e.LearnerReady(0)])
    store.record(7.5, [e.InstanceJoined("rollout-0", 0, 8, 100)])
    store.record(8.0, [e.InstanceJoined("rollout-1", 0, 8, 100)])
    stores.group(store, 0)
    stores.segment(store, (0, 0), 3)
    stores.finished(store, (0, 0), 3, 1.0)
    store.put_consumed(0, version=0, members=(0,))
    store.record(9.0, [e.VersionPublished(1)])
    store.record(9.5, [e.Evaluated("rollout-0", 1, 0.5)])
    store.record(9.75, [e.Evaluated("rollout-1", 1, 0.5)])
    store.commit()
    store.close()
    row = {"step_time": 4.0, "idle/learner": 0.25, "completions/mean_length": 3.0}
    (tmp_path / "metrics.jsonl").write_text(json.dumps(row) + "\n")
    found = schedules.read(tmp_path)
    assert (found.ready, found.published, found.staleness) == (7.5, [9.0], 0)
    assert found.evaluations == [Evaluation(9.5, 1, 0.5), Evaluation(9.75, 1, 0.5)]
    assert schedules.phases_allow(found) == found.training == 0.75


def made_up(*rewards: float, seconds: float = 1.0, staleness: int = 0) -> Run:
    """Ready at 10 s, a version every `seconds`, every other one evaluated, known 0.5 s later."""
    published = [10 + seconds * (i + 1) for i in range(2 * (len(rewards) - 1))]
    evaluations = [
        Evaluation((published[2 * i - 1] if i else 10.0) + 0.5, 2 * i, reward)
        for i, reward in enumerate(rewards)
    ]
    return Run(10.0, evaluations, published, staleness, training=0.25)


def test_the_goal_is_reached_when_an_evaluation_is_known_or_counts_with_all_its_time() -> None:
    run = made_up(0.3, 0.8, 0.86, 0.9, seconds=2.0)
    assert schedules.reached(run, 0.85) == Reached(True, 8.5, 4)
    assert schedules.reached(run, 0.86).steps == 4
    assert schedules.reached(run, 0.861).steps == 6
    assert schedules.steps_per_second(run) == pytest.approx(0.5)
    assert schedules.reached(made_up(0.3, 0.5, 0.6), 0.85) == Reached(False, 4.5, 4)


# -- the simulator against a run -------------------------------------------------------------------


def test_the_first_step_is_not_counted_and_errors_are_medians_of_rounds() -> None:
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


# -- others ----------------------------------------------------------------------------------------


def test_a_long_log_is_resumed_up_to_its_first_command(monkeypatch):
    monkeypatch.setattr(event_log, "SNAPSHOT_EVENTS", 1500)
    with kept(None, Size(2000), till_snapshot=True) as folder:
        times = resume.resume(folder)
    assert {"replay", "first command", *resume.BESIDE} <= times.keys()
