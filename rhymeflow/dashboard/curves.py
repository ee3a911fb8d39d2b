"""The view of a run's curves.

An answer has at most `POINTS` points a curve; where there are more rows, a point is the
mean of those it stands for (over their time, if it is a share of that), with the least and the
greatest beside it. Held-out rewards have the 95% confidence interval of their mean instead, over
prompts, where there are no more than `POINTS`.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

import numpy as np
from numpy.typing import NDArray

from rhymeflow.core.types import HELD_OUT
from rhymeflow.dashboard.run import Run
from rhymeflow.observe.metrics import is_of_time
from rhymeflow.store.reader import TrajectoryReader
from rhymeflow.suites.figures import REWARD

POINTS = 1_000
_NORMAL_95 = 1.96
"""Standard errors to either side of a mean that a 95% interval has."""

# Of one suite, by version: of the mean rewards of its prompts their number, sum and sum of squares.
_EVALUATIONS = """SELECT version, COUNT(*), SUM(mean), SUM(mean * mean) FROM
    (SELECT version, AVG(reward) AS mean FROM evaluations WHERE suite = ? GROUP BY version, row)
    GROUP BY version"""


def metrics(run: Run, names: Sequence[str]) -> dict[str, Any]:
    """Points of each metric: `step`, `time`, `value`, and `low` and `high` where it is a mean."""
    rows = run.metrics.rows()

    def column(name: str) -> NDArray[np.float64]:
        return np.array([row.get(name) for row in rows], float)  # None is not a number there

    steps, times, seconds = column("step"), column("time"), np.nan_to_num(column("step_time"))
    found: dict[str, Any] = {
        name: _points(steps, times, column(name), seconds if is_of_time(name) else None)
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


def _points(
    steps: NDArray[np.float64],
    times: NDArray[np.float64],
    every: NDArray[np.float64],
    seconds: NDArray[np.float64] | None,
) -> dict[str, list[float]]:
    """`seconds`: weights in means of what is a share of them, or a rate; they are `weight` then."""
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
