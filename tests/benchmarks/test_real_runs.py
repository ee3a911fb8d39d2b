"""What benchmarks say of real runs: from their logs and metrics to ratios and targets."""

from __future__ import annotations

import argparse
import json
from pathlib import Path

import pytest

from benchmarks import harness, histospec, resume, schedules, simulator
from benchmarks.logs.made_up import Size, kept
from benchmarks.schedules import Evaluation, Reached, Run, sides
from benchmarks.training import train
from rhymeflow.config import Config
from rhymeflow.config.load import read_config
from rhymeflow.core import events as e
from rhymeflow.core.types import TrajectoryId
from rhymeflow.errors import UserError
from rhymeflow.runtime import event_log
from rhymeflow.runtime.controller import ROUND_SECONDS
from rhymeflow.store.reader import Recorded
from rhymeflow.store.writer import SqliteTrajectoryStore


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
    store.put_group(0, row=0, epoch=0, prompt="?", prompt_tokens=[1], columns={})
    trajectory = TrajectoryId(0, 0)
    store.put_segment(
        trajectory, start=0, version=0, instance="rollout-0", steps=3, drafted=0,
        tokens=[7] * 3, logprobs=[-0.5] * 3,
    )  # fmt: skip
    store.put_finished(trajectory, length=3, reason="stop")
    store.put_reward(trajectory, reward=1.0, components={})
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


def test_workers_are_pinned_and_one_core_is_not_enough(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(train.os, "sched_getaffinity", lambda _: {3, 5, 7})
    config = read_config("demo", train.pinned(2))
    assert (config.learner.cpus, config.rollout.cpus) == ((3,), ((5,), (7,)))
    assert config.learner.num_threads == config.rollout.num_threads == 1
    monkeypatch.setattr(train.os, "sched_getaffinity", lambda _: {3})
    with pytest.raises(UserError, match="needs two cores"):
        train.cores(1)


# -- seconds to a reward ---------------------------------------------------------------------------


@pytest.fixture
def trained(monkeypatch: pytest.MonkeyPatch) -> list[Config]:
    """Runs are made up; returns the configurations of those that were made."""
    made: list[Config] = []
    periods = {"synchronous": 2.0, "rhymeflow": 0.8}

    def read(run_dir: Path) -> Run:
        config, name = made[-1], made[-1].schedule.name
        seconds = periods.get(name, 1.5) + 0.1 * config.run.seed
        seconds += 0.5 if config.drafting.window == "off" else 0.0
        return made_up(0.3, 0.6, 0.9, 0.95, seconds=seconds, staleness=config.schedule.bound)

    monkeypatch.setattr(schedules, "train", lambda config, is_enough: made.append(config))
    monkeypatch.setattr(schedules, "read", read)
    monkeypatch.setattr("os.sched_getaffinity", lambda _: {4, 5})
    return made


PAIR = ("--schedule", "synchronous", "--schedule", "rhymeflow", "--bound", "1")


def test_time_to_the_goal_is_paired_by_seed_and_judged(trained) -> None:
    result = schedules.run(arguments(schedules, *PAIR, "--seeds", "2"))
    assert [config.run.seed for config in trained] == [0, 0, 0, 1, 1, 1]
    base, ours, bare = result["rows"]
    assert (ours["schedule"], ours["bound"], ours["drafts"]) == ("rhymeflow", 1, True)
    assert base["ratio"] == base["ratio, least"] == 1
    assert (ours["seconds"], ours["steps to goal"], ours["reached"]) == (3.9, 4, "2 of 2")
    assert ours["ratio"] == pytest.approx((3.7 / 8.5 + 4.1 / 8.9) / 2, abs=1e-3)
    assert bare["ratio"] > 1, "without drafts, against synchronous with them"
    time, over_allowed = result["targets"]
    assert (time["name"], time["met"]) == ("learning/rhymeflow, bound 1/synchronous", True)
    assert ours["allowed"] == 0.75, "the phases of `made_up`"
    assert over_allowed["value"] == pytest.approx(ours["ratio"] / 0.75, abs=1e-3)
    missed = schedules.run(arguments(schedules, *PAIR, "--seeds", "1", "--goal", "0.99"))
    assert missed["targets"][0]["name"].endswith("synchronous, reached 0 of 1")
    assert len(sides(schedules.NAMES, [1, 3])) == 13, "two of them without drafts"


def test_a_run_goes_on_until_goal_and_least_steps_are_there(monkeypatch, tmp_path: Path) -> None:
    rows = {step: {"reward": 0.5} for step in range(1, 38)}
    below, there = ({4: {"reward": 0.5, "eval/reward": held_out}} for held_out in (0.84, 0.85))
    for seen, expected in ((rows | below, False), (rows | there, True), (there, False)):
        monkeypatch.setattr(schedules.metrics, "read", lambda run_dir, seen=seen: seen)
        assert schedules.is_enough(tmp_path, goal=0.85) is expected


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


def test_a_reward_takes_what_is_beyond_a_round() -> None:
    def rewarded(member: int, when: float) -> Recorded:
        return Recorded(9, when, e.TrajectoryRewarded(TrajectoryId(0, member), 1.0))

    ids = [TrajectoryId(0, member) for member in range(3)]
    log = [Recorded(1, 1.0, e.TrajectoryFinished(one, "rollout-0", 5, "stop")) for one in ids]
    log += [rewarded(0, 1.001), rewarded(1, 1.05), rewarded(2, 1.5), rewarded(3, 9.0)]
    assert simulator.reward_seconds(log) == pytest.approx(0.05 - ROUND_SECONDS), "3 was cut"
    assert simulator.reward_seconds([log[0], log[3]]) == 0


# -- others ----------------------------------------------------------------------------------------


def test_figures_of_a_run_with_drafts() -> None:
    rows = [
        {
            "time": {17: 27.0, 18: 27.5, 19: 33.0, 20: 39.0}.get(step, 10.0 + step),
            "step_time": 1.0 if step <= 17 else 0.5,
            "rollout/tokens_per_s": 100.0,
            "idle/rollout": 0.5,
            "idle/learner": 0.25 if step <= 17 else 1.0,
            "draft/mean_acceptance_length": 5.0 if step <= 17 else 2.0,
            "draft/acceptance_rate": 0.5,
        }
        for step in range(1, 21)
    ]
    found = histospec.figures(rows, 20)
    assert found["steps/s, later epochs"] == pytest.approx(2 / 1.5), "the last two are left out"
    assert found["steps/s"] == pytest.approx(17 / 16.5)
    assert found["rollout tokens/s, later epochs"] == 200.0
    assert (found["idle/rollout"], found["idle/learner"]) == (0.5, 0.5), "of 1.5 seconds"
    lengths = found["draft/mean_acceptance_length"], found["draft/acceptance_rate"]
    assert lengths == pytest.approx((150 / 45, 0.5)), "20 iterations, and 25"
    with pytest.raises(AssertionError, match="20 steps"):
        histospec.figures(rows, 21)


def test_a_long_log_is_resumed_up_to_its_first_command(monkeypatch):
    monkeypatch.setattr(event_log, "SNAPSHOT_EVENTS", 1500)
    with kept(None, Size(2000), till_snapshot=True) as folder:
        times = resume.resume(folder)
    assert {"replay", "first command", *resume.BESIDE} <= times.keys()
