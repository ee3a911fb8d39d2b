"""Draws held-out reward against seconds: a median line a side, and the runs of two of them."""

from __future__ import annotations

import statistics
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import msgspec
from matplotlib.axes import Axes

from benchmarks.charts import style


class Curve(msgspec.Struct, frozen=True):
    """One run."""

    side: str
    """As a legend calls it."""
    schedule: str
    bound: int
    """Lines are thicker where it is greater."""
    has_drafts: bool
    """Dashed without."""
    seed: int
    points: list[tuple[float, int, float]]
    """(seconds, version, held-out reward)."""


def reward_by_seconds(
    curves: Sequence[Curve], seconds: Mapping[str, float], goal: float, path: Path
) -> None:
    """Write the PNG.

    Args:
        curves: all runs.
        seconds: of each side to the goal, as the legend shows them.
        goal: held-out reward.
        path: the file.
    """
    made = style.figure(5.0, _title(seconds, goal))
    axes = made.subplots()
    order = sorted(seconds, key=lambda side: seconds[side])
    for rank, side in enumerate(order):
        found = [curve for curve in curves if curve.side == side]
        if side in (order[0], _base(seconds)):
            _runs(axes, found)
        _median(axes, found, f"{side}: {seconds[side]:.1f} s", len(order) - rank)
    axes.axhline(goal, color=style.FAINT, linewidth=0.9, linestyle=":", zorder=0)
    axes.annotate(
        f"{goal:g}", (0.01, goal), xycoords=("axes fraction", "data"), ha="left", va="bottom",
        fontsize=9, color=style.INK,
    )  # fmt: skip
    axes.set_xlim(0, 1.25 * max(seconds.values()))
    axes.set_xlabel("seconds since the run was ready")
    axes.set_ylabel("held-out reward (greedy)")
    axes.legend(
        frameon=False, fontsize=9, loc="lower right", title=f"median seconds to {goal:g}",
        title_fontsize=9, alignment="left",
    )  # fmt: skip
    style.quiet(axes)
    style.save(made, path)


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


def _runs(axes: Axes, curves: Sequence[Curve]) -> None:
    for curve in curves if len(curves) > 1 else ():
        seconds, _, rewards = zip(*sorted(curve.points), strict=True)
        axes.plot(seconds, rewards, linewidth=0.7, alpha=0.5, **_look(curve))


def _median(axes: Axes, curves: Sequence[Curve], label: str, order: int) -> None:
    seconds, rewards = zip(*median_curve(curves), strict=True)
    width = 1.2 if curves[0].bound <= 1 else 2.4
    axes.plot(seconds, rewards, linewidth=width, label=label, zorder=2 + order, **_look(curves[0]))


def _look(curve: Curve) -> dict[str, Any]:
    line = "-" if curve.has_drafts else (0, (4, 2))
    return {"color": style.COLOURS[curve.schedule], "linestyle": line}


def _base(seconds: Mapping[str, float]) -> str | None:
    """`synchronous` with drafts, if it is there."""
    return next((s for s in seconds if s.startswith("synchronous") and "no drafts" not in s), None)


def _title(seconds: Mapping[str, float], goal: float) -> str:
    """The quickest side, and how it stands to `synchronous`."""
    best = min(seconds, key=lambda side: seconds[side])
    base = _base(seconds)
    if base is None or base == best:
        return f"Held-out reward reaches {goal:g} first with {best}"
    return (
        f"To a held-out reward of {goal:g}, {best.replace(', bound', ' at bound')} is "
        f"{seconds[base] / seconds[best]:.1f} times as fast as synchronous"
    )
