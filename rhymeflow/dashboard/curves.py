"""The view of a run: its curves, and what it is.

Holds true: an answer has at most `POINTS` points a curve; where there are more rows, a point is the
mean of those it stands for, with the least and the greatest beside it.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import msgspec
import numpy as np

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
    numbers = [value for value in values if value is not None]
    known = np.flatnonzero([value is not None for value in values])
    width = -(-len(known) // POINTS) or 1
    if width == 1:
        return {**_at(steps, times, known.tolist()), "value": numbers}
    starts = np.arange(0, len(known), width)
    counts = np.diff([*starts, len(known)])
    every = np.array(numbers, float)
    return {
        **_at(steps, times, known[starts + counts // 2].tolist()),
        "value": (np.add.reduceat(every, starts) / counts).tolist(),
        "low": np.minimum.reduceat(every, starts).tolist(),
        "high": np.maximum.reduceat(every, starts).tolist(),
    }


def _at(steps: Sequence[Any], times: Sequence[Any], rows: Sequence[int]) -> dict[str, list[Any]]:
    return {"step": [steps[i] for i in rows], "time": [times[i] for i in rows]}


__all__ = ["POINTS", "metrics", "overview"]
