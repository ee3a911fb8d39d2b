"""`rhymeflow plot`: which runs are one line, what its band is, and what is drawn."""

from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from matplotlib.figure import Figure

from rhymeflow import cli
from rhymeflow.config.run import RunConfig
from rhymeflow.observe.metrics import MetricsWriter
from rhymeflow.observe.plot import Curve, Points, _smoothed, grouped, mean
from tests.observe.runs import made


def curve(x: list[float], y: list[float]) -> Curve:
    return Curve(np.array(x, float), np.array(y, float))


def with_rewards(run_dir: Path, rewards: list[float]) -> Path:
    """Other rewards in place of those that were made up."""
    (run_dir / "metrics.jsonl").unlink()
    writer = MetricsWriter(run_dir, run=RunConfig(report_to=()), name="run", config={})
    writer.write(0, 0.5, {"eval/reward": 0.25})
    for step, reward in enumerate(rewards, start=1):
        writer.write(step, 10.0 * step**2, {"reward": reward, "step_time": 1.0})
    writer.close()
    return run_dir


@pytest.mark.parametrize(
    ("curves", "x", "y", "deviation"),
    [
        (([1, 2, 3], [1, 2, 3], [1, 2, 3], [3, 2, 7]), [1, 2, 3], [2, 2, 5], [2**0.5, 0, 8**0.5]),
        (([0, 2, 4], [0, 2, 4], [1, 3], [0, 0]), [1, 2, 3], [0.5, 1, 1.5], None),
        (([0, 1], [5, 6]), [0, 1], [5, 6], None),
    ],
)
def test_a_mean_is_taken_where_all_curves_are(curves, x, y, deviation):
    found = mean([curve(*pair) for pair in zip(curves[::2], curves[1::2], strict=True)])
    assert (found.x.tolist(), found.y.tolist()) == (x, y)
    assert (found.deviation is None) == (len(curves) == 2)
    if deviation is not None:
        assert found.deviation == pytest.approx(deviation)
    assert mean([curve([0, 1], [0, 0]), curve([2, 3], [0, 0])]) is None


PAIRS = st.tuples(st.integers(-99, 99), st.integers(1, 9))


@given(st.lists(PAIRS, min_size=1, max_size=20), st.integers(1, 25))
def test_smoothing_is_the_mean_of_the_last_values(values, count):
    wanted = []
    for end in range(1, len(values) + 1):
        last = values[max(end - count, 0) : end]
        wanted.append(sum(y * seconds for y, seconds in last) / sum(s for _, s in last))
    y, seconds = np.array(values, float).T
    assert _smoothed(y, count, seconds) == pytest.approx(wanted)


def test_axes(tmp_path):
    run = with_rewards(made(tmp_path / "run"), [0.5, 0.25, 1.0])
    by = {axis: Points(run, axis).curve("reward", 1) for axis in ("step", "time", "trajectories")}
    assert all(each is not None and each.y.tolist() == [0.5, 0.25, 1] for each in by.values())
    assert {axis: each.x.tolist() for axis, each in by.items() if each is not None} == {
        "step": [1, 2, 3], "time": [10, 40, 90], "trajectories": [4, 8, 12],
    }  # fmt: skip
    for name, smooth, wanted in (
        ("reward", 2, [0.5, 0.375, 0.625]),
        ("steps/s", 1, [1 / 30, 1 / 50]),
        ("steps/s", 2, [1 / 30, 2 / 80]),  # steps by their time, no mean of rates
    ):
        found = Points(run, "step").curve(name, smooth)
        assert (found.x[-1], found.y.tolist()) == (3, pytest.approx(wanted))


@pytest.fixture
def figures(monkeypatch):
    """What was drawn."""
    found: list[Figure] = []
    save = Figure.savefig

    def savefig(self: Figure, *args: Any, **options: Any) -> None:
        found.append(self)
        save(self, *args, **options)

    monkeypatch.setattr(Figure, "savefig", savefig)
    return found


def test_a_picture_of_two_settings_with_two_seeds_each(tmp_path, figures, capsys):
    runs = [
        with_rewards(made(tmp_path / f"{rate}-{seed}", seed=seed, learning_rate=rate),
                     [0.1, 0.2 + seed, rate])
        for rate in (1e-4, 2e-4)
        for seed in (0, 1)
    ]  # fmt: skip
    assert [*grouped(runs).values()] == [runs[:2], runs[2:]]
    assert grouped([runs[0], runs[0]]) == {"0.0001-0": runs[:1]}, "is not its own repetition"
    paths = [*map(str, runs)]
    output = tmp_path / "curves.png"
    assert cli.main(["plot", *paths, "--output", str(output), "--x", "time"]) == 0
    assert capsys.readouterr().out == f"{output}\n"
    assert output.read_bytes().startswith(b"\x89PNG")
    panels = figures[0].get_axes()
    assert [panel.get_title(loc="left") for panel in panels] == [
        "training reward", "held-out reward", "steps/s",
    ]  # fmt: skip
    assert panels[0].get_xlabel() == "time (seconds)"
    lines = panels[0].get_lines()
    assert len(lines) == len(panels[0].collections) == 2
    assert lines[0].get_ydata()[1] == pytest.approx(0.7)
    assert [each.get_text() for each in figures[0].legends[0].get_texts()] == [
        "learning_rate 0.0001 (2 runs)", "learning_rate 0.0002 (2 runs)",
    ]  # fmt: skip
    options = ["--metric", "reward", "--output", str(tmp_path / "curves.svg")]
    assert cli.main(["plot", paths[0], *options]) == 0
    assert "<svg" in (tmp_path / "curves.svg").read_text()
    (panel,) = figures[1].get_axes()
    assert panel.get_lines()[0].get_xdata().tolist() == [1, 2, 3]
