"""The view of a run: its curves, and what it is.

Holds true: an answer has at most `POINTS` points a curve; where there are more rows, a point is the
mean of those it stands for (over their time, if it is a share of that), with the least and the
greatest beside it. Held-out rewards have the 95% confidence interval of their mean instead, over
prompts, where there are no more than `POINTS`.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from statistics import fmean
from typing import Any

import msgspec
import numpy as np
from numpy.typing import NDArray

from rhymeflow.core.types import HELD_OUT
from rhymeflow.dashboard.run import Run
from rhymeflow.observe.metrics import is_of_time
from rhymeflow.store.reader import TrajectoryReader
from rhymeflow.utils.bounds import bound_of

POINTS = 1_000
_NORMAL_95 = 1.96
"""Standard errors to either side of a mean that a 95% interval has."""

# Of one suite, by version: of the mean rewards of its prompts their number, sum and sum of squares.
_EVALUATIONS = """SELECT version, COUNT(*), SUM(mean), SUM(mean * mean) FROM
    (SELECT version, AVG(reward) AS mean FROM evaluations WHERE suite = ? GROUP BY version, row)
    GROUP BY version"""

_LAST_EVENT = """SELECT COALESCE(MAX(seq), 0),
    COALESCE((SELECT time FROM events ORDER BY seq DESC LIMIT 1), 0.0) FROM events"""
_ENDINGS = "SELECT COALESCE(ending, 'open'), COUNT(*) FROM groups WHERE suite IS NULL GROUP BY 1"


def overview(run: Run) -> dict[str, Any]:
    """What the run is, how far it has come, and the names of its metrics."""
    with run.reader() as reader:
        attempts = reader.attempts()
        ((events, seconds),) = reader.query(_LAST_EVENT)
        endings = dict(reader.query(_ENDINGS))
        last = reader.query("SELECT kind FROM commands ORDER BY seq DESC LIMIT 1")
    config = msgspec.json.decode(attempts[-1].config) if attempts else {}
    schedule, max_steps = config.get("schedule", {}), config.get("learner", {}).get("max_steps")
    rows = zip(*run.columns.read(["step", "step_time"]).values(), strict=True)
    times = {step: seconds for step, seconds in rows if seconds}
    steps = int(max(times, default=0))
    return {
        "name": run.name,
        "directory": str(run.directory),
        "config": config,
        "attempts": [{"started": each.started, "time": each.time} for each in attempts],
        "steps": steps,
        "max_steps": max_steps,
        "left": (max_steps - steps) * fmean(times.values()) if times and max_steps else None,
        "bound": bound_of(schedule.get("name", ""), schedule.get("max_staleness")),
        "seconds": seconds,
        "events": events,
        "groups": sum(endings.values()),
        "endings": endings,
        "ended": last == [("Finish",)],
        "metrics": run.columns.names(),
    }


def metrics(run: Run, names: Sequence[str]) -> dict[str, Any]:
    """Points of each metric: `step`, `time`, `value`, and `low` and `high` where it is a mean."""
    from rhymeflow.suites.metrics import REWARD

    columns = run.columns.read(["step", "time", "step_time", *names])
    steps, times = (np.array(columns[name], float) for name in ("step", "time"))
    seconds = np.nan_to_num(np.array(columns["step_time"], float))
    found: dict[str, Any] = {
        name: _points(steps, times, columns[name], seconds if is_of_time(name) else None)
        for name in names
    }
    if REWARD in found and "low" not in found[REWARD]:
        with run.reader() as reader:
            found[REWARD] |= _intervals(found[REWARD], reader)
    return found


def _intervals(points: dict[str, list[float]], reader: TrajectoryReader) -> dict[str, Any]:
    """`low` and `high` of each point of held-out rewards; nothing if one has no answers stored, or
    a single prompt."""
    widths = {
        version: _NORMAL_95 * math.sqrt(max(squares - total**2 / count, 0) / (count - 1) / count)
        for version, count, total, squares in reader.query(_EVALUATIONS, HELD_OUT)
        if count > 1
    }
    if not points["step"] or any(step not in widths for step in points["step"]):
        return {}
    pairs = [(y, widths[step]) for step, y in zip(points["step"], points["value"], strict=True)]
    return {
        "low": [value - width for value, width in pairs],
        "high": [value + width for value, width in pairs],
        "is_interval": True,
    }


def differing(runs: Sequence[Run]) -> dict[str, list[Any]]:
    """What differs between the configurations in force of these runs, as `differences` says it."""
    from rhymeflow.observe.compare import differences, fields_of

    return differences([fields_of(run.directory) for run in runs])


def _points(
    steps: NDArray[np.float64],
    times: NDArray[np.float64],
    values: Sequence[float | None],
    seconds: NDArray[np.float64] | None,
) -> dict[str, list[float]]:
    """`seconds`: weights in means of what is a share of them, or a rate; they are `weight` then."""
    every = np.array(values, float)  # None is not a number there
    known = np.flatnonzero(~np.isnan(every))
    every, width = every[known], -(-len(known) // POINTS) or 1
    weights = np.ones(len(known)) if seconds is None else np.maximum(seconds[known], 1e-9)
    starts = np.arange(0, len(known), width)
    total = np.add.reduceat(weights, starts) if len(known) else weights
    weight = {} if seconds is None else {"weight": total.tolist()}
    if width == 1:
        return {**_at(steps, times, known), "value": every.tolist(), **weight}
    counts = np.diff([*starts, len(known)])
    return {
        **_at(steps, times, known[starts + counts // 2]),
        **weight,
        "value": (np.add.reduceat(every * weights, starts) / total).tolist(),
        "low": np.minimum.reduceat(every, starts).tolist(),
        "high": np.maximum.reduceat(every, starts).tolist(),
    }


def _at(
    steps: NDArray[np.float64], times: NDArray[np.float64], rows: NDArray[np.intp]
) -> dict[str, list[Any]]:
    return {"step": steps[rows].astype(int).tolist(), "time": times[rows].tolist()}


__all__ = ["POINTS", "differing", "metrics", "overview"]
