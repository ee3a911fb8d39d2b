"""The demo recipe end to end, with drafts and without: real runs in turn.

Counted are steps from the end of the first one on, and from the end of the first epoch on, where
there is history; the last steps are left out, when nothing is produced any more. `rollout tokens/s`
is of the time in which the instance decoded. Processes, threads and cores are as the recipe says.
"""

from __future__ import annotations

import json
import statistics
import sys
import tempfile
from collections.abc import Iterable
from pathlib import Path
from typing import Any

from benchmarks import harness
from benchmarks.charts import DraftingCurve
from benchmarks.e2e import call, training_rows
from rhymeflow.config.load import dump_config, read_config
from rhymeflow.observe.summary import EVENTS
from rhymeflow.store.reader import TrajectoryReader

EPOCH = 16
"""Steps of the demo recipe in one epoch."""
LAST = 2
"""Steps at the end that are not counted."""
SIDES = ("off", "cost")


def measure(pairs: int, steps: int) -> tuple[list[dict[str, Any]], list[harness.Target]]:
    """Rows of both sides, and the targets: steps per second, rollout throughput."""
    assert steps > EPOCH + LAST + 1, "at least one step of the second epoch is counted"
    seen: dict[str, list[dict[str, Any]]] = {side: [] for side in SIDES}
    with tempfile.TemporaryDirectory(prefix="rhymeflow-histospec-") as folder:

        def run(side: str) -> float:
            run_dir = Path(folder) / f"{side}-{len(seen[side])}"
            train(side, steps, run_dir)
            seen[side].append({**facts(run_dir, steps), **drafting(run_dir, steps)})
            return seen[side][-1]["steps/s"]

        values = harness.interleave(
            {side: lambda side=side: run(side) for side in SIDES},
            pairs,
            progress=lambda line: print("runs", line, file=sys.stderr, flush=True),
        )
    rows = [{"part": "runs", **_row(side, seen[side], values[side])} for side in SIDES]
    ratios = {
        name: harness.median_ratio(*([run[name] for run in seen[side]] for side in ("cost", "off")))
        for name in ("steps/s", "steps/s, later epochs", "rollout tokens/s, later epochs")
    }
    return rows, [
        harness.Target("histospec/runs/steps", ratios["steps/s"], 1.5),
        harness.Target("histospec/runs/steps, later epochs", ratios["steps/s, later epochs"], 1.5),
        harness.Target("histospec/runs/rollout", ratios["rollout tokens/s, later epochs"], 2.5),
    ]


def train(window: str, steps: int, run_dir: Path) -> Path:
    """Train the demo recipe; return its run directory."""
    config = read_config(
        "demo",
        {
            "drafting.window": window,
            "learner.max_steps": str(steps),
            "run.eval_steps": str(EPOCH),
            "run.report_to": "[]",
            "run.output_dir": str(run_dir),
        },
    )
    path = run_dir.with_suffix(".yaml")
    path.write_text(dump_config(config), encoding="utf-8")
    call([sys.executable, "-m", "rhymeflow", "train", str(path)], "histospec")
    return run_dir


def facts(run_dir: Path, steps: int) -> dict[str, Any]:
    """The figures of one run."""
    rows = training_rows(run_dir)
    assert len(rows) == steps, f"{run_dir}: {len(rows)} steps"
    later = rows[EPOCH : steps - LAST]
    found = {
        "steps/s": _rate(rows, 0, steps - LAST),
        "steps/s, later epochs": _rate(rows, EPOCH - 1, steps - LAST),
        "rollout tokens/s, later epochs": _rollout_speed(later),
        "idle/rollout": _mean(later, "idle/rollout"),
        "idle/learner": _mean(later, "idle/learner"),
        "reward by epoch": [_mean(rows[i : i + EPOCH], "reward") for i in range(0, steps, EPOCH)],
        "held out": held_out(run_dir),
    }
    if "draft/time_saved" in rows[-1]:
        for name in ("draft/mean_acceptance_length", "draft/acceptance_rate"):
            found[name] = statistics.mean(row[name] for row in later if name in row)
    return found


def drafting(run_dir: Path, steps: int) -> dict[str, list[float]]:
    """Curves of complete epochs: of what was drawn in one, and of the steps that made its batches.

    A rollout runs ahead of its step by the staleness bound at most, an epoch is many steps, and so
    the speed of the one is taken for the speed of the other.
    """
    reader = TrajectoryReader(run_dir / EVENTS)
    try:
        made = reader.query(
            "SELECT SUM(LENGTH(s.tokens)) / 4, SUM(s.steps), SUM(s.drafted)"
            " FROM segments s JOIN groups g USING (group_id)"
            " WHERE g.epoch < ? GROUP BY g.epoch ORDER BY g.epoch",
            steps // EPOCH,
        )
    finally:
        reader.close()
    rows = training_rows(run_dir)[: steps - LAST]
    epochs = [rows[i * EPOCH : (i + 1) * EPOCH] for i in range(steps // EPOCH)]
    return {
        "tokens/step by epoch": [tokens / passes for tokens, passes, _ in made],
        "accepted by epoch": [(tokens - passes) / n for tokens, passes, n in made if n],
        "rollout tokens/s by epoch": [_rollout_speed(epoch) for epoch in epochs],
    }


def curves(rows: Iterable[dict[str, Any]]) -> list[DraftingCurve]:
    """What `charts.drafting_by_epoch` draws of a report's rows, those of other parts left out."""

    def values(row: dict[str, Any], name: str) -> list[float]:
        return [float(value) for value in row[name].split()]

    return [
        DraftingCurve(
            label="without drafts" if row["window"] == "off" else "with drafts",
            tokens_per_step=values(row, "tokens/step by epoch"),
            accepted=values(row, "accepted by epoch"),
            tokens_per_s=values(row, "rollout tokens/s by epoch"),
        )
        for row in rows
        if "tokens/step by epoch" in row
    ]


def held_out(run_dir: Path) -> list[float]:
    """Held-out reward of every evaluation, in order."""
    lines = (run_dir / "metrics.jsonl").read_text(encoding="utf-8").splitlines()
    return [row["eval/reward"] for row in map(json.loads, lines) if "eval/reward" in row]


def _rate(rows: list[dict[str, Any]], first: int, last: int) -> float:
    """Steps per second from the end of row `first` to the end of row `last - 1`."""
    return (last - 1 - first) / (rows[last - 1]["time"] - rows[first]["time"])


def _rollout_speed(rows: list[dict[str, Any]]) -> float:
    """Response tokens per second of the time in which the instance decoded."""
    busy = sum(row["step_time"] * (1 - row["idle/rollout"]) for row in rows)
    return sum(row["step_time"] * row["rollout/tokens_per_s"] for row in rows) / busy


def _mean(rows: list[dict[str, Any]], name: str) -> float:
    return statistics.mean(row[name] for row in rows)


def _row(side: str, runs: list[dict[str, Any]], values: list[float]) -> dict[str, Any]:
    """Medians over the runs; curves of each epoch and evaluation are means."""
    row: dict[str, Any] = {"window": side, **harness.side_row(side, values, "steps/s")}
    del row["side"]
    for name in runs[0]:
        if name == "steps/s":
            continue
        found = [run[name] for run in runs]
        if isinstance(found[0], list):
            curve = [statistics.mean(each) for each in zip(*found, strict=True)]
            row[name] = " ".join(f"{value:.3f}" for value in curve)
        else:
            row[name] = round(statistics.median(found), 3)
    return row


__all__ = ["curves", "drafting", "facts", "held_out", "measure", "train"]
