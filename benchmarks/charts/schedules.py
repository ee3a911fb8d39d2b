"""Draws the schedules side by side: how many times as fast as `synchronous`, a panel a workload."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

import msgspec
from matplotlib.axes import Axes

from benchmarks.charts import style


class Bar(msgspec.Struct, frozen=True):
    """One schedule's figure in one panel."""

    panel: str
    """Title of its panel, `simulated: ...` or `real: ...`; panels stand in order of appearance."""
    schedule: str
    value: float
    """How many times as fast as `synchronous`, which has 1."""
    least: float | None = None
    """Ends of the whisker, if there is one."""
    greatest: float | None = None


def side_by_side(rows: Sequence[Bar], path: Path) -> None:
    """Write the PNG; no two bars of a panel are of one schedule."""
    panels = {row.panel: [other for other in rows if other.panel == row.panel] for row in rows}
    most = max(map(len, panels.values()))
    columns = len(panels) if len(panels) <= 3 else 2
    num_rows = -(-len(panels) // columns)
    made = style.figure(0.4 + (0.8 + 0.36 * most) * num_rows, _title(panels))
    places = list(made.subplots(num_rows, columns, squeeze=False).flat)
    for axes, (name, bars) in zip(places, panels.items(), strict=False):
        axes.set_title(name, fontsize=10, loc="left", color=style.INK)
        _panel(axes, bars)
    for axes in places[len(panels) :]:
        axes.set_visible(False)
    style.save(made, path)


def _panel(axes: Axes, bars: Sequence[Bar]) -> None:
    order = list(style.COLOURS)
    ordered = sorted(bars, key=lambda bar: order.index(bar.schedule))
    longest = max(max(bar.value, bar.greatest or 0) for bar in bars)
    for y, bar in enumerate(ordered):
        colour = style.COLOURS[bar.schedule]
        axes.barh(y, bar.value, height=0.62, color=colour, alpha=0.85, linewidth=0)
        end = bar.value
        if bar.least is not None and bar.greatest is not None:
            axes.plot([bar.least, bar.greatest], [y, y], color=style.INK, linewidth=1)
            end = max(end, bar.greatest)
        axes.text(
            end + 0.015 * longest, y, f"{bar.value:.2f}", va="center", fontsize=9, color=style.INK
        )
    axes.axvline(1, color=style.FAINT, linewidth=0.9, linestyle=":")
    axes.set_yticks(range(len(ordered)), [bar.schedule for bar in ordered])
    axes.invert_yaxis()
    axes.set_xlim(0, 1.15 * longest)
    axes.set_xlabel("times as fast as synchronous", fontsize=9)
    style.quiet(axes, "left")
    axes.tick_params(axis="y", length=0)


def _title(panels: dict[str, list[Bar]]) -> str:
    """What `rhymeflow` comes to, from the least panel that has it to the greatest."""
    found = sorted(
        f"{bar.value:.1f}"
        for bars in panels.values()
        for bar in bars
        if bar.schedule == "rhymeflow"
    )
    if not found:
        return "Schedules side by side"
    shown = dict.fromkeys([found[0], found[-1]])
    return f"rhymeflow is {' to '.join(shown)} times as fast as synchronous"
