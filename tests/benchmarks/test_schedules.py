"""`bench schedules`: what differs between runs, pairing by seed, targets."""

from __future__ import annotations

import argparse
from pathlib import Path

import pytest

from benchmarks import harness, schedules
from benchmarks.schedules import Side, sides
from benchmarks.simulated import schedules as simulated
from benchmarks.training.log import Run
from rhymeflow.config import Config
from tests.benchmarks.test_training import made_up


def arguments(*options: str) -> argparse.Namespace:
    parser = argparse.ArgumentParser()
    harness.add_common_arguments(parser)
    schedules.add_arguments(parser)
    return parser.parse_args(options)


@pytest.fixture
def trained(monkeypatch: pytest.MonkeyPatch) -> list[Config]:
    """Runs are made up; returns the configurations of those that were made."""
    made: list[Config] = []
    periods = {"synchronous": 2.0, "rhymeflow": 0.8}

    def train(config: Config, is_enough) -> None:
        made.append(config)

    def read(run_dir: Path) -> Run:
        config, name = made[-1], made[-1].schedule.name
        seconds = periods.get(name, 1.5) + 0.1 * config.run.seed
        seconds += 0.5 if config.drafting.window == "off" else 0.0
        return made_up(0.3, 0.6, 0.9, 0.95, seconds=seconds, staleness=config.schedule.bound)

    monkeypatch.setattr(schedules, "train", train)
    monkeypatch.setattr(schedules.log, "read", read)
    monkeypatch.setattr("os.sched_getaffinity", lambda _: {4, 5})
    return made


def test_sides_are_every_schedule_and_the_references_without_drafts() -> None:
    found = [str(side) for side in sides(schedules.NAMES, [1, 3])]
    assert found[:2] == ["synchronous, bound 0", "one_step, bound 1"]
    assert {"rhymeflow, bound 1", "rhymeflow, bound 3"} <= set(found)
    assert found[-2:] == ["synchronous, bound 0, no drafts", "staleflow, bound 1, no drafts"]
    assert sides(["bounded"], [1, 3]) == [Side("bounded", 1), Side("bounded", 3)]


def test_time_to_the_goal_is_paired_by_seed_and_judged(trained) -> None:
    names = ("--schedule", "synchronous", "--schedule", "rhymeflow")
    args = arguments(*names, "--seeds", "2", "--bound", "1")
    result = schedules.run(args)
    assert [config.run.seed for config in trained] == [0, 0, 0, 1, 1, 1]
    base, ours, bare = result["rows"]
    assert (ours["schedule"], ours["bound"], ours["drafts"]) == ("rhymeflow", 1, True)
    assert base["ratio"] == base["ratio, least"] == 1
    assert ours["seconds"] == 3.9
    assert (ours["steps to goal"], ours["reached"]) == (4, "2 of 2")
    assert ours["ratio"] == pytest.approx((3.7 / 8.5 + 4.1 / 8.9) / 2, abs=1e-3)
    assert bare["ratio"] > 1, "without drafts, against synchronous with them"
    time, over_allowed = result["targets"]
    assert (time["name"], time["met"]) == ("learning/rhymeflow, bound 1/synchronous", True)
    assert ours["allowed"] == 0.75, "the phases of `made_up`"
    assert over_allowed["name"] == f"{time['name']}/allowed"
    assert over_allowed["value"] == pytest.approx(ours["ratio"] / 0.75, abs=1e-3)


def test_runs_differ_from_the_recipe_in_what_is_said(trained, tmp_path: Path) -> None:
    config = schedules.configure(Side("staleflow", 1), 4, tmp_path)
    assert (config.schedule.name, config.schedule.bound) == ("staleflow", 1)
    assert (config.run.eval_steps, config.run.eval_temperature, config.run.seed) == (2, 0, 4)
    assert config.learner.max_steps == 96
    assert (config.learner.cpus, config.rollout.cpus) == ((4,), ((5,), (5,)))
    bare = schedules.configure(Side("staleflow", 1, False), 4, tmp_path)
    drafting = config.drafting.model_copy(update={"window": "off"})
    assert bare == config.model_copy(update={"drafting": drafting})


def test_a_run_goes_on_until_goal_and_least_steps_are_there(monkeypatch, tmp_path: Path) -> None:
    rows = {step: {"reward": 0.5} for step in range(1, 38)}
    for seen, expected in (
        ({}, False),
        (rows, False),
        ({**rows, 4: {"reward": 0.5, "eval/reward": 0.84}}, False),
        ({**rows, 4: {"reward": 0.5, "eval/reward": 0.85}}, True),
        ({4: {"reward": 0.5, "eval/reward": 0.85}}, False),
    ):
        monkeypatch.setattr(schedules.metrics, "read", lambda run_dir, seen=seen: seen)
        assert schedules.is_enough(tmp_path, goal=0.85) is expected


def test_without_synchronous_there_is_nothing_to_compare_with(trained) -> None:
    names = ("--schedule", "bounded", "--bound", "1")
    result = schedules.run(arguments(*names, "--seeds", "1"))
    assert len(trained) == 1
    assert "ratio" not in result["rows"][0]
    assert result["targets"] == []


def test_all_schedules_are_measured(trained) -> None:
    assert len(schedules.run(arguments("--seeds", "2"))["rows"]) == 13
    assert len(trained) == len({config.run.output_dir for config in trained}) == 2 * 13


def test_references_without_drafts_can_be_left_out(trained) -> None:
    names = ("--schedule", "synchronous", "--schedule", "rhymeflow", "--bound", "1")
    result = schedules.run(arguments(*names, "--seeds", "1", "--drafting-only"))
    assert [row["drafts"] for row in result["rows"]] == [True, True]
    assert result["name"] == "schedules-learning-chosen", "the table of all is not replaced"


def test_a_goal_that_is_missed_is_in_the_targets_name(trained) -> None:
    names = ("--schedule", "synchronous", "--schedule", "rhymeflow", "--bound", "1")
    result = schedules.run(arguments(*names, "--seeds", "1", "--goal", "0.99"))
    assert result["targets"][0]["name"].endswith("synchronous, reached 0 of 1")


def test_a_run_past_its_bound_is_refused(trained, monkeypatch) -> None:
    monkeypatch.setattr(schedules.log, "read", lambda run_dir: made_up(0.9, 0.9, staleness=2))
    with pytest.raises(AssertionError, match="bounded, bound 1: staleness 2"):
        schedules.run(arguments("--schedule", "bounded", "--bound", "1", "--seeds", "1"))


def test_simulated_is_the_other_side(monkeypatch) -> None:
    monkeypatch.setattr(simulated, "run", lambda args: {"name": "simulated"})
    assert schedules.run(arguments("--simulated"))["name"] == "simulated"
