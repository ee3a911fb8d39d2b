"""The view of a run: its curves, and what it is.

Holds true: an answer has at most `POINTS` points a curve; where there are more rows, a point is the
mean of those it stands for, with the least and the greatest beside it.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import msgspec

from rhymeflow.dashboard import side_groups, side_log
from rhymeflow.dashboard.run import Run

POINTS = 1_000


def overview(run: Run) -> dict[str, Any]:
    """What the run is, how far it has come, and the names of its metrics."""
    with run.reader() as reader:
        attempts = reader.attempts()
        events, seconds = side_log.last_event(reader)
        endings = side_groups.endings(reader)
        ((steps,),) = reader.query("SELECT MAX(step) FROM side.groups")
        last = reader.query("SELECT kind FROM commands ORDER BY seq DESC LIMIT 1")
    config = msgspec.json.decode(attempts[-1].config) if attempts else {}
    return {
        "name": run.name,
        "directory": str(run.directory),
        "config": config,
        "attempts": [{"started": each.started, "time": each.time} for each in attempts],
        "steps": steps or 0,
        "max_steps": config.get("learner", {}).get("max_steps"),
        "seconds": seconds,
        "events": events,
        "groups": sum(endings.values()),
        "endings": endings,
        "ended": last == [("Finish",)],
        "share_indexed": run.side.share_done,
        "metrics": run.metric_names(),
    }


def metrics(run: Run, names: Sequence[str]) -> dict[str, Any]:
    """Points of each metric: `step`, `time`, `value`, and `low` and `high` where it is a mean."""
    columns = run.columns(["step", "time", *names])
    steps, times = columns["step"], columns["time"]
    return {name: _points(steps, times, columns[name]) for name in names}


def _points(
    steps: Sequence[Any], times: Sequence[Any], values: Sequence[Any]
) -> dict[str, list[float]]:
    known = [i for i, value in enumerate(values) if value is not None]
    width = -(-len(known) // POINTS) or 1
    found: dict[str, list[float]] = {"step": [], "time": [], "value": []}
    if width > 1:
        found |= {"low": [], "high": []}
    for start in range(0, len(known), width):
        part = known[start : start + width]
        middle = part[len(part) // 2]
        numbers = [values[i] for i in part]
        found["step"].append(steps[middle])
        found["time"].append(times[middle])
        found["value"].append(sum(numbers) / len(numbers))
        if width > 1:
            found["low"].append(min(numbers))
            found["high"].append(max(numbers))
    return found


__all__ = ["POINTS", "metrics", "overview"]
