"""The benchmark of rhyming noise: its statistics, what it reads in a run, and that it goes on."""

from __future__ import annotations

import argparse
import json
import math
import random
import statistics
from pathlib import Path

import msgspec
import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from benchmarks import harness, rhyming
from benchmarks.learning import figures, repeats
from benchmarks.learning.figures import Figures
from benchmarks.learning.intervals import detectable, distribution, interval, quantile
from benchmarks.learning.repeats import Common, Response
from rhymeflow.config.load import read_config
from rhymeflow.core.events import Evaluated, VersionPublished
from rhymeflow.core.types import TrajectoryId
from rhymeflow.errors import UserError
from rhymeflow.observe.metrics import MetricsWriter
from rhymeflow.store.writer import SqliteTrajectoryStore

# -- statistics ------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("share", "degrees", "expected"),
    [  # the table of Abramowitz and Stegun, 26.10
        (0.975, 1, 12.706),
        (0.975, 2, 4.303),
        (0.975, 3, 3.182),
        (0.975, 4, 2.776),
        (0.975, 9, 2.262),
        (0.975, 30, 2.042),
        (0.9, 2, 1.886),
        (0.75, 5, 0.727),
        (0.9995, 6, 5.959),
    ],
)
def test_quantiles_are_the_tables(share, degrees, expected):
    assert quantile(share, degrees) == pytest.approx(expected, abs=5e-4)


def test_many_degrees_are_normal_and_the_distribution_is_symmetric():
    for t in (0.3, 1.0, 2.5):
        assert distribution(t, 5000) == pytest.approx(statistics.NormalDist().cdf(t), abs=1e-4)
        for degrees in (1, 2, 7):
            assert distribution(t, degrees) + distribution(-t, degrees) == pytest.approx(1.0)


def test_an_interval_written_out():
    found = interval([1.0, 2.0, 3.0])
    assert (found.low, found.mean, found.high) == pytest.approx((-0.4841, 2.0, 4.4841), abs=1e-4)
    assert str(found) == "2.000 ± 2.484"
    assert math.isnan(interval([5.0]).half)


def test_intervals_cover_as_often_as_they_say_and_show_what_they_say_they_would():
    noise = random.Random(0)
    samples = [[noise.gauss(3.0, 2.0) for _ in range(8)] for _ in range(4000)]
    found = [interval(sample) for sample in samples]
    covered = statistics.fmean(i.low <= 3.0 <= i.high for i in found)
    assert covered == pytest.approx(0.95, abs=0.012)
    shift = statistics.fmean(detectable(sample) for sample in samples)
    seen = statistics.fmean(i.low - 3.0 + shift > 0 for i in found)
    assert seen == pytest.approx(0.8, abs=0.05)


# -- what responses share --------------------------------------------------------------------------

texts = st.lists(st.integers(0, 2), min_size=1, max_size=12)


def tokens(values) -> np.ndarray:
    return np.array(values, dtype=np.int32)


@given(texts, texts)
def test_what_two_responses_share_position_by_position(one, other):
    found = repeats.common(tokens(one), tokens(other))
    prefix = 0
    while prefix < min(len(one), len(other)) and one[prefix] == other[prefix]:
        prefix += 1
    equal = sum(a == b for a, b in zip(one, other, strict=False))
    assert found == Common(1, int(one == other), max(len(one), len(other)), prefix, equal)


def test_shares_are_of_pairs_of_positions_and_of_what_had_the_same_text_before():
    total = repeats.common(tokens([1, 2, 3, 9]), tokens([1, 2, 4, 9, 9]))
    total += repeats.common(tokens([5, 6]), tokens([5, 6]))
    assert total.shares() == pytest.approx(
        {"identical": 1 / 2, "prefix": 4 / 7, "equal": 5 / 7, "agreement": 4 / 5}
    )


def response(row, epoch, member, text, reward=0.0) -> Response:
    return Response(row, epoch, member, tokens(text), reward)


def test_pairs_are_of_one_prompt_one_member_and_epochs_that_follow():
    made = [
        response(0, 2, 0, [1, 1]),  # not in order: a batch may end before one begun earlier
        response(0, 0, 0, [1, 2]),
        response(0, 1, 0, [1, 2]),
        response(1, 0, 0, [1, 2]),
        response(1, 2, 0, [1, 2]),  # epoch 1 is missing
        response(0, 0, 1, [1, 2]),
        response(0, 1, 1, [3, 2]),
    ]
    assert repeats.by_epoch(made, range(1)) == {1: Common(1, 1, 2, 2, 2), 2: Common(1, 0, 2, 1, 1)}
    assert repeats.by_epoch(made, range(2)) == {1: Common(2, 1, 4, 2, 3), 2: Common(1, 0, 2, 1, 1)}
    assert repeats.by_epoch(made, range(2, 4)) == {}


def test_distinct_responses_are_counted_by_prompt():
    made = [response(0, e, m, [7, e // 2]) for e in range(4) for m in range(2)]
    assert repeats.distinct(made) == 2 / 8
    assert repeats.distinct([*made, response(1, 0, 0, [7, 0])]) == 3 / 9


def test_halves_are_of_members_and_variance_is_of_groups():
    rewards = {0: [1, 1, 0, 0], 1: [0, 0, 0, 1]}
    made = [
        response(row, 0, member, [1], reward)
        for row, group in rewards.items()
        for member, reward in enumerate(group)
    ]
    assert repeats.halves(made, 4) == {0: 2 / 4 - 1 / 4}
    assert figures.group_variance(made) == {0: pytest.approx((1 / 4 + 3 / 16) / 2)}


def test_a_discovery_is_of_a_prompt_that_had_no_reward_in_the_first_epoch():
    rewards = {0: [[0, 0], [0, 1]], 1: [[0, 0], [0, 0]], 2: [[1, 0], [0, 0]], 3: [[0, 0], [1, 1]]}
    made = [
        response(row, epoch, member, [1], reward)
        for row, of_epochs in rewards.items()
        for epoch, group in enumerate(of_epochs)
        for member, reward in enumerate(group)
    ]
    late = response(4, 1, 0, [1], 1.0)  # never drawn in the first epoch
    assert figures.discoveries([*made, late]) == (3, 2)


# -- a run -----------------------------------------------------------------------------------------


def curve(*rewards, reward=(), epoch_steps=8, **more) -> Figures:
    values = {
        "epoch_steps": epoch_steps,
        "held_out": [(8 * index, held_out) for index, held_out in enumerate(rewards)],
        "reward": list(reward) or [0.5] * 8 * (len(rewards) - 1),
        "entropy": [0.1] * 8 * (len(rewards) - 1),
        "variance": {0: 0.2, 1: 0.1},
        "rhyming": {},
        "fresh": {1: Common(1, 0, 4, 2, 3)},
        "halves": {0: 0.5, 1: 0.0, 2: 0.1},
        "unsolved": 4,
        "discovered": 3,
        "distinct": 0.5,
        "staleness": 1.0,
    }
    return Figures(**{**values, **more})


def test_measures_of_a_curve():
    run = curve(0.2, 0.4, 0.8, 0.9, 1.0, reward=[0.0] * 8 + [1.0] * 8 + [0.5] * 16)
    assert figures.final(run) == pytest.approx(0.95)
    assert figures.area(run) == pytest.approx((0.6 + 0.85 + 0.95) / 3)
    assert figures.steps_to_goal(run) == pytest.approx(16 + 8 * 0.5)
    assert math.isnan(figures.steps_to_goal(curve(0.2, 0.4)))
    assert figures.MEASURES["training reward"](run) == pytest.approx(2 / 3)
    assert figures.MEASURES["first half of members less second, reward"](run) == 0.05
    assert figures.MEASURES["agreement, other members"](run) == pytest.approx(2 / 3)
    assert math.isnan(figures.MEASURES["agreement, rhyming members"](run))
    assert figures.MEASURES["unsolved in the first epoch, solved later"](run) == 0.75


def test_a_run_is_read_from_its_directory(tmp_path):
    """Two prompts, two epochs, two members of which the first rhymes, one segment or two."""
    config = read_config(
        "demo",
        {
            "data.size": "2",
            "rollout.num_generations": "2",
            "rollout.rhyming_noise": "0.5",
            "learner.groups_per_batch": "1",
            "learner.max_steps": "4",
        },
    )
    store = SqliteTrajectoryStore(tmp_path / "events.db")
    store.record(0.0, [Evaluated("rollout-0", 0, 0.25)])
    for step in range(4):
        put_group(store, step, row=step % 2, epoch=step // 2)
        store.record(1.0 + step, [VersionPublished(step + 1)])
    store.record(9.0, [Evaluated("rollout-0", 4, 0.75)])
    store.commit()
    store.close()
    writer = MetricsWriter(tmp_path, report_to=(), name="run", config={})
    for step in range(4):
        row = {"reward": 0.1 * step, "entropy": 0.2, "completions/mean_length": 3.0}
        writer.write(step + 1, float(step), row)
    writer.close()
    found = figures.read(tmp_path, config)
    assert (found.epoch_steps, found.staleness) == (2, 0.0)
    assert found.held_out == [(0, 0.25), (4, 0.75)]
    assert found.reward == pytest.approx([0.0, 0.1, 0.2, 0.3])
    assert found.rhyming == {1: Common(2, 2, 6, 6, 6)}
    assert found.fresh == {1: Common(2, 0, 6, 4, 4)}
    assert found.variance == {0: 0.25, 1: 0.25}
    assert found.halves == {0: 1.0, 1: 1.0}
    assert (found.unsolved, found.discovered) == (0, 0)
    assert found.distinct == 6 / 8


def put_group(store: SqliteTrajectoryStore, group: int, *, row: int, epoch: int) -> None:
    store.put_group(
        group, row=row, epoch=epoch, prompt="?", prompt_tokens=[1], columns={"answer": "1"}
    )
    for member, text in enumerate(([4, 5, 1], [4, 5, 10 + epoch])):
        trajectory = TrajectoryId(group, member)
        for start, end in ((0, 2), (2, 3)) if epoch else ((0, 3),):
            store.put_segment(
                trajectory,
                start=start,
                version=group,
                instance="rollout-0",
                steps=end - start,
                drafted=0,
                tokens=text[start:end],
                logprobs=[-0.5] * (end - start),
            )
        store.put_finished(trajectory, length=3, reason="stop")
        store.put_reward(trajectory, reward=1.0 - member, components={})
    store.put_consumed(group, version=group, members=(0, 1))


# -- the benchmark ---------------------------------------------------------------------------------


@pytest.fixture
def trained(monkeypatch):
    """Runs are made up; returns the directories of those that were made."""
    made: list[Path] = []

    def read(run_dir: Path, config) -> Figures:
        gain = 0.1 * config.run.seed + 0.03 * config.rollout.rhyming_noise
        return curve(0.3, 0.5 + gain, 0.6 + gain)

    def call(command, name) -> None:
        config = read_config(command[-1], {})
        made.append(Path(config.run.output_dir))
        made[-1].mkdir()

    monkeypatch.setattr(figures, "read", read)
    monkeypatch.setattr(rhyming, "call", call)
    return made


def arguments(tmp_path, *options) -> argparse.Namespace:
    parser = argparse.ArgumentParser()
    harness.add_common_arguments(parser)
    rhyming.add_arguments(parser)
    return parser.parse_args(["--setting", "slow", "--runs", str(tmp_path / "runs"), *options])


def test_runs_take_turns_and_differences_are_by_seed(trained, tmp_path):
    result = rhyming.run(arguments(tmp_path, "--seeds", "2"))
    names = [directory.name for directory in trained]
    assert names[:3] == ["slow-0-0", "slow-0.5-0", "slow-1-0"]
    assert names[3:] == ["slow-1-1", "slow-0.5-1", "slow-0-1"]
    rows = {row["measure"]: row for row in result["rows"]}
    final = rows["held-out reward, last quarter"]
    assert final["0"].startswith("0.650 ± ")
    assert final["1 less 0"] == "0.030 ± 0.000 (0.000)"
    assert rows["agreement, rhyming members"]["1 less 0"] == "–"
    assert rows["steps to 0.85 held out"]["0"] == "–"
    targets = {target["name"]: target for target in result["targets"]}
    assert targets["rhyming/slow/0.5 less 0/area, lower end"]["value"] == pytest.approx(0.015)
    assert all(target["met"] for target in targets.values())


def test_what_is_complete_is_not_made_again_and_what_is_not_is_made_anew(trained, tmp_path):
    first = rhyming.run(arguments(tmp_path, "--seeds", "1"))
    trained.clear()
    interrupted = tmp_path / "runs" / "slow-0.5-1"
    interrupted.mkdir()
    (interrupted / "events.db").write_text("half a run")
    rhyming.run(arguments(tmp_path, "--seeds", "2"))
    assert sorted(d.name for d in trained) == ["slow-0-1", "slow-0.5-1", "slow-1-1"]
    assert not (interrupted / "events.db").exists()
    trained.clear()
    again = rhyming.run(arguments(tmp_path, "--seeds", "1"))
    assert again["rows"] == first["rows"]
    assert trained == []


def test_a_run_of_other_settings_is_refused(trained, tmp_path):
    rhyming.run(arguments(tmp_path, "--seeds", "1"))
    with pytest.raises(UserError, match="a run of other settings"):
        rhyming.run(arguments(tmp_path, "--seeds", "1", "--steps", "40"))


def test_runs_differ_in_share_and_seed_only(trained, tmp_path):
    rhyming.run(arguments(tmp_path, "--seeds", "2", "--shares", "0,0.25"))
    configs = [
        read_config(str(path), {}).model_dump() for path in (tmp_path / "runs").glob("*.yaml")
    ]
    assert len(configs) == 4
    found = set()
    for config in configs:
        found.add((config["rollout"].pop("rhyming_noise"), config["run"].pop("seed")))
        config["run"].pop("output_dir")
        assert config == configs[0]
        assert config["drafting"]["window"] == "off"
        assert config["schedule"]["name"] == "one_step"
    assert found == {(share, seed) for share in (0.0, 0.25) for seed in (0, 1)}


def test_records_hold_every_curve_and_the_picture_is_drawn(trained, tmp_path, monkeypatch):
    monkeypatch.setattr(harness, "RESULTS", tmp_path / "results")
    picture = tmp_path / "picture.png"
    rhyming.run(arguments(tmp_path, "--seeds", "2", "--record", "--picture", str(picture)))
    assert picture.read_bytes().startswith(b"\x89PNG")
    lines = (tmp_path / "results" / "rhyming-runs.jsonl").read_text().splitlines()
    runs = [json.loads(line) for line in lines]
    assert [(run["share"], run["seed"]) for run in runs] == [
        (share, seed) for share in (0.0, 0.5, 1.0) for seed in (0, 1)
    ]
    curves = {name: runs[3][name] for name in Figures.__match_args__}
    assert msgspec.convert(curves, Figures, strict=False) == curve(0.3, 0.615, 0.715)
    assert (tmp_path / "results" / "rhyming.json").exists()


@pytest.mark.parametrize("text", ["0.5,1", "0", "0,2", "0,a"])
def test_shares_need_0_to_compare_with(text):
    with pytest.raises(argparse.ArgumentTypeError):
        rhyming._shares(text)
    assert rhyming._shares("1,0,0.5") == [0.0, 0.5, 1.0]
