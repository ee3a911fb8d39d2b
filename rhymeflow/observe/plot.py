"""`rhymeflow plot`: metrics of runs as curves, one panel per metric.

Runs that differ only in their seed are one line, their mean, with a band of one standard deviation
to either side. It is drawn where all of them have values, so that it does not jump where one ends.
"""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import accumulate, cycle, pairwise
from pathlib import Path
from typing import Any, Literal

import matplotlib
import numpy as np
from matplotlib.axes import Axes
from matplotlib.backends.backend_agg import FigureCanvasAgg
from matplotlib.figure import Figure
from matplotlib.ticker import MaxNLocator
from numpy.typing import NDArray

from rhymeflow.errors import UserError, nearest
from rhymeflow.observe import metrics
from rhymeflow.observe.learning import DIVERGENCE
from rhymeflow.observe.query import differences, fields_of, short_names, trained
from rhymeflow.store.damage import open_undamaged
from rhymeflow.store.previous_run import store_of
from rhymeflow.store.schema import EVENTS

SUFFIXES = (".png", ".svg")
_COLUMNS = 3
_PANEL = (4.4, 3.0)  # width and height, inches
_MARKED = 25  # a curve with at most this many points has a dot at each
_PALETTE = "tab10"

Axis = Literal["step", "time", "trajectories"]

STEPS_PER_S = "steps/s"
"""A metric that is computed here: steps per second, from one step to the next."""

METRICS = {
    "reward": "training reward",
    "eval/reward": "held-out reward",
    DIVERGENCE: "divergence from the teacher",
    "completions/mean_length": "response tokens",
    "staleness/mean": "staleness (versions)",
    STEPS_PER_S: "steps/s",
}
"""Metrics that are drawn by default, and the titles of their panels."""

_SEED = "run.seed"
_MOST_FIELDS = 2  # most fields in a label; if runs differ in more, labels are their directories
_UNITS = ((2 * 86_400.0, "days", 86_400.0), (7_200.0, "hours", 3_600.0), (600.0, "minutes", 60.0))

Values = NDArray[np.float64]


@dataclass(frozen=True)
class Curve:
    """A metric of one run, or the mean of several: `x`, `y` of shape [points]."""

    x: Values
    y: Values
    deviation: Values | None = None
    """Standard deviation between the runs at each point; `None` of one run."""


def unit_of(end: float) -> tuple[str, float]:
    """Return the unit for a time axis that ends at `end` seconds, and how many seconds it has."""
    return next(((name, scale) for above, name, scale in _UNITS if end > above), ("seconds", 1.0))


def grouped(paths: Sequence[Path]) -> dict[str, list[Path]]:
    """Group runs that differ in `run.seed` and nothing else, by labels that tell the groups apart.
    Raises `UserError` if a path is no run."""
    found: dict[str, list[Path]] = {}
    fields: dict[str, dict[str, Any]] = {}
    for path in dict.fromkeys(paths):
        store_of(path)
        own = {name: value for name, value in fields_of(path).items() if name != _SEED}
        key = json.dumps(own, sort_keys=True)
        fields[key] = own
        found.setdefault(key, []).append(path)
    labels = _labels([*fields.values()], [members[0] for members in found.values()])
    return {
        f"{label} ({len(members)} runs)" if len(members) > 1 else label: members
        for label, members in zip(labels, found.values(), strict=True)
    }


def _labels(fields: Sequence[dict[str, Any]], paths: Sequence[Path]) -> list[str]:
    found = differences(fields)
    if not 0 < len(found) <= _MOST_FIELDS:
        return short_names(paths)
    parts = [
        [f"{name.rpartition('.')[2]} {_shown(value)}" for value in values]
        for name, values in found.items()
    ]
    return [", ".join(each) for each in zip(*parts, strict=True)]


def _shown(value: Any) -> str:
    """A field's value as in a configuration."""
    return value if isinstance(value, str) else json.dumps(value, ensure_ascii=False)


class Points:
    """The metrics of a run, over `axis`."""

    def __init__(self, run_dir: Path, axis: Axis) -> None:
        self.rows = metrics.rows(run_dir)
        self._axis = axis
        self._trained = _trained_until(run_dir) if axis == "trajectories" else {}
        steps = [row for row in self.rows if "step_time" in row]
        self.names = {name for row in self.rows for name in row} - {"step", "time"}
        if len(steps) > 1:
            self.names.add(STEPS_PER_S)

    def curve(self, name: str, smooth: int) -> Curve | None:
        """Return the metric, if the run has it. `smooth`: each point is the mean of the last so
        many, weighted by their time if the metric is a rate or a share of time; evaluations, which
        are few, are not smoothed."""
        points = {}  # a step that was done again keeps the later value
        for row, value, seconds in self._values(name):
            if value is not None and (x := self._x(row)) is not None:
                points[x] = value, seconds
        if not points:
            return None
        points = dict(sorted(points.items()))
        y, seconds = np.array(list(points.values()), float).T
        smoothed = y if name.startswith("eval/") else _smoothed(y, smooth, seconds)
        return Curve(np.array(list(points), float), smoothed)

    def _values(self, name: str) -> list[tuple[dict[str, Any], Any, float]]:
        """(row, value of the metric, its weight in a mean), in order."""
        if name != STEPS_PER_S:
            is_weighted = metrics.is_time_weighted(name)
            return [
                (row, row.get(name), row.get("step_time") or 0.0 if is_weighted else 1.0)
                for row in self.rows
            ]
        rows = [row for row in self.rows if "step_time" in row]
        return [
            (after, (after["step"] - before["step"]) / seconds, seconds)
            for before, after in pairwise(rows)
            if (seconds := after["time"] - before["time"]) > 0
        ]

    def _x(self, row: dict[str, Any]) -> float | None:
        if self._axis == "trajectories":
            return self._trained.get(row["step"])
        return float(row[self._axis])


def _trained_until(run_dir: Path) -> dict[int, int]:
    """Trajectories that were trained on up to the end of each step."""
    with open_undamaged(run_dir / EVENTS) as reader:
        counts = trained(reader)
    return {0: 0} | dict(zip(counts, accumulate(counts.values()), strict=True))


def _smoothed(y: Values, count: int, weights: Values) -> Values:
    """Running means of the last `count` values; at the beginning, of those there are."""
    if count == 1:
        return y
    sums, total = (np.concatenate([[0.0], np.cumsum(each)]) for each in (y * weights, weights))
    ends = np.arange(1, len(y) + 1)
    starts = np.maximum(ends - count, 0)
    return (sums[ends] - sums[starts]) / np.maximum(total[ends] - total[starts], 1e-9)


def mean(curves: Sequence[Curve]) -> Curve | None:
    """Return the mean of the curves and its sample standard deviation, where all of them have
    values; curves are interpolated linearly. `None`: they have no x in common."""
    if len(curves) == 1:
        return curves[0]
    low, high = max(each.x[0] for each in curves), min(each.x[-1] for each in curves)
    x = np.unique(np.concatenate([each.x for each in curves]))
    x = x[(x >= low) & (x <= high)]
    if not len(x):
        return None
    y = np.stack([np.interp(x, each.x, each.y) for each in curves])
    return Curve(x, y.mean(axis=0), y.std(axis=0, ddof=1))


def check_names(asked: Sequence[str], runs: Sequence[Points]) -> list[str]:
    """Return the metrics to draw: those asked for, or those of `METRICS` that a run has. Raises
    `UserError` if no run has one of them."""
    known = {name for each in runs for name in each.names}
    for name in asked:
        if name not in known:
            raise UserError(f"--metric {name}: no run has it{nearest(name, known)}")
    names = list(dict.fromkeys(asked)) or [name for name in METRICS if name in known]
    if not names:
        raise UserError("there are no metrics yet: no step was completed")
    return names


# -- drawing ---------------------------------------------------------------------------------------


def plot(
    paths: Sequence[Path],
    output: Path,
    *,
    names: Sequence[str] = (),
    axis: Axis = "step",
    smooth: int = 1,
) -> None:
    """Draw metrics of runs to `output`, a PNG or an SVG, which is replaced. `names`: metrics as in
    `metrics.jsonl`, or `steps/s`; empty: `METRICS`. `smooth`: see `Points.curve`. Raises
    `UserError` if a path is no run, no run has such a metric, or the file cannot be written."""
    if output.suffix not in SUFFIXES:
        raise UserError(f"--output {output}: should end in {' or '.join(SUFFIXES)}")
    groups = grouped(paths)
    points = {path: Points(path, axis) for members in groups.values() for path in members}
    names = check_names(names, list(points.values()))
    figure, panels = _panels(len(names))
    scale, unit = 1.0, ""
    if axis == "time":
        rows = [row for each in points.values() for row in each.rows]
        unit, scale = unit_of(max(row["time"] for row in rows))
        unit += ", emulated" * any(
            "emulation/learner_behind" in each.names for each in points.values()
        )
    colours = matplotlib.colormaps[_PALETTE].colors  # type: ignore[attr-defined]
    for panel, name in zip(panels, names, strict=True):
        for (label, members), colour in zip(groups.items(), cycle(colours), strict=False):
            found = [points[path].curve(name, smooth) for path in members]
            _draw(panel, [each for each in found if each is not None], colour, scale, label)
        panel.set_title(METRICS.get(name, name), loc="left", fontsize=10)
        said = {"time": f"time ({unit})", "trajectories": "trained trajectories"}
        panel.set_xlabel(said.get(axis, axis))
        if axis == "step":
            panel.xaxis.set_major_locator(MaxNLocator(integer=True))
    _add_labels(figure, panels, list(groups))
    try:
        figure.savefig(output, dpi=120)
    except OSError as error:
        raise UserError(f"--output {output}: cannot be written: {error}") from error


def _panels(number: int) -> tuple[Figure, list[Axes]]:
    columns = min(number, _COLUMNS)
    rows = -(-number // columns)
    figure = Figure((_PANEL[0] * columns, _PANEL[1] * rows + 0.5), layout="constrained")
    FigureCanvasAgg(figure)
    panels: list[Axes] = []
    for place in range(1, number + 1):
        panel = figure.add_subplot(rows, columns, place, sharex=panels[0] if panels else None)
        panel.grid(alpha=0.25)
        panel.spines[["top", "right"]].set_visible(False)
        panels.append(panel)
    return figure, panels


def _draw(
    panel: Axes,
    curves: Sequence[Curve],
    colour: tuple[float, float, float],
    scale: float,
    label: str,
) -> None:
    """Draw the mean of the curves, or each of them if they have no x in common."""
    together = mean(curves) if curves else None
    for curve in [together] if together is not None else curves:
        x = curve.x / scale
        marker = "." if len(x) <= _MARKED else ""
        panel.plot(x, curve.y, color=colour, linewidth=1.4, marker=marker, label=label)
        if curve.deviation is not None:
            low, high = curve.y - curve.deviation, curve.y + curve.deviation
            panel.fill_between(x, low, high, color=colour, alpha=0.2, linewidth=0)


def _add_labels(figure: Figure, panels: Sequence[Axes], labels: Sequence[str]) -> None:
    if len(labels) == 1:
        figure.suptitle(labels[0], x=0.01, ha="left", fontsize=11)
        return
    lines = {line.get_label(): line for panel in panels for line in panel.get_lines()}
    named = [label for label in labels if label in lines]
    figure.legend(
        [lines[label] for label in named], named, loc="outside upper left", ncols=4, fontsize=9,
        frameon=False,
    )  # fmt: skip
