"""The chart of `bench schedules`: held-out reward against seconds; a median line for each side.

The runs of the fastest side and of `synchronous` are drawn as thin lines, too.
"""

from __future__ import annotations

import statistics
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import msgspec
from matplotlib.backends.backend_agg import FigureCanvasAgg
from matplotlib.figure import Figure

INK, FAINT = "#33333d", "#bbbbbb"
WIDTH, HEIGHT, DPI = 9.0, 5.0, 110
COLOURS = {
    "synchronous": "#33333d",
    "one_step": "#9a9aa8",
    "bounded": "#8d6bb0",
    "partial": "#b0763b",
    "staleflow": "#2a7fb8",
    "histopipe": "#6a994e",
    "rhymeflow": "#d1495b",
}


class Curve(msgspec.Struct, frozen=True):
    """One run."""

    side: str
    """As the legend calls it."""
    schedule: str
    bound: int
    """Lines are thicker above 1."""
    has_drafts: bool
    """Lines are dashed without."""
    seed: int
    points: list[tuple[float, int, float]]
    """(seconds, version, held-out reward)."""


def reward_by_seconds(
    curves: Sequence[Curve], seconds: Mapping[str, float], goal: float, path: Path
) -> None:
    """Write the PNG; `seconds`: each side's median to the goal, as the legend shows them."""
    figure = Figure(figsize=(WIDTH, HEIGHT), layout="constrained")
    FigureCanvasAgg(figure)
    figure.suptitle(title(seconds, goal), x=0.01, ha="left", fontsize=12, color=INK)
    axes = figure.subplots()
    order = sorted(seconds, key=lambda side: seconds[side])
    for rank, side in enumerate(order):
        found = [curve for curve in curves if curve.side == side]
        times, rewards = zip(*median_curve(found), strict=True)
        look: dict[str, Any] = {
            "color": COLOURS[found[0].schedule],
            "linestyle": "-" if found[0].has_drafts else (0, (4, 2)),
        }
        label, width = f"{side}: {seconds[side]:.1f} s", 1.2 if found[0].bound <= 1 else 2.4
        zorder = 2 + len(order) - rank
        axes.plot(times, rewards, label=label, linewidth=width, zorder=zorder, **look)
        if side in (order[0], _baseline(seconds)):
            for curve in found:
                times, _, rewards = zip(*sorted(curve.points), strict=True)
                axes.plot(times, rewards, linewidth=0.7, alpha=0.5, **look)
    axes.axhline(goal, color=FAINT, linewidth=0.9, linestyle=":", zorder=0)
    axes.set_xlim(0, 1.25 * max(seconds.values()))
    axes.set_xlabel("seconds since the run was ready")
    axes.set_ylabel("held-out reward (greedy)")
    axes.legend(
        frameon=False, fontsize=9, loc="lower right", title=f"median seconds to {goal:g}",
        title_fontsize=9, alignment="left",
    )  # fmt: skip
    axes.spines[["top", "right"]].set_visible(False)
    figure.savefig(path, dpi=DPI)


def median_curve(curves: Sequence[Curve]) -> list[tuple[float, float]]:
    """(seconds, reward): medians over the runs, of each version that all of them evaluated."""
    found: dict[int, list[tuple[float, float]]] = {}
    for curve in curves:
        for seconds, version, reward in curve.points:
            found.setdefault(version, []).append((seconds, reward))
    return [
        (statistics.median(s for s, _ in each), statistics.median(r for _, r in each))
        for _, each in sorted(found.items())
        if len(each) == len(curves)
    ]


def title(seconds: Mapping[str, float], goal: float) -> str:
    """The fastest side, and its ratio to `synchronous`."""
    best, base = min(seconds, key=lambda side: seconds[side]), _baseline(seconds)
    if base is None or base == best:
        return f"Held-out reward reaches {goal:g} first with {best}"
    return (
        f"To a held-out reward of {goal:g}, {best.replace(', bound', ' at bound')} is "
        f"{seconds[base] / seconds[best]:.1f} times as fast as synchronous"
    )


def _baseline(seconds: Mapping[str, float]) -> str | None:
    return next((s for s in seconds if s.startswith("synchronous") and "no drafts" not in s), None)
