"""The simulator's benchmark: what is counted, how errors are taken, what the simulation is told."""

from __future__ import annotations

from pathlib import Path

import pytest

from benchmarks import simulator
from benchmarks.simulator import (
    Figures,
    compared,
    configure,
    figures,
    reward_seconds,
    target,
)
from rhymeflow.config.load import read_config
from rhymeflow.core.events import TrajectoryFinished, TrajectoryRewarded
from rhymeflow.core.types import TrajectoryId
from rhymeflow.runtime.controller import ROUND_SECONDS
from rhymeflow.store.reader import Recorded


def test_the_first_step_is_not_counted_and_shares_are_of_the_time() -> None:
    rows = [
        {"time": 10.0, "step_time": 9.0, "idle/rollout": 1.0, "idle/learner": 1.0},
        {"time": 11.0, "step_time": 1.0, "idle/rollout": 0.0, "idle/learner": 0.5},
        {"time": 14.0, "step_time": 3.0, "idle/rollout": 0.4, "idle/learner": 0.1},
    ]
    found = figures(rows)
    assert found == Figures(pytest.approx(0.5), pytest.approx(0.3), pytest.approx(0.2))


def test_errors_are_of_rounds_and_their_median_counts() -> None:
    pairs = [
        (Figures(1.0, 0.2, 0.0), Figures(1.1, 0.1, 0.04)),
        (Figures(2.0, 0.4, 0.5), Figures(1.9, 0.5, 0.52)),
        (Figures(4.0, 0.5, 0.5), Figures(5.0, 0.8, 0.59)),
    ]
    speed, rollout, learner = compared("x", pairs)
    assert (speed["real"], speed["simulated"], speed["relative"]) == (2.0, 1.9, 0.1)
    assert (rollout["error"], rollout["relative"]) == (0.1, 0.25)
    assert learner["error"] == 0.04
    assert learner["relative"] == pytest.approx(0.11)  # of the rounds in which it was idle
    found = [target(row) for row in (speed, rollout, learner)]
    assert [(t.name, t.value) for t in found] == [
        ("simulator/x/steps_per_s (relative)", 0.1),
        ("simulator/x/idle_rollout (points)", 0.1),
        ("simulator/x/idle_learner (points)", 0.04),
    ]
    assert [target(row).met for row in compared("x", pairs[2:])] == [False, False, True]


def test_the_run_is_quiet_and_every_worker_has_its_core(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("os.sched_getaffinity", lambda _: {3, 5})
    config = configure("staleflow", 7, tmp_path)
    assert (config.learner.cpus, config.rollout.cpus) == ((3,), ((5,),))
    assert (config.learner.max_steps, config.schedule.bound, config.run.eval_steps) == (7, 1, 0)
    assert configure("synchronous", 7, tmp_path).schedule.bound == 0


def test_a_reward_takes_what_is_beyond_a_round() -> None:
    def finished(member: int) -> Recorded:
        event = TrajectoryFinished(TrajectoryId(0, member), "rollout-0", 5, "stop")
        return Recorded(member, 1.0, event)

    def rewarded(member: int, time: float) -> Recorded:
        return Recorded(9, time, TrajectoryRewarded(TrajectoryId(0, member), 1.0))

    log = [finished(member) for member in range(3)]
    log += [rewarded(member, 1.0 + t) for member, t in enumerate((0.001, 0.05, 0.5))]
    log.append(rewarded(3, 9.0))  # it was cut
    assert reward_seconds(log) == pytest.approx(0.05 - ROUND_SECONDS)
    assert reward_seconds([log[0], log[3]]) == 0


def test_the_simulation_is_of_the_run_at_the_local_pace(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(simulator, "reward_seconds", lambda log: 0.5)
    monkeypatch.setattr(simulator.TrajectoryReader, "__init__", lambda self, path: None)
    monkeypatch.setattr(simulator.TrajectoryReader, "events", lambda self: [])
    monkeypatch.setattr(simulator.TrajectoryReader, "close", lambda self: None)
    config = read_config("demo", {"rollout.num_instances": "3"})
    found = simulator.as_it_ran(config, tmp_path / "p.json", tmp_path)
    assert found.simulation.tick_seconds == ROUND_SECONDS
    assert found.simulation.reward_seconds == 0.5
    assert found.simulation.profile == str(tmp_path / "p.json")
    assert found.model_copy(update={"simulation": config.simulation}) == config
