"""The demo recipe end to end, with drafts and without: real runs, interleaved.

Counted are the steps from the end of the first one on, and from the end of the first epoch on,
where there is history; the last steps are left out, in which nothing is generated any more.
`rollout tokens/s` is of the time in which the instance decoded. Processes, threads and cores are
the recipe's.
"""

from __future__ import annotations

import functools
import statistics
from pathlib import Path
from typing import Any

from benchmarks import harness
from benchmarks.training.train import repeated, train, training_rows
from rhymeflow.config.load import read_config
from rhymeflow.observe.metrics import mean

EPOCH = 16
"""Steps of the demo recipe in one epoch."""
LAST = 2
"""Steps at the end that are not counted."""
RATIOS = {
    "steps/s": ("steps", 1.5),
    "steps/s, later epochs": ("steps, later epochs", 1.5),
    "rollout tokens/s, later epochs": ("rollout", 2.5),
}
"""Figures whose ratio has a target: its name and value."""

Figures = dict[str, float]


def measure(pairs: int, steps: int) -> harness.Found:
    """Rows of both sides; targets of steps per second and rollout throughput."""
    sides = {window: functools.partial(run, window, steps) for window in ("off", "cost")}
    seen = repeated(sides, pairs, lambda found: found["steps/s"])
    rows = []
    for window, runs in seen.items():
        speeds = [each["steps/s"] for each in runs]
        row = {"part": "runs", **harness.side_row(window, speeds, "steps/s")}
        rest = [name for name in runs[0] if name != "steps/s"]
        rows.append(row | {n: round(statistics.median(each[n] for each in runs), 3) for n in rest})
    return rows, [
        harness.Target(f"histospec/runs/{name}", ratio(seen["cost"], seen["off"], figure), target)
        for figure, (name, target) in RATIOS.items()
    ]


def run(window: str, steps: int, _: int, run_dir: Path) -> Figures:
    """Train once."""
    fields = {
        "drafting.window": window,
        "learner.max_steps": str(steps),
        "run.eval_steps": str(EPOCH),
        "run.report_to": "[]",
        "run.output_dir": str(run_dir),
    }
    return figures(training_rows(train(read_config("demo", fields))), steps)


def ratio(ours: list[Figures], theirs: list[Figures], name: str) -> float:
    """The median of pairwise ratios of one figure."""
    return harness.median_ratio([run[name] for run in ours], [run[name] for run in theirs])


def figures(rows: list[dict[str, Any]], steps: int) -> Figures:
    """The figures of one run, from the metrics of its steps."""
    assert len(rows) == steps, f"{len(rows)} steps"
    assert steps > EPOCH + LAST + 1, "no step of the second epoch is counted"
    later = rows[EPOCH : steps - LAST]
    busy = sum(row["step_time"] * (1 - row["idle/rollout"]) for row in later)
    generated = sum(row["step_time"] * row["rollout/tokens_per_s"] for row in later)
    return {
        "steps/s": _rate(rows, 0, steps - LAST),
        "steps/s, later epochs": _rate(rows, EPOCH - 1, steps - LAST),
        "rollout tokens/s, later epochs": generated / busy,
        **{name: mean(later, name) or 0.0 for name in ("idle/rollout", "idle/learner")},
        **_drafts(later),
    }


def _drafts(rows: list[dict[str, Any]]) -> Figures:
    """Of all iterations together, and of all drafted tokens; nothing of a run without drafts."""
    tokens = iterations = drafted = 0.0
    for row in rows:
        if row.get("draft/acceptance_rate"):
            made = row["step_time"] * row["rollout/tokens_per_s"]
            took = made / row["draft/mean_acceptance_length"]
            tokens, iterations = tokens + made, iterations + took
            drafted += (made - took) / row["draft/acceptance_rate"]
    if not drafted:
        return {}
    return {
        "draft/mean_acceptance_length": tokens / iterations,
        "draft/acceptance_rate": (tokens - iterations) / drafted,
    }


def _rate(rows: list[dict[str, Any]], first: int, last: int) -> float:
    """Steps per second from the end of row `first` to the end of row `last - 1`."""
    return (last - 1 - first) / (rows[last - 1]["time"] - rows[first]["time"])
