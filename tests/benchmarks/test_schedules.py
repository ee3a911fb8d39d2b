"""`bench schedules`: what is read in a run, when a goal is reached, length bias found or not."""

from __future__ import annotations

import argparse
import json
import math
import random
import sys
from pathlib import Path

import numpy as np
import pytest

from benchmarks import harness, schedules, simulated_schedules
from benchmarks.charts import Bar
from benchmarks.real_schedules import bias, follow, learning, runs
from benchmarks.real_schedules.runs import Evaluation, Group, Reached, Run
from benchmarks.real_schedules.sides import Side, sides
from rhymeflow.config.load import read_config
from rhymeflow.core.events import Evaluated, InstanceJoined, LearnerReady, VersionPublished
from rhymeflow.core.types import TrajectoryId
from rhymeflow.errors import UserError
from rhymeflow.store.writer import SqliteTrajectoryStore

BATCH = 4
"""Groups, of two members each, in made-up runs."""

# -- a run -----------------------------------------------------------------------------------------


def test_a_run_is_read_from_its_log(tmp_path: Path) -> None:
    store = SqliteTrajectoryStore(tmp_path / "events.db")
    store.record(5.0, [LearnerReady(0)])
    store.record(7.5, [InstanceJoined("rollout-0", 0, 8, 100)])
    store.record(8.0, [InstanceJoined("rollout-1", 0, 8, 100)])
    for group, row in enumerate((3, 1, 2)):
        store.put_group(group, row=row, epoch=0, prompt="?", prompt_tokens=[1], columns={})
    put(store, 0, 0, 3)
    put(store, 0, 1, 5)
    put(store, 0, 2, 2, is_finished=False)  # surplus
    put(store, 1, 0, 4, is_finished=False)
    store.put_consumed(0, version=0, members=(0, 1))
    store.record(9.0, [VersionPublished(1)])
    store.record(9.5, [Evaluated("rollout-0", 1, 0.5)])
    store.put_ending(2, "aborted", version=1, reason="stuck")
    store.commit()
    store.close()
    found = runs.read(tmp_path, 3)
    assert (found.ready, found.published, found.staleness) == (7.5, [9.0], 0)
    assert found.evaluations == [Evaluation(9.5, 1, 0.5)]
    assert found.groups == [
        Group(3, 0, 0, [3, 5, 2], ["consumed", "consumed", "aborted"]),
        Group(1, 0, None, [4, 0, 0], ["unfinished"] * 3),
        Group(2, 0, None, [0, 0, 0], ["aborted"] * 3),
    ]


def put(store: SqliteTrajectoryStore, group: int, member: int, length: int, *, is_finished=True):
    trajectory = TrajectoryId(group, member)
    store.put_segment(
        trajectory, start=0, version=0, instance="rollout-0", steps=length, drafted=0,
        tokens=[7] * length, logprobs=[-0.5] * length,
    )  # fmt: skip
    if is_finished:
        store.put_finished(trajectory, length=length, reason="stop")
        store.put_reward(trajectory, reward=1.0, components={})


def made_up(*rewards: float, pace: float = 1.0, groups=(), staleness: int = 0) -> Run:
    """Ready at 10 s, a version every `pace` seconds, evaluated every other version, at once."""
    published = [10 + pace * (i + 1) for i in range(2 * (len(rewards) - 1))]
    evaluations = [
        Evaluation((published[2 * i - 1] if i else 10.0) + 0.5, 2 * i, reward)
        for i, reward in enumerate(rewards)
    ]
    return Run(10.0, evaluations, published, staleness, list(groups))


def test_the_goal_is_reached_when_an_evaluation_is_known_and_not_between_two() -> None:
    run = made_up(0.3, 0.8, 0.86, 0.9, pace=2.0)
    assert runs.reached(run, 0.85) == Reached(True, 8.5, 18.5, 8.0, 4)
    assert runs.reached(run, 0.86).steps == 4
    assert runs.reached(run, 0.861).steps == 6
    assert runs.steps_per_second(run) == pytest.approx(0.5)


def test_what_is_known_first_counts_whatever_its_version() -> None:
    run = made_up(0.3, 0.5, 0.9, 0.9)
    late = [run.evaluations[0], run.evaluations[3], run.evaluations[2]]
    assert runs.reached(Run(10.0, late, run.published, 0, []), 0.85).steps == 6


def test_a_run_that_never_reached_it_counts_with_all_its_time() -> None:
    assert runs.reached(made_up(0.3, 0.5, 0.6), 0.85) == Reached(False, 4.5, 14.5, 4.0, 4)


# -- length bias -----------------------------------------------------------------------------------


def in_order(num_batches: int = 20, seed: int = 0) -> list[Group]:
    noise = random.Random(seed)
    return [
        Group(i, 0, i // BATCH, [max(1, int(noise.lognormvariate(4, 1))) for _ in "ab"],
              ["consumed"] * 2)
        for i in range(num_batches * BATCH)
    ]  # fmt: skip


def of(*groups: list[Group]) -> list[Run]:
    return [made_up(0.1, 0.2, groups=each) for each in groups]


def unfinished(group: Group) -> Group:
    return Group(group.row, group.epoch, None, [1, 1], ["unfinished"] * 2)


def swapped(groups: list[Group], is_overtaking) -> list[Group]:
    """Group i takes the place of i - BATCH, in the batch before, where that is so."""
    batches = [group.batch for group in groups]
    for i in range(BATCH, len(groups)):
        if batches[i - BATCH] == i // BATCH - 1 and is_overtaking(groups[i], groups[i - BATCH]):
            batches[i], batches[i - BATCH] = batches[i - BATCH], batches[i]
    return [
        Group(g.row, g.epoch, batch, g.lengths, g.endings)
        for g, batch in zip(groups, batches, strict=True)
    ]


def furthest(ours: list[Run], theirs: list[Run]) -> float:
    counts = [bias.count(side, theirs, 1) for side in (ours, theirs)]
    return learning.furthest(*counts)


CELLS = bias.NUM_CLASSES * len(bias.ENDINGS)


def test_the_limit_grows_with_the_comparisons() -> None:
    assert bias.limit(1) == pytest.approx(1.96, abs=0.005)
    assert bias.limit(CELLS) == pytest.approx(3.02, abs=0.01)


def test_fifths_are_by_the_reference_and_leave_other_epochs_out() -> None:
    groups = [Group(i, i // 5, i, [10 * (i % 5), 1000], ["consumed"] * 2) for i in range(10)]
    found = bias.classes(groups, 1)
    assert [found[i, 0, 0] for i in range(5)] == [0, 0, 1, 1, 2]
    assert [found[i, 0, 1] for i in range(5)] == [2, 3, 3, 4, 4]
    assert len(found) == 10


def test_who_trains_on_everything_does_not_differ_whatever_its_lengths() -> None:
    theirs, ours = of(in_order(seed=1), in_order(seed=2)), of(in_order(seed=3), in_order(seed=4))
    counts = bias.count(ours, theirs, 1)
    assert furthest(ours, theirs) == 0
    assert bias.shares(counts)[:, 0].tolist() == [1.0] * bias.NUM_CLASSES
    table = sum(counts.values())
    assert table.sum() == 2 * 2 * 20 * BATCH
    assert (table.sum(axis=1) == 64).all()


def test_long_responses_put_off_for_good_are_found_and_chance_is_not() -> None:
    groups = in_order(64)
    theirs = of(groups)
    by_length = sorted(groups, key=lambda group: -sum(group.lengths))
    long = {group.row for group in by_length[:20]}
    ours = of([unfinished(g) if g.row in long else g for g in groups])
    counts = bias.count(ours, theirs, 1)
    shares = bias.shares(counts)[:, 0]
    assert shares[0] > 0.97 > 0.75 > shares[4]
    assert furthest(ours, theirs) > bias.limit(CELLS)
    noise = random.Random(7)
    few = {noise.randrange(len(groups)) for _ in range(6)}
    by_chance = of([unfinished(g) if g.row in few else g for g in groups])
    assert 0 < furthest(by_chance, theirs) < bias.limit(CELLS)


def test_a_difference_without_spread_is_infinite() -> None:
    groups = in_order()
    assert furthest(of([unfinished(g) for g in groups]), of(groups)) == math.inf
    assert bias.Deviation(0.0, 0.0).errors == 0.0


def test_the_first_batches_are_what_was_drawn_first() -> None:
    assert bias.order(of(in_order()), 1).value == 0
    assert bias.delays(of(in_order()), 1) == [0.0] * 5


def test_what_is_consumed_less_what_is_drawn_written_out() -> None:
    """Two batches of two; the long one of the first is trained on with the second."""
    lengths, batches = [10, 30, 20, 20], [0, 1, 0, 1]
    groups = [
        Group(i, 0, batch, [length], ["consumed"])
        for i, (length, batch) in enumerate(zip(lengths, batches, strict=True))
    ]
    # After one batch: 10 and 20 were trained on, which are -10 and 0 from the means of their own
    # batches; 10 and 30 had been drawn. After two all was.
    assert bias.order(of(groups), 1).value == pytest.approx(-10 / 2 / 2)
    assert bias.out_of_order(of(groups), 1) == 2 / 4
    assert bias.delays(of(groups), 1) == [0, -1, 0, 1], "of four groups, none is in the third fifth"


def test_overtaking_by_length_is_found_and_by_chance_is_not() -> None:
    noise = random.Random(5)
    blind, biased = [], []
    for seed in range(12):
        groups = in_order(64, seed)
        by_chance = swapped(groups, lambda a, b: noise.random() < 0.3)
        by_length = swapped(groups, lambda a, b: sum(a.lengths) < sum(b.lengths))
        blind.append(bias.order(of(by_chance), 1))
        biased.append(bias.order(of(by_length), 1))
    assert sum(each.errors < bias.limit(1) for each in blind) >= 10
    assert all(each.value < 0 and each.errors > bias.limit(1) for each in biased)
    delays = bias.delays(of(by_length), 1)
    assert delays[0] < 0 < delays[-1]


def test_lengths_that_grow_as_the_policy_learns_are_no_order() -> None:
    noise = random.Random(6)
    groups = [
        Group(g.row, g.epoch, g.batch, [length + 500 * g.batch for length in g.lengths], g.endings)
        for g in in_order()
    ]
    found = bias.order(of(swapped(groups, lambda a, b: noise.random() < 0.4)), 1)
    assert found.errors < bias.limit(1)


# -- following a run -------------------------------------------------------------------------------

PYTHON = sys.executable
TRAINER = """#!{python}
import json, pathlib, signal, sys, time
def stop(*_):
    print("rhymeflow: interrupted")
    sys.exit(130)
signal.signal(signal.SIGINT, stop)
run_dir = pathlib.Path({run_dir!r})
run_dir.mkdir()
with open(run_dir / "metrics.jsonl", "w") as file:
    for step in range({steps}):
        print(json.dumps({{"step": step, "reward": 0.5}}), file=file, flush=True)
if {fails}:
    sys.exit("rhymeflow: the last word")
while {waits}:
    time.sleep(0.01)
"""


@pytest.fixture
def trainer(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    """Makes a program that is started in place of a training run; returns its run directory."""

    def make(*, steps: int = 3, fails: bool = False, waits: bool = False) -> Path:
        script, run_dir = tmp_path / "trainer", tmp_path / "run"
        script.write_text(
            TRAINER.format(
                python=PYTHON, run_dir=str(run_dir), steps=steps, fails=fails, waits=waits
            )
        )
        script.chmod(0o755)
        monkeypatch.setattr(sys, "executable", str(script))
        monkeypatch.setattr(follow, "SECONDS", 0.02)
        return run_dir

    return make


def test_a_run_is_stopped_when_it_is_enough(trainer, tmp_path: Path) -> None:
    run_dir = trainer(waits=True)
    seen = []

    def is_enough(rows: follow.Rows) -> bool:
        seen.append(len(rows))
        return len(rows) == 3

    follow.train(tmp_path / "config.yaml", run_dir, is_enough)
    assert seen.count(3) == 1, "it is told once"


def test_a_run_may_end_by_itself_and_its_failure_is_told(trainer, tmp_path: Path) -> None:
    follow.train(tmp_path / "config.yaml", trainer(), lambda rows: False)
    (tmp_path / "run" / "metrics.jsonl").unlink()
    (tmp_path / "run").rmdir()
    with pytest.raises(UserError, match=r"config.yaml failed: rhymeflow: the last word"):
        follow.train(tmp_path / "config.yaml", trainer(fails=True), lambda rows: False)


# -- the benchmark ---------------------------------------------------------------------------------


def arguments(*options: str) -> argparse.Namespace:
    parser = argparse.ArgumentParser()
    harness.add_common_arguments(parser)
    schedules.add_arguments(parser)
    return parser.parse_args(options)


@pytest.fixture
def trained(monkeypatch: pytest.MonkeyPatch) -> list[dict[str, str]]:
    """Runs are made up; returns the fields of those that were made."""
    made: list[dict[str, str]] = []
    paces = {"synchronous": 2.0, "rhymeflow": 0.8}

    def train(run_dir: Path, fields: dict[str, str], args) -> Run:
        run_dir.mkdir()
        made.append(fields)
        name = fields["schedule.name"]
        bare = 0.5 if "drafting.window" in fields else 0.0
        groups = in_order(seed=int(fields["run.seed"]))
        if name == "rhymeflow":
            groups = swapped(groups, lambda a, b: a.row % 3 == 0)
        pace = paces.get(name, 1.5) + bare + 0.1 * int(fields["run.seed"])
        bound = int(fields["schedule.max_staleness"])
        return made_up(0.3, 0.6, 0.9, 0.95, pace=pace, groups=groups, staleness=bound)

    monkeypatch.setattr(learning, "train", train)
    monkeypatch.setattr("benchmarks.real_schedules.sides.os.sched_getaffinity", lambda _: {4, 5})
    return made


def test_sides_are_every_schedule_and_the_references_without_drafts(trained) -> None:
    found = [str(side) for side in learning.sides_of(arguments())]
    assert found[:2] == ["synchronous, bound 0", "one_step, bound 1"]
    assert {"rhymeflow, bound 1", "rhymeflow, bound 3"} <= set(found)
    assert found[-2:] == ["synchronous, bound 0, no drafts", "staleflow, bound 1, no drafts"]
    assert sides(["bounded", "synchronous"], [1, 3]) == [
        Side("bounded", 1), Side("bounded", 3), Side("synchronous", 0),
    ]  # fmt: skip


def test_time_to_the_goal_is_paired_by_seed_and_judged(trained, tmp_path: Path) -> None:
    names = ("--schedule", "synchronous", "--schedule", "rhymeflow")
    options = ("--seeds", "2", "--epochs", "1", "--bound", "1")
    args = arguments("--parts", "learning", *names, *options)
    result = schedules.run(args)
    assert [fields["run.seed"] for fields in trained] == ["0"] * 3 + ["1"] * 3
    base, ours, _ = result["rows"]
    assert (ours["schedule"], ours["bound"], ours["drafts"]) == ("rhymeflow", 1, True)
    assert base["ratio"] == base["ratio, least"] == 1
    assert (ours["seconds"], ours["from start"], ours["published"]) == (3.9, 13.9, 3.4)
    assert (ours["steps to it"], ours["reached"]) == (4, "2 of 2")
    assert ours["ratio"] == pytest.approx((3.7 / 8.5 + 4.1 / 8.9) / 2, abs=1e-3)
    assert ours["consumed, by fifth"] == "1.000 1.000 1.000 1.000 1.000"
    assert ours["endings differ, standard errors"] == 0
    assert base["consumed less drawn, tokens"] == 0 != ours["consumed less drawn, tokens"]
    time, endings, order = result["targets"]
    assert time["name"] == "learning/rhymeflow, bound 1/synchronous"
    assert time["met"]
    assert endings["met"]
    assert order["target"] == 1.96


def test_runs_differ_from_the_recipe_in_what_is_said(trained) -> None:
    args = arguments("--schedule", "staleflow", "--eval-steps", "3", "--max-steps", "5")
    with_drafts, _, bare = learning.sides_of(args)
    fields = learning.fields_of(with_drafts, args, seed=4)
    config = learning.load("demo", fields)
    assert config.schedule.name == "staleflow"
    assert (config.run.eval_steps, config.run.eval_temperature, config.run.seed) == (3, 0, 4)
    assert config.learner.max_steps == 2 * 16 + 5, "the epochs that are judged, at least"
    assert (config.learner.cpus, config.rollout.cpus) == ((4,), ((5,), (5,)))
    other = learning.fields_of(bare, args, seed=4)
    assert other == {**fields, "drafting.window": "off"}


def test_a_run_goes_on_until_goal_and_epochs_are_there(tmp_path: Path, monkeypatch) -> None:
    enough = []
    monkeypatch.setattr(follow, "train", lambda path, run_dir, is_enough: enough.append(is_enough))
    monkeypatch.setattr(runs, "read", lambda run_dir, members: members)
    args = arguments("--epochs", "1", "--bound", "1")
    assert learning.train(tmp_path / "a", {"run.seed": "3"}, args) == 8
    assert read_config(str(tmp_path / "a.yaml"), {}).run.seed == 3
    steps = {step: {"reward": 0.5} for step in range(1, 20)}
    (is_enough,) = enough
    assert not is_enough({})
    assert not is_enough(steps)
    assert not is_enough({**steps, 4: {"reward": 0.5, "eval/reward": 0.84}})
    assert is_enough({**steps, 4: {"reward": 0.5, "eval/reward": 0.85}})
    assert not is_enough({4: {"reward": 0.5, "eval/reward": 0.85}})


def test_kept_runs_are_not_made_again_and_records_are_drawn(
    trained, tmp_path: Path, monkeypatch
) -> None:
    monkeypatch.setattr(harness, "RESULTS", tmp_path / "results")
    kept = ("--parts", "learning", "--runs", str(tmp_path / "runs"), "--seeds", "2")
    first = schedules.run(arguments(*kept))
    number = len(trained)
    again = schedules.run(arguments(*kept, "--record"))
    assert again["rows"] == first["rows"]
    assert len(trained) == number == 2 * 13
    for name in ("schedules-learning.png", "schedules-side-by-side.png"):
        assert (tmp_path / "results" / name).read_bytes().startswith(b"\x89PNG")
    lines = (tmp_path / "results" / "schedules-learning-runs.jsonl").read_text().splitlines()
    curve = json.loads(lines[1])
    assert (curve["side"], curve["seed"], curve["ready"]) == ("synchronous, bound 0", 1, 10.0)
    assert curve["points"][1] == [4.7, 2, 0.6]
    assert curve["published"][:2] == [2.1, 4.2]
    with pytest.raises(UserError, match="a run of other settings"):
        schedules.run(arguments(*kept, "--eval-steps", "4"))


def test_without_synchronous_there_is_nothing_to_compare_with(trained) -> None:
    args = arguments("--parts", "learning", "--schedule", "bounded", "--seeds", "1")
    result = schedules.run(args)
    assert result["targets"] == []
    assert "ratio" not in result["rows"][0]


def test_a_goal_that_is_missed_is_in_the_targets_name(trained) -> None:
    names = ("--schedule", "synchronous", "--schedule", "rhymeflow")
    args = arguments("--parts", "learning", *names, "--seeds", "1", "--goal", "0.99")
    result = schedules.run(args)
    assert result["targets"][0]["name"].endswith("synchronous, 2 not reached")
    assert result["rows"][0]["reached"] == "0 of 1"


def test_bars_are_of_schedules_as_they_draft() -> None:
    row = {"ratio": 0.5, "ratio, least": 0.4, "ratio, greatest": 0.8}
    sides = [("synchronous", 0, True), ("rhymeflow", 1, True), ("rhymeflow", 3, True)]
    sides += [("staleflow", 1, False)]
    rows = [{"schedule": s, "bound": b, "drafts": d, **row} for s, b, d in sides]
    found = learning.bars(rows)
    assert [(b.panel[:13], b.schedule, b.value, b.least, b.greatest) for b in found] == [
        (f"real, bound {bound}", schedule, 2.0, 1.25, 2.5)
        for bound in (1, 3)
        for schedule in ("synchronous", "rhymeflow")
    ]


def test_the_front_runs_what_was_asked_for(monkeypatch, tmp_path: Path) -> None:
    monkeypatch.setattr(harness, "RESULTS", tmp_path)
    asked = []
    for name, module in {**schedules.PARTS, "simulated": simulated_schedules}.items():
        monkeypatch.setattr(module, "run", lambda args, name=name: asked.append(name) or {})
    schedules.run(arguments())
    schedules.run(arguments("--parts", "learning,throughput"))
    schedules.run(arguments("--simulated", "--record"))
    assert asked == ["throughput", "learning", "throughput", "simulated"]
    assert not list(tmp_path.iterdir()), "nothing recorded, nothing drawn"
    (tmp_path / f"{simulated_schedules.RECORD}.json").write_text('{"rows": [{"x": 2.5}]}')
    monkeypatch.setattr(
        simulated_schedules, "bars", lambda rows: [Bar("simulated: a", "rhymeflow", rows[0]["x"])]
    )
    schedules.run(arguments("--simulated", "--record"))
    assert (tmp_path / schedules.PICTURE).stat().st_size > 1000


def test_weights_draw_as_many_groups_as_there_are() -> None:
    assert (bias._weights(7).sum(axis=1) == 7).all()
    assert np.array_equal(bias._weights(7), bias._weights(7))
