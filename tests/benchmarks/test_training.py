"""Real runs of benchmarks: how they are started and stopped, and what is read from their logs."""

from __future__ import annotations

import functools
import sys
from pathlib import Path

import pytest

from benchmarks.training import drafting, log, train
from benchmarks.training.log import Evaluation, Reached, Run
from rhymeflow.config.load import read_config
from rhymeflow.core.commands import Evaluate, Train
from rhymeflow.core.events import Evaluated, InstanceJoined, LearnerReady, Tick, VersionPublished
from rhymeflow.core.types import TrajectoryId
from rhymeflow.errors import UserError
from rhymeflow.store.writer import SqliteTrajectoryStore

# -- the event log ---------------------------------------------------------------------------------


def test_a_run_is_read_from_its_log(tmp_path: Path) -> None:
    store = SqliteTrajectoryStore(tmp_path / "events.db")
    store.record(5.0, [LearnerReady(0)])
    store.record(7.5, [InstanceJoined("rollout-0", 0, 8, 100)])
    store.record(8.0, [InstanceJoined("rollout-1", 0, 8, 100)])
    store.put_group(0, row=0, epoch=0, prompt="?", prompt_tokens=[1], columns={})
    trajectory = TrajectoryId(0, 0)
    store.put_segment(
        trajectory, start=0, version=0, instance="rollout-0", steps=3, drafted=0,
        tokens=[7] * 3, logprobs=[-0.5] * 3,
    )  # fmt: skip
    store.put_finished(trajectory, length=3, reason="stop")
    store.put_reward(trajectory, reward=1.0, components={})
    store.put_consumed(0, version=0, members=(0,))
    store.record_command(store.record(8.5, [Tick()]), Train(0, (0,), ((0,),)))
    event = store.record(9.0, [VersionPublished(1)])
    for number, instance in enumerate(("rollout-0", "rollout-1")):
        store.record_command(event, Evaluate(instance, number, 1))
    store.record(9.5, [Evaluated("rollout-0", 1, 0.5)])
    store.record(9.75, [Evaluated("rollout-1", 1, 0.5)])
    store.commit()
    store.close()
    found = log.read(tmp_path)
    assert (found.ready, found.published, found.staleness) == (7.5, [9.0], 0)
    assert found.evaluations == [Evaluation(9.5, 1, 0.5), Evaluation(9.75, 1, 0.5)]
    assert (found.rollout, found.training) == (0.75, 0.5)
    assert log.phases_allow(found) == 0.6


def made_up(*rewards: float, seconds: float = 1.0, staleness: int = 0) -> Run:
    """Ready at 10 s, a version every `seconds`, every other one evaluated, known 0.5 s later."""
    published = [10 + seconds * (i + 1) for i in range(2 * (len(rewards) - 1))]
    evaluations = [
        Evaluation((published[2 * i - 1] if i else 10.0) + 0.5, 2 * i, reward)
        for i, reward in enumerate(rewards)
    ]
    return Run(10.0, evaluations, published, staleness, rollout=3.0, training=1.0)


def test_the_goal_is_reached_when_an_evaluation_is_known_and_not_between_two() -> None:
    run = made_up(0.3, 0.8, 0.86, 0.9, seconds=2.0)
    assert log.reached(run, 0.85) == Reached(True, 8.5, 4)
    assert log.reached(run, 0.86).steps == 4
    assert log.reached(run, 0.861).steps == 6
    assert log.steps_per_second(run) == pytest.approx(0.5)


def test_the_evaluation_that_is_known_first_counts_whatever_its_version() -> None:
    run = made_up(0.3, 0.5, 0.9, 0.9)
    late = [run.evaluations[0], run.evaluations[3], run.evaluations[2]]
    assert log.reached(Run(10.0, late, run.published, 0), 0.85).steps == 6


def test_a_run_that_never_reached_the_goal_counts_with_all_its_time() -> None:
    assert log.reached(made_up(0.3, 0.5, 0.6), 0.85) == Reached(False, 4.5, 4)


# -- starting and stopping -------------------------------------------------------------------------

TRAINER = """#!{python}
import json, os, pathlib, signal, sys, time
def stop(*_):
    print("rhymeflow: interrupted")
    sys.exit(130)
signal.signal(signal.SIGINT, stop)
run_dir = pathlib.Path({run_dir!r})
run_dir.mkdir()
(run_dir / "cores").write_text(json.dumps(sorted(os.sched_getaffinity(0))))
if {fails}:
    sys.exit("rhymeflow: the last word")
while {waits}:
    time.sleep(0.01)
"""


@pytest.fixture
def trainer(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    """Starts `train` with a program in place of `rhymeflow train`; returns the run directory."""

    def start(*, fails: bool = False, waits: bool = False, **how) -> Path:
        script, run_dir = tmp_path / "trainer", tmp_path / "run"
        told = {"python": sys.executable, "run_dir": str(run_dir), "fails": fails, "waits": waits}
        script.write_text(TRAINER.format(**told))
        script.chmod(0o755)
        config = read_config("demo", {"run.output_dir": str(run_dir), "run.seed": "3"})
        with monkeypatch.context() as patch:
            patch.setattr(sys, "executable", str(script))
            patch.setattr(train, "POLL_SECONDS", 0.02)
            return train.train(config, **how)

    return start


def test_a_run_is_interrupted_once_it_is_enough(trainer, tmp_path: Path) -> None:
    seen = []

    def is_enough(run_dir: Path) -> bool:
        seen.append((run_dir / "cores").exists())
        return seen[-1]

    assert trainer(waits=True, is_enough=is_enough) == tmp_path / "run"
    assert seen.count(True) == 1, "it is interrupted once"
    assert read_config(str(tmp_path / "run.yaml"), {}).run.seed == 3


def test_a_run_may_end_by_itself_on_the_cores_it_was_given(trainer, tmp_path: Path) -> None:
    trainer(num_cores=1)
    first = min(train.os.sched_getaffinity(0))
    assert (tmp_path / "run" / "cores").read_text() == f"[{first}]"


def test_a_failure_is_told_with_the_last_line(trainer) -> None:
    with pytest.raises(UserError, match=r"run.yaml failed: rhymeflow: the last word"):
        trainer(fails=True)


def test_sides_take_turns_in_directories_of_their_own() -> None:
    seen: list[tuple[str, int, Path]] = []

    def measure(side: str, number: int, run_dir: Path) -> float:
        assert run_dir.parent.is_dir()
        assert not run_dir.exists()
        seen.append((side, number, run_dir))
        return float(len(seen))

    sides = {side: functools.partial(measure, side) for side in "ab"}
    assert train.repeated(sides, 2, lambda found: found) == {"a": [1, 4], "b": [2, 3]}
    assert [each[:2] for each in seen] == [("a", 0), ("b", 0), ("b", 1), ("a", 1)]
    assert len({run_dir for *_, run_dir in seen}) == 4


def test_workers_are_pinned_and_one_core_is_not_enough(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(train.os, "sched_getaffinity", lambda _: {3, 5, 7})
    assert train.cores(3) == ([3], [[5], [7], [5]])
    config = read_config("demo", train.pinned(2))
    assert (config.learner.cpus, config.rollout.cpus) == ((3,), ((5,), (7,)))
    assert config.learner.num_threads == config.rollout.num_threads == 1
    monkeypatch.setattr(train.os, "sched_getaffinity", lambda _: {3})
    with pytest.raises(UserError, match="needs two cores"):
        train.cores(1)


# -- the demo with drafts and without --------------------------------------------------------------


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
    found = drafting.figures(rows, 20)
    assert found["steps/s, later epochs"] == pytest.approx(2 / 1.5), "the last two are left out"
    assert found["steps/s"] == pytest.approx(17 / 16.5)
    assert found["rollout tokens/s, later epochs"] == 200.0
    assert (found["idle/rollout"], found["idle/learner"]) == (0.5, 0.5), "of 1.5 seconds"
    lengths = found["draft/mean_acceptance_length"], found["draft/acceptance_rate"]
    assert lengths == pytest.approx((150 / 45, 0.5)), "20 iterations, and 25"
    slower = {**found, "steps/s": found["steps/s"] / 2}
    assert drafting.ratio([found], [slower], "steps/s") == 2.0
    with pytest.raises(AssertionError, match="20 steps"):
        drafting.figures(rows, 21)
