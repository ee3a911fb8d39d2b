"""The picture of `bench emulated`: held-out reward over seconds of the cluster."""

from __future__ import annotations

import statistics
from collections.abc import Sequence

from matplotlib.backends.backend_agg import FigureCanvasAgg
from matplotlib.figure import Figure

from benchmarks import harness
from benchmarks.clusters.runs import BASE, DRAFTED, DRAWN_EVERY, GOAL, OURS, Run

LABELS = {
    BASE: "synchronous",
    DRAFTED: "synchronous, drafts",
    OURS: "rhymeflow, staleness at most 1",
}
HOUR = 3600.0


def draw(runs: Sequence[Run]) -> None:
    """Write `emulated.png`: a line through the medians of each side's runs, and each run as a thin
    one. Runs that were not evaluated over their whole length are left out."""
    figure = Figure(figsize=(9, 4.2), dpi=110, layout="constrained")
    FigureCanvasAgg(figure)
    axes = figure.subplots()
    for number, (side, label) in enumerate(LABELS.items()):
        curves = [curve(each) for each in runs if each.side == side and 0 in each.rewards]
        for hours, rewards in curves:
            axes.plot(hours, rewards, color=f"C{number}", alpha=0.25, linewidth=1)
        if curves:
            hours, rewards = (
                [statistics.median(values) for values in zip(*part, strict=False)]
                for part in zip(*curves, strict=True)
            )
            axes.plot(hours, rewards, color=f"C{number}", label=label, linewidth=2.2, marker=".")
    axes.axhline(GOAL, color="grey", linewidth=0.8, linestyle=":")
    axes.set_xlabel("hours of the cluster")
    axes.set_ylabel("held-out reward")
    axes.set_title("Emulated: Qwen3-30B-A3B on 16 H20, times from its cost model", fontsize=10)
    axes.legend(loc="lower right")
    axes.grid(alpha=0.3)
    figure.savefig(harness.RESULTS / "emulated.png")


def curve(run: Run) -> tuple[list[float], list[float]]:
    """Hours and rewards at the versions that are evaluated in every run."""
    at = [0.0, *run.published]
    versions = [version for version in sorted(run.rewards) if version % DRAWN_EVERY == 0]
    return [at[each] / HOUR for each in versions], [run.rewards[each] for each in versions]
