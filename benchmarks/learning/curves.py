"""Draws curves of several runs a side: means, with the band of their intervals."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path

from matplotlib.axes import Axes
from matplotlib.backends.backend_agg import FigureCanvasAgg
from matplotlib.figure import Figure
from matplotlib.ticker import MaxNLocator

from benchmarks.learning.figures import GOAL, Figures
from benchmarks.learning.intervals import interval
from benchmarks.learning.repeats import Common

COLOURS = ("#33333d", "#2a7fb8", "#d1495b", "#6a994e", "#8d6bb0")

Curve = list[tuple[int, float]]


def draw(path: Path, settings: Mapping[str, Mapping[str, Sequence[Figures]]], title: str) -> None:
    """Write a PNG: a column per setting; held-out reward above, repetition below.

    Args:
        path: the file.
        settings: by what a column is called: the runs of each side, by what a legend calls it.
        title: above it all.
    """
    figure = Figure(figsize=(4.6 * len(settings), 6.4), layout="constrained")
    FigureCanvasAgg(figure)
    columns = figure.subplots(2, len(settings), squeeze=False, sharey="row")
    for (rewards, repeated), (name, sides) in zip(columns.T, settings.items(), strict=True):
        rewards.set_title(name, fontsize=10, loc="left")
        for (side, runs), colour in zip(sides.items(), COLOURS, strict=False):
            _band(rewards, [run.held_out for run in runs], side, colour)
            _band(repeated, [repetition(run) for run in runs], side, colour, marker="o")
        epoch = next(iter(sides.values()))[0].epoch_steps
        rewards.axvspan(0, epoch, color="#eeeef2", zorder=0)
        rewards.axhline(GOAL, color="#bbbbbb", linewidth=0.8, linestyle=":")
        rewards.set_xlabel("step (shaded: first epoch)")
        repeated.set_xlabel("epoch")
        for axes in (rewards, repeated):
            axes.spines[["top", "right"]].set_visible(False)
        repeated.xaxis.set_major_locator(MaxNLocator(integer=True))
    columns[0][0].set_ylabel("held-out reward (greedy)")
    columns[1][0].set_ylabel("equal to the epoch before,\nup to the first difference")
    columns[0][-1].legend(frameon=False, loc="lower right")
    figure.suptitle(title, x=0.01, ha="left", fontsize=11)
    figure.savefig(path, dpi=110)


def repetition(run: Figures) -> Curve:
    """By epoch (the first is 1): the share of positions before the first difference."""
    return [
        (epoch + 1, (run.rhyming.get(epoch, none) + run.fresh.get(epoch, none)).shares()["prefix"])
        for none in [Common()]
        for epoch in sorted({*run.rhyming, *run.fresh})
    ]


def _band(axes: Axes, runs: Sequence[Curve], label: str, colour: str, marker: str = "") -> None:
    """The mean curve and the interval of each point, where every run has it."""
    values: dict[int, list[float]] = {}
    for curve in runs:
        for x, y in curve:
            values.setdefault(x, []).append(y)
    points = {x: interval(ys) for x, ys in values.items() if len(ys) == len(runs)}
    axes.plot(
        list(points),
        [point.mean for point in points.values()],
        color=colour,
        label=label,
        marker=marker,
        markersize=3,
    )
    low, high = ([getattr(p, end) for p in points.values()] for end in ("low", "high"))
    axes.fill_between(list(points), low, high, color=colour, alpha=0.15, linewidth=0)
