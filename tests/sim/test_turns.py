"""Simulated responses with turns: sums done by hand, every schedule, and slow environments."""

from __future__ import annotations

from pathlib import Path
from statistics import fmean

import pytest

from rhymeflow.config.load import build_config
from rhymeflow.core.events import Observed, TurnEnded
from rhymeflow.core.strategies.schedules import SCHEDULES
from rhymeflow.core.types import TrajectoryId
from rhymeflow.sim.response import Answer
from rhymeflow.sim.simulate import run, simulate
from rhymeflow.sim.workload import MOST_TURNS, Recorded, Synthetic, workload
from rhymeflow.store.writer import SqliteTrajectoryStore
from tests.observe.runs import make_run
from tests.sim.test_simulate import LENGTH, PROFILE, PROMPT, STEPS, Constant, a_config

TURNS = {"simulation.workload.mean_turns": 3, "simulation.workload.observation_tokens": 7}
BOUNDS = {"synchronous": None, "one_step": None, "histopipe": None}


class Conversing(Constant):
    """The environment answers once, after 20 tokens: 5 tokens, which take 3 seconds."""

    most_observed = 5
    computed_share = 1.0

    def answers(self, row: int, epoch: int, member: int, length: int) -> list[Answer]:
        return [Answer(20, 5, 3.0)]


def test_a_turn_takes_in_what_was_answered_and_keeps_the_rest(tmp_path: Path) -> None:
    config = a_config(tmp_path, **{"learner.groups_per_batch": 1, "rollout.num_generations": 2})
    found = run(config, Conversing())

    def turn(before: int, tokens: int, kept: int = 0) -> float:
        seconds = PROFILE.k2 + PROFILE.k4 + PROFILE.k1 * kept
        seconds += PROFILE.prefill_token * (before - kept)
        for generated in range(1, tokens):
            kv_tokens = before + generated - 1
            seconds += PROFILE.k1 * kv_tokens + PROFILE.k3 + PROFILE.k4
        return seconds

    rollout = turn(PROMPT, 20) + 3.0 + turn(PROMPT + 20 + 5, LENGTH - 20, kept=PROMPT + 20 - 1)
    tokens = 2 * (PROMPT + LENGTH + 5)  # each of the two instances has one
    train = PROFILE.train_step + PROFILE.train_token / 4 * tokens + PROFILE.push
    assert found.step_seconds[0] == pytest.approx(rollout + train, abs=1e-6)
    assert found.steps == STEPS
    assert found.mean_length == LENGTH + 5
    assert found.tokens_generated == STEPS * 2 * LENGTH
    assert found.tokens_wasted == 0


def test_turns_as_a_run_recorded_them(tmp_path: Path) -> None:
    run_dir = tmp_path / "run"
    run_dir.mkdir()
    make_run(run_dir, num_steps=4)
    long, other = TrajectoryId(3, 1), TrajectoryId(3, 0)  # of 103 and 13 tokens
    store = SqliteTrajectoryStore(run_dir / "events.db")
    store.record(
        99.0,
        [
            TurnEnded(long, "rollout-0", 1, 40),
            TurnEnded(other, "rollout-1", 1, 6),
            Observed(long, 1, 47, seconds=2.5),
            Observed(other, 1, 7, seconds=0.25),
            TurnEnded(long, "rollout-0", 2, 60),
            Observed(long, 2, 70, seconds=0.5),
        ],
    )
    store.commit()
    store.close()
    config = a_config(tmp_path, **{"rollout.max_completion_length": 500})
    recorded = Recorded(run_dir, config)
    assert recorded.length(3, 0, 1) == 86
    assert recorded.answers(3, 0, 1, 86) == [Answer(40, 7, 2.5), Answer(53, 10, 0.5)]
    assert recorded.answers(3, 0, 0, 12) == [Answer(6, 1, 0.25)]
    assert recorded.answers(3, 0, 1, 53) == [Answer(40, 7, 2.5)], "it is cut before the second"
    assert recorded.answers(4, 0, 1, 104) == []
    assert recorded.most_observed == 17
    config = build_config({"rollout.num_generations": 2}, over=config, where="test")
    found = simulate(config, output=tmp_path / "out", workload=run_dir)
    assert found.steps == STEPS


@pytest.mark.parametrize("name", sorted(SCHEDULES))
def test_every_schedule_keeps_the_laws_with_turns_and_deaths(name: str, tmp_path: Path) -> None:
    """The audit of the simulated world raises where one does not."""
    bound = BOUNDS.get(name, 2)
    config = a_config(
        tmp_path,
        **TURNS,
        **{
            "schedule.name": name,
            "schedule.max_staleness": bound,
            "schedule.extra_generations": 1,
            "learner.groups_per_batch": 4,
            "simulation.faults.device_mtbf_hours": 0.02,
            "simulation.faults.instance_seconds": 2.0,
            "simulation.faults.learner_seconds": 2.0,
        },
    )
    found = run(config, workload(config, None))
    assert found.steps == STEPS
    assert found.deaths, "nothing died"


def test_turns_are_as_many_as_is_said_and_share_the_length(tmp_path: Path) -> None:
    config = a_config(tmp_path, **TURNS, **{"simulation.workload.environment_seconds": 2.0})
    made = Synthetic(config)
    every = [made.answers(row, 0, 0, 60) for row in range(4000)]
    assert fmean(1 + len(each) for each in every) == pytest.approx(3, rel=0.05)
    assert max(1 + len(each) for each in every) <= MOST_TURNS * 3
    assert fmean(a.seconds for each in every for a in each) == pytest.approx(2, rel=0.05)
    ends = [[a.after for a in each] for each in every]
    assert all(0 < end < 60 for each in ends for end in each)
    assert all(each == sorted(set(each)) for each in ends)
    assert [made.answers(row, 0, 0, 60) for row in range(4000)] == every
    assert [made.answers(row, 1, 0, 60) for row in range(4000)] != every
