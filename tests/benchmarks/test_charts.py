"""Charts: a picture is written, of the size a README shows, and its title says what the rows do."""

from __future__ import annotations

from pathlib import Path

import matplotlib.image
import pytest

from benchmarks import charts
from benchmarks.charts import Bar, Curve, DraftingCurve, drafting, learning, style, timelines
from benchmarks.charts import schedules as bars
from rhymeflow.config.load import build_config
from rhymeflow.sim.simulate import run
from rhymeflow.sim.timeline import Timeline
from rhymeflow.sim.workload import workload

SIDES = {"synchronous, bound 0": 20.0, "rhymeflow, bound 1": 8.0}


def assert_drawn(path: Path) -> None:
    pixels = matplotlib.image.imread(path)
    assert pixels.shape[1] == style.WIDTH * style.DPI
    assert len({tuple(pixel) for pixel in pixels.reshape(-1, 4)[::7]}) > 10


def test_every_schedule_has_a_colour_of_its_own() -> None:
    from benchmarks.real_schedules.sides import NAMES

    assert set(NAMES) <= set(style.COLOURS)
    assert len(set(style.COLOURS.values())) == len(style.COLOURS)


def test_schedules_side_by_side(tmp_path: Path) -> None:
    rows = [
        Bar("simulated: tokens/s", "rhymeflow", 3.14),
        Bar("simulated: tokens/s", "synchronous", 1.0),
        Bar("real: seconds", "rhymeflow", 1.96, 1.8, 2.1),
    ]
    charts.side_by_side(rows, tmp_path / "a.png")
    assert_drawn(tmp_path / "a.png")
    panels = {"simulated: tokens/s": rows[:2], "real: seconds": rows[2:]}
    assert bars._title(panels) == "rhymeflow is 2.0 to 3.1 times as fast as synchronous"
    assert bars._title({"a": rows[:1]}) == "rhymeflow is 3.1 times as fast as synchronous"
    assert bars._title({"a": rows[1:2]}) == "Schedules side by side"


def test_drafting_by_epoch(tmp_path: Path) -> None:
    sides = [
        DraftingCurve("without drafts", [1.0, 1.0], [], [1000.0, 1000.0]),
        DraftingCurve("with drafts", [1.2, 5.0], [0.3, 0.7], [1100.0, 1500.0]),
    ]
    charts.drafting_by_epoch(sides, tmp_path / "a.png")
    assert_drawn(tmp_path / "a.png")
    assert "makes 5.0 tokens, and rollouts run at 1.5 times" in drafting._title(sides)


def curves() -> list[Curve]:
    return [
        Curve(side, side.partition(",")[0], seed, True, seed, [
            (0.0, 0, 0.4), (seconds / 2 + seed, 2, 0.7 + 0.01 * seed), (seconds, 4, 0.9),
            *([(seconds + 1, 6, 0.9)] if seed else []),
        ])
        for side, seconds in SIDES.items()
        for seed in range(3)
    ]  # fmt: skip


def test_reward_by_seconds(tmp_path: Path) -> None:
    charts.reward_by_seconds(curves(), SIDES, 0.85, tmp_path / "a.png")
    assert_drawn(tmp_path / "a.png")
    assert learning._title(SIDES, 0.85).startswith(
        "To a held-out reward of 0.85, rhymeflow at bound 1 is 2.5 times as fast"
    )
    assert learning._title({"synchronous, bound 0": 3.0}, 0.85).endswith("synchronous, bound 0")


def test_the_median_curve_is_of_versions_that_all_runs_have() -> None:
    found = learning.median_curve(curves()[:3])
    assert found == [(0.0, 0.4), (11.0, pytest.approx(0.71)), (20.0, 0.9)]


def test_before_and_after(tmp_path: Path) -> None:
    found = []
    for schedule in ("synchronous", "staleflow"):
        config = build_config(
            {
                "schedule.name": schedule,
                "rollout.num_instances": 3,
                "rollout.max_completion_length": 100,
                "learner.max_steps": 4,
                "learner.groups_per_batch": 8,
            },
            where="test",
        )
        found.append(Timeline())
        run(config, workload(config, None), timeline=found[-1])
    charts.before_and_after(*found, tmp_path / "a.png")
    assert_drawn(tmp_path / "a.png")
    assert timelines._steps(found[0]) == timelines._steps(found[1]) == 4
