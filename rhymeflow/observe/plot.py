"""`rhymeflow plot`: curves of runs as a picture, a panel a metric.

Holds true: runs that differ only in their seed are one line with a band, the mean and one standard
deviation to either side; a line has the same colour in all panels. Reads run directories only.
"""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

import matplotlib
from matplotlib.artist import Artist
from matplotlib.axes import Axes
from matplotlib.backends.backend_agg import FigureCanvasAgg
from matplotlib.figure import Figure
from matplotlib.ticker import MaxNLocator

from rhymeflow.errors import UserError
from rhymeflow.observe.curves import METRICS, Axis, Curve, Points, check_names, grouped, mean
from rhymeflow.observe.curves import unit_of as unit_of_time

SUFFIXES = (".png", ".svg")
_COLUMNS = 3
_PANEL = (4.4, 3.0)
"""Width and height, inches."""
_MARKED = 25
"""Points of a curve up to which each has a dot."""
_PALETTE = "tab10"


def plot(
    paths: Sequence[Path],
    output: Path,
    *,
    names: Sequence[str] = (),
    axis: Axis = "step",
    smooth: int = 1,
) -> None:
    """Draw metrics of runs to `output`, a PNG or an SVG, in place of what is there.

    `names`: of metrics as in `metrics.jsonl`, and `steps/s`; none: `METRICS`. `smooth`: a point is
    the mean of so many, it and those before it, but for evaluations.

    Raises:
        UserError: a path is no run, no run has such a metric, or the file cannot be written.
    """
    if output.suffix not in SUFFIXES:
        raise UserError(f"--output {output}: should end in {' or '.join(SUFFIXES)}")
    groups = grouped(paths)
    points = {path: Points(path, axis) for group in groups for path in group.paths}
    names = check_names(names, list(points.values()))
    figure, panels = _panels(len(names))
    scale, unit = 1.0, ""
    if axis == "time":
        rows = [row for each in points.values() for row in each.rows]
        unit, scale = unit_of_time(max(row["time"] for row in rows))
    colours = matplotlib.colormaps[_PALETTE].colors  # type: ignore[attr-defined]
    for panel, name in zip(panels, names, strict=True):
        for place, group in enumerate(groups):
            found = [points[path].curve(name, smooth) for path in group.paths]
            curves = [each for each in found if each is not None]
            _draw(panel, curves, colours[place % len(colours)], scale, group.label)
        panel.set_title(METRICS.get(name, name), loc="left", fontsize=10)
        panel.set_xlabel(
            {"time": f"time ({unit})", "step": "step"}.get(axis, "trained trajectories")
        )
        if axis == "step":
            panel.xaxis.set_major_locator(MaxNLocator(integer=True))
    _entitle(figure, panels, [group.label for group in groups])
    try:
        figure.savefig(output, dpi=120)
    except OSError as error:
        raise UserError(f"--output {output}: cannot be written: {error}") from error


def _panels(number: int) -> tuple[Figure, list[Axes]]:
    columns = min(number, _COLUMNS)
    rows = -(-number // columns)
    size = _PANEL[0] * columns, _PANEL[1] * rows + 0.5
    figure = Figure(figsize=size, layout="constrained")
    FigureCanvasAgg(figure)
    grid = figure.subplots(rows, columns, squeeze=False, sharex=True).ravel()
    for unused in grid[number:]:
        unused.remove()
    panels = list(grid[:number])
    for panel in panels:
        panel.grid(alpha=0.25)
        panel.tick_params(labelbottom=True)
        for side in ("top", "right"):
            panel.spines[side].set_visible(False)
    return figure, panels


def _draw(
    panel: Axes,
    curves: Sequence[Curve],
    colour: tuple[float, float, float],
    scale: float,
    label: str,
) -> None:
    """One line; of curves that have no x in common, each."""
    together = mean(curves) if curves else None
    for curve in [together] if together is not None else curves:
        x = curve.x / scale
        marker = "." if len(x) <= _MARKED else ""
        panel.plot(x, curve.y, color=colour, linewidth=1.4, marker=marker, label=label)
        if curve.deviation is not None:
            low, high = curve.y - curve.deviation, curve.y + curve.deviation
            panel.fill_between(x, low, high, color=colour, alpha=0.2, linewidth=0)


def _entitle(figure: Figure, panels: Sequence[Axes], labels: Sequence[str]) -> None:
    if len(labels) == 1:
        figure.suptitle(labels[0], x=0.01, ha="left", fontsize=11)
        return
    lines: dict[object, Artist] = {}
    for panel in panels:
        for line in panel.get_lines():
            lines.setdefault(line.get_label(), line)
    shown = [label for label in labels if label in lines]
    figure.legend(
        [lines[label] for label in shown], shown, loc="outside upper left", ncols=4, fontsize=9,
        frameon=False,
    )  # fmt: skip


__all__ = ["plot"]
