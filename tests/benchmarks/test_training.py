"""Real runs of benchmarks: how they are started and stopped, and what is read from their logs."""

from __future__ import annotations

import random
import sys
from pathlib import Path

import pytest

from benchmarks.training import drafting, log, order, train
from benchmarks.training.log import Evaluation, Group, Reached, Run
from rhymeflow.config.load import read_config
from rhymeflow.core.events import Evaluated, InstanceJoined, LearnerReady, VersionPublished
from rhymeflow.core.types import TrajectoryId
from rhymeflow.errors import UserError
from rhymeflow.store.writer import SqliteTrajectoryStore

BATCH = 4
"""Groups in made-up runs."""

# -- the event log ---------------------------------------------------------------------------------


def test_a_run_is_read_from_its_log(tmp_path: Path) -> None:
    store = SqliteTrajectoryStore(tmp_path / "events.db")
    store.record(5.0, [LearnerReady(0)])
    store.record(7.5, [InstanceJoined("rollout-0", 0, 8, 100)])
    store.record(8.0, [InstanceJoined("rollout-1", 0, 8, 100)])
    for group, epoch in enumerate((0, 0, 1)):
        store.put_group(group, row=group, epoch=epoch, prompt="?", prompt_tokens=[1], columns={})
    put(store, 0, 0, 3)
    put(store, 0, 1, 5)
    put(store, 1, 0, 4, is_finished=False)
    store.put_consumed(0, version=0, members=(0, 1))
    store.record(9.0, [VersionPublished(1)])
    store.record(9.5, [Evaluated("rollout-0", 1, 0.5)])
    store.commit()
    store.close()
    found = log.read(tmp_path)
    assert (found.ready, found.published, found.staleness) == (7.5, [9.0], 0)
    assert found.evaluations == [Evaluation(9.5, 1, 0.5)]
    assert found.groups == [Group(0, 0, 4.0), Group(0, None, 4.0), Group(1, None, 0.0)]


def put(store: SqliteTrajectoryStore, group: int, member: int, length: int, *, is_finished=True):
    trajectory = TrajectoryId(group, member)
    store.put_segment(
        trajectory, start=0, version=0, instance="rollout-0", steps=length, drafted=0,
        tokens=[7] * length, logprobs=[-0.5] * length,
    )  # fmt: skip
    if is_finished:
        store.put_finished(trajectory, length=length, reason="stop")
        store.put_reward(trajectory, reward=1.0, components={})


def made_up(*rewards: float, seconds: float = 1.0, groups=(), staleness: int = 0) -> Run:
    """Ready at 10 s, a version every `seconds`, every other one evaluated, known 0.5 s later."""
    published = [10 + seconds * (i + 1) for i in range(2 * (len(rewards) - 1))]
    evaluations = [
        Evaluation((published[2 * i - 1] if i else 10.0) + 0.5, 2 * i, reward)
        for i, reward in enumerate(rewards)
    ]
    return Run(10.0, evaluations, published, staleness, list(groups))


def test_the_goal_is_reached_when_an_evaluation_is_known_and_not_between_two() -> None:
    run = made_up(0.3, 0.8, 0.86, 0.9, seconds=2.0)
    assert log.reached(run, 0.85) == Reached(True, 8.5, 8.0, 4)
    assert log.reached(run, 0.86).steps == 4
    assert log.reached(run, 0.861).steps == 6
    assert log.steps_per_second(run) == pytest.approx(0.5)


def test_the_evaluation_that_is_known_first_counts_whatever_its_version() -> None:
    run = made_up(0.3, 0.5, 0.9, 0.9)
    late = [run.evaluations[0], run.evaluations[3], run.evaluations[2]]
    assert log.reached(Run(10.0, late, run.published, 0, []), 0.85).steps == 6


def test_a_run_that_never_reached_the_goal_counts_with_all_its_time() -> None:
    assert log.reached(made_up(0.3, 0.5, 0.6), 0.85) == Reached(False, 4.5, 4.0, 4)


# -- order by length -------------------------------------------------------------------------------


def in_order(num_batches: int = 20, seed: int = 0) -> list[Group]:
    noise = random.Random(seed)
    return [Group(0, i // BATCH, noise.lognormvariate(4, 1)) for i in range(num_batches * BATCH)]


def of(groups: list[Group]) -> list[Run]:
    return [made_up(0.1, 0.2, groups=groups)]


def swapped(groups: list[Group], is_overtaking) -> list[Group]:
    """Group i takes the place of i - BATCH, in the batch before, where that is so."""
    batches = [group.batch for group in groups]
    for i in range(BATCH, len(groups)):
        if batches[i - BATCH] == i // BATCH - 1 and is_overtaking(groups[i], groups[i - BATCH]):
            batches[i], batches[i - BATCH] = batches[i - BATCH], batches[i]
    return [Group(g.epoch, b, g.length) for g, b in zip(groups, batches, strict=True)]


def test_the_limit_grows_with_the_comparisons() -> None:
    assert order.limit(1) == pytest.approx(1.96, abs=0.005)
    assert order.limit(20) == pytest.approx(3.02, abs=0.01)


def test_groups_never_trained_on_are_counted_in_the_epochs_that_are_judged() -> None:
    groups = [Group(0, 0, 5.0), Group(0, None, 5.0), Group(1, None, 5.0)]
    assert order.trained_share(of(groups), 1) == 0.5
    assert order.trained_share(of(groups), 2) == pytest.approx(1 / 3)
    assert order.trained_share(of(in_order()), 1) == 1.0


def test_training_in_the_requested_order_is_no_deviation() -> None:
    found = order.deviation(of(in_order()), 1)
    assert (found.value, found.errors) == (0.0, 0.0)


def test_trained_less_requested_written_out() -> None:
    """Two batches of two; the long group of the first is trained on with the second."""
    groups = [Group(0, b, n) for n, b in zip([10, 30, 20, 20], [0, 1, 0, 1], strict=True)]
    # After one batch: 10 and 20 were trained on, which are -10 and 0 from the means of their own
    # batches; 10 and 30 had been requested, -10 and 10. After two batches there is no difference.
    assert order.deviation(of(groups), 1).value == pytest.approx(-10 / 2 / 2)
    other_epoch = [*groups, *(Group(1, b, n) for n, b in ((1, 3), (9, 2), (5, 2), (5, 3)))]
    assert order.deviation(of(other_epoch), 1).value == pytest.approx(-10 / 2 / 2)


def test_the_standard_error_is_that_of_repetitions() -> None:
    noise = random.Random(3)
    found = [
        order.deviation(of(swapped(in_order(16, seed), lambda a, b: noise.random() < 0.3)), 1)
        for seed in range(200)
    ]
    spread = (sum(each.value**2 for each in found) / len(found)) ** 0.5
    assert sum(each.error for each in found) / len(found) == pytest.approx(spread, rel=0.25)


def test_overtaking_by_length_is_found_and_by_chance_is_not() -> None:
    noise = random.Random(5)
    blind, biased = [], []
    for seed in range(12):
        groups = in_order(64, seed)
        by_chance = swapped(groups, lambda a, b: noise.random() < 0.3)
        blind.append(order.deviation(of(by_chance), 1))
        biased.append(order.deviation(of(swapped(groups, lambda a, b: a.length < b.length)), 1))
    assert sum(each.errors < order.limit(1) for each in blind) >= 10
    assert all(each.value < 0 and each.errors > order.limit(1) for each in biased)


def test_lengths_that_grow_as_the_policy_learns_are_no_order() -> None:
    noise = random.Random(6)
    groups = [Group(g.epoch, g.batch, g.length + 500 * g.batch) for g in in_order()]
    found = order.deviation(of(swapped(groups, lambda a, b: noise.random() < 0.4)), 1)
    assert found.errors < order.limit(1)


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
            "step_time": 1.0 if step <= 16 else 0.5,
            "rollout/tokens_per_s": 100.0,
            "idle/rollout": 0.5,
            "idle/learner": 0.25,
            "draft/mean_acceptance_length": 3.0,
            "draft/acceptance_rate": 0.5,
        }
        for step in range(1, 21)
    ]
    found = drafting.figures(rows, 20)
    assert found["steps/s, later epochs"] == pytest.approx(2 / 1.5), "the last two are left out"
    assert found["steps/s"] == pytest.approx(17 / 16.5)
    assert found["rollout tokens/s, later epochs"] == 200.0
    assert (found["idle/rollout"], found["draft/mean_acceptance_length"]) == (0.5, 3.0)
    slower = {**found, "steps/s": found["steps/s"] / 2}
    assert drafting.ratio([found], [slower], "steps/s") == 2.0
    with pytest.raises(AssertionError, match="20 steps"):
        drafting.figures(rows, 21)
