"""The timeline of a simulated cluster, and its plot: instances as rows over time, the learner below
them, and the load. A row's colour is the version it works under; it is pale while idle, darker
during prefill and red during a pull."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Literal

import matplotlib
import numpy as np
from matplotlib.axes import Axes
from matplotlib.backends.backend_agg import FigureCanvasAgg
from matplotlib.collections import PolyCollection
from matplotlib.colors import hsv_to_rgb, rgb_to_hsv, to_rgb
from matplotlib.figure import Figure
from matplotlib.patches import Patch
from matplotlib.ticker import MaxNLocator

from rhymeflow.core.types import Version
from rhymeflow.errors import counted
from rhymeflow.observe.plot import unit_of
from rhymeflow.sim.result import SimulationResult

Kind = Literal["decode", "prefill", "pull", "train", "push", "restore", "idle"]


@dataclass(slots=True)
class Span:
    """An interval, in virtual seconds, of one kind of work under one version."""

    kind: Kind
    start: float
    end: float
    version: Version


@dataclass(slots=True)
class TimelineRow:
    """One instance, or the learner."""

    name: str
    joined: float
    left: float | None = None  # None: it was there at the end
    spans: list[Span] = field(default_factory=list)
    loads: list[tuple[float, int, int]] = field(default_factory=list)
    """(start, running trajectories, tokens in the cache), in order of start."""

    def append(self, kind: Kind, start: float, end: float, version: Version) -> None:
        """Add a span, or extend the last one."""
        last = self.spans[-1] if self.spans else None
        if last and last.kind == kind and last.version == version and last.end == start:
            last.end = end
        else:
            self.spans.append(Span(kind, start, end, version))

    def with_idle(self, end: float) -> Iterator[Span]:
        """Yield the row's spans, with idle spans between them, until the run's `end`."""
        now, version = self.joined, 0
        for span in self.spans:
            if span.start > now:
                yield Span("idle", now, span.start, version)
            yield span
            now, version = span.end, span.version
        until = end if self.left is None else self.left
        if until > now:
            yield Span("idle", now, until, version)


class Timeline:
    """The learner's row, and a row for each instance in the order they joined."""

    def __init__(self) -> None:
        self.learner = TimelineRow("learner", 0.0)
        self.instances: list[TimelineRow] = []

    @property
    def end(self) -> float:
        """The end of the last span, in virtual seconds."""
        rows = [self.learner, *self.instances]
        return max((row.spans[-1].end for row in rows if row.spans), default=0.0)

    def sample(self, num_rows: int) -> list[TimelineRow]:
        """Return at most `num_rows` instances, evenly chosen."""
        total = len(self.instances)
        if total <= num_rows:
            return self.instances
        return [self.instances[i * total // num_rows] for i in range(num_rows)]

    def join(self, name: str, now: float) -> TimelineRow:
        """Add the row of an instance and return it."""
        self.instances.append(TimelineRow(name, now))
        return self.instances[-1]


_IDLE, _PULL, _PUSH, _RESTORE = "#eeeef2", "#d62728", "#ff7f0e", "#111111"
_RUNNING, _KV = "#333355", "#b0763b"
_ROWS = 64
_ROW_LABELS = 16  # most labels of rows; more would overlap

Rgb = tuple[float, float, float]


def draw(path: Path, timeline: Timeline, result: SimulationResult) -> None:
    """Write a PNG of the learner and of at most `_ROWS` evenly chosen instances."""
    rows, end = timeline.sample(_ROWS), timeline.end
    unit, scale = unit_of(end)
    height = min(9.0, max(1.6, 0.16 * len(rows)))
    figure = Figure(figsize=(15, height + 4.2), layout="constrained")
    FigureCanvasAgg(figure)
    instances, learner, load = figure.subplots(
        3, 1, sharex=True, gridspec_kw={"height_ratios": [height, 0.5, 1.8]}
    )
    colour = colours(result.steps)
    draw_rows(instances, rows, end, scale, colour)
    draw_rows(learner, [timeline.learner], end, scale, colour)
    learner.set_yticks([0.5], ["learner"])
    learner.set_xlabel("")
    _load(load, timeline.instances, end, scale)
    load.set_xlabel(f"virtual time ({unit})")
    load.set_xlim(0, end / scale)
    figure.suptitle(_title(result), x=0.01, ha="left", fontsize=11)
    _legend(figure, instances, result, colour)
    figure.savefig(path, dpi=110)


# -- colours ---------------------------------------------------------------------------------------


def colours(num_versions: int) -> Callable[[Span], Rgb]:
    """Return a function from spans to colours: by version, every other version lighter."""
    ramp = matplotlib.colormaps["viridis"](np.linspace(0.08, 0.95, num_versions + 1))[:, :3]
    hsv = rgb_to_hsv(ramp)
    hsv[1::2, 1] *= 0.62
    hsv[1::2, 2] = 0.35 + 0.65 * hsv[1::2, 2]
    plain = hsv_to_rgb(hsv)
    hsv[:, 2] *= 0.55
    dark = hsv_to_rgb(hsv)
    fixed = {"idle": to_rgb(_IDLE), "pull": to_rgb(_PULL), "push": to_rgb(_PUSH)}
    fixed["restore"] = to_rgb(_RESTORE)

    def colour(span: Span) -> Rgb:
        if span.kind in fixed:
            return fixed[span.kind]
        red, green, blue = (dark if span.kind == "prefill" else plain)[span.version]
        return float(red), float(green), float(blue)

    return colour


def _legend(
    figure: Figure, axes: Axes, result: SimulationResult, colour: Callable[[Span], Rgb]
) -> None:
    steps = result.steps
    middle = steps // 2
    kinds = [
        Patch(color=colour(Span("decode", 0, 0, middle)), label="decode, train (by version)"),
        Patch(color=colour(Span("prefill", 0, 0, middle)), label="prefill"),
        Patch(color=_PULL, label="pull"),
        Patch(color=_PUSH, label="push"),
        Patch(facecolor=_IDLE, edgecolor="#bbbbbb", label="idle"),
    ]
    if result.deaths:
        kinds.append(Patch(color=_RESTORE, label="restore"))
    figure.legend(handles=kinds, loc="upper right", ncols=len(kinds), frameon=False, fontsize=9)
    shown = matplotlib.colors.ListedColormap(
        [colour(Span("decode", 0, 0, version)) for version in range(steps + 1)]
    )
    norm = matplotlib.colors.BoundaryNorm(np.arange(steps + 2) - 0.5, shown.N)
    bar = figure.colorbar(
        matplotlib.cm.ScalarMappable(norm=norm, cmap=shown), ax=axes, pad=0.01, aspect=40
    )
    bar.set_label("version")
    bar.locator = MaxNLocator(12, integer=True)
    bar.minorticks_off()
    bar.update_ticks()


def _title(r: SimulationResult) -> str:
    instances = counted(r.num_instances, "instance")
    return (
        f"{r.name}: {r.schedule}, staleness at most {r.max_staleness}, {instances}"
        f"\n{r.throughput:,.0f} trained tokens/s, {r.steps_per_second:.3g} steps/s; idle: rollout "
        f"{r.idle_rollout:.0%}, learner {r.idle_learner:.0%} (steps {r.skipped + 1} to {r.steps})"
    )


# -- rows ------------------------------------------------------------------------------------------


def draw_rows(
    axes: Axes, rows: Sequence[TimelineRow], end: float, scale: float, colour: Callable[[Span], Rgb]
) -> None:
    """Draw a bar for each row, top down, until second `end`; an axis unit is `scale` seconds."""
    boxes, fills = [], []
    for y, row in enumerate(rows):
        for span in row.with_idle(end):
            left, right = span.start / scale, span.end / scale
            low, high = y + 0.06, y + 0.94
            boxes.append([(left, low), (left, high), (right, high), (right, low)])
            fills.append(colour(span))
    axes.add_collection(PolyCollection(boxes, facecolors=fills, linewidths=0))
    axes.set_ylim(len(rows), 0)
    stride = -(-len(rows) // _ROW_LABELS)
    axes.set_yticks(
        [y + 0.5 for y in range(0, len(rows), stride)],
        [row.name for row in rows[::stride]],
        fontsize=8,
    )
    axes.tick_params(length=0)
    for side in ("top", "right", "left", "bottom"):
        axes.spines[side].set_visible(False)


def _load(axes: Axes, rows: Sequence[TimelineRow], end: float, scale: float) -> None:
    times = np.linspace(0, end, 1500)
    running, kv_tokens = np.zeros(len(times)), np.zeros(len(times))
    for row in rows:
        loads = np.array([(row.joined, 0, 0), *row.loads])
        at = np.searchsorted(loads[:, 0], times, side="right") - 1
        has_joined = at >= 0
        running[has_joined] += loads[at[has_joined], 1]
        kv_tokens[has_joined] += loads[at[has_joined], 2]
    axes.fill_between(times / scale, running, color=_RUNNING, alpha=0.25, linewidth=0)
    axes.plot(times / scale, running, color=_RUNNING, linewidth=1)
    axes.set_ylabel("responses\nthat run", color=_RUNNING)
    axes.set_ylim(bottom=0)
    other = axes.twinx()
    unit, divisor = ("millions", 1e6) if kv_tokens.max() > 2e6 else ("thousands", 1e3)
    other.plot(times / scale, kv_tokens / divisor, color=_KV, linewidth=1)
    other.set_ylabel(f"KV tokens\n({unit})", color=_KV)
    other.set_ylim(bottom=0)
    for each in (axes, other):
        each.spines["top"].set_visible(False)
