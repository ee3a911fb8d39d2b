"""Draws two simulated runs under one another on one time axis: the same steps, before and after."""

from __future__ import annotations

from pathlib import Path

from matplotlib.axes import Axes

from benchmarks.charts import style
from rhymeflow.sim import plot
from rhymeflow.sim.timeline import Row, Timeline

NUM_ROWS = 12
"""Instances that are shown of each."""


def before_and_after(
    timeline_a: Timeline,
    timeline_b: Timeline,
    path: Path,
    labels: tuple[str, str] = ("synchronous", "rhymeflow"),
) -> None:
    """Write the PNG.

    Args:
        timeline_a: shown above.
        timeline_b: of the same work on the same devices, shown below.
        path: the file.
        labels: what stands above each, a name and after a comma what is to be said of it; where
            devices take turns, an instance is idle while the learner has its device, which is best
            said here.
    """
    end = max(timeline_a.end, timeline_b.end)
    unit, scale = plot.unit_of(end)
    ratio = timeline_a.end / timeline_b.end
    steps = _steps(timeline_a)
    made = style.figure(
        5.4,
        f"The same {steps} steps on the same devices: {labels[1].partition(',')[0]} is {ratio:.1f} "
        "times as fast",
    )
    above, below = made.subplots(2, 1, sharex=True)
    num_versions = max(_latest(timeline_a), _latest(timeline_b))
    colour = plot.colours(num_versions)
    for axes, timeline, label in zip((above, below), (timeline_a, timeline_b), labels, strict=True):
        instances, seconds = timeline.sample(NUM_ROWS), timeline.end
        plot.draw_rows(axes, [*instances, timeline.learner], seconds, scale, colour)
        _name(axes, len(instances))
        axes.set_title(
            f"{label}: {steps} steps in {seconds / scale:.3g} {unit}",
            fontsize=10, loc="left", color=style.INK,
        )  # fmt: skip
        axes.axvline(seconds / scale, color=style.INK, linewidth=0.9, linestyle=":")
    below.set_xlim(0, 1.01 * end / scale)
    below.set_xlabel(f"virtual time ({unit})", fontsize=9)
    made.legend(
        handles=plot.patches(num_versions // 2, colour), loc="outside lower center", ncols=5,
        frameon=False, fontsize=9,
    )  # fmt: skip
    style.save(made, path)


def part(timeline: Timeline, first: int, count: int) -> Timeline:
    """Steps `first` to `first + count - 1` (from 0) alone, beginning at 0.

    They begin and end when a version is published. Versions are counted from the lowest of them.
    """
    published = [span.end for span in timeline.learner.spans if span.kind == "push"]
    start, end = (published[step - 1] if step else 0.0 for step in (first, first + count))
    rows = [timeline.learner, *timeline.instances]
    there = [span for row in rows for span in row.spans if start < span.end and span.start < end]
    lowest = min(span.version for span in there)
    found = Timeline()
    found.learner, *found.instances = (_cut(row, start, end, lowest) for row in rows)
    return found


def _cut(row: Row, start: float, end: float, lowest: int) -> Row:
    cut = Row(row.name, max(0.0, row.joined - start))
    for span in row.spans:
        left, right = max(span.start, start) - start, min(span.end, end) - start
        if left < right:
            cut.append(span.kind, left, right, span.version - lowest)
    return cut


def _name(axes: Axes, num_instances: int) -> None:
    """Names of the instances together, and of the learner."""
    axes.set_yticks([num_instances / 2, num_instances + 0.5], ["instances", "learner"], fontsize=9)
    axes.axhline(num_instances, color="white", linewidth=2)


def _steps(timeline: Timeline) -> int:
    """Steps that were trained."""
    return len({span.version for span in timeline.learner.spans if span.kind == "train"})


def _latest(timeline: Timeline) -> int:
    rows: list[Row] = [timeline.learner, *timeline.instances]
    return max(span.version for row in rows for span in row.spans)
