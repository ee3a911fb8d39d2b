"""The whole run, for `rhymeflow inspect`: what it learned, then how it went.

Holds true: what was learned comes first; no line is wider than the console; no share hides its
count. What is shown anew every few seconds reads no tokens, however many there are. Knows the names
of metrics, not their meaning.
"""

from __future__ import annotations

import json
from pathlib import Path
from statistics import median
from typing import Any

from rich.box import SIMPLE_HEAD
from rich.console import Console
from rich.measure import Measurement
from rich.table import Table
from rich.text import Text

from rhymeflow.observe import limits, metrics
from rhymeflow.observe.learned import Steps, show_curves, show_last_responses
from rhymeflow.observe.printable import printable
from rhymeflow.observe.runs import LAST_COMMAND, state_of
from rhymeflow.observe.summary import mirror_line, mirror_state
from rhymeflow.observe.trajectory import draft_cells, number
from rhymeflow.store.reader import TrajectoryReader
from rhymeflow.suites.metrics import REWARD

_MAX_STEP_ROWS = 12
_NUM_QUANTILES = 5
_MAX_DRAFT_ROWS = 12
_BAR_WIDTH = 30
_WIDE = 110
_NO_LIMIT = 10_000

# Column heading, metric, format.
_STEP_COLUMNS = (
    ("reward", "reward", ".3f"),
    ("eval", "eval/reward", ".3f"),
    ("length", "completions/mean_length", ".1f"),
    ("stale", "staleness/mean", ".2f"),
    ("max", "staleness/max", ".0f"),
    ("kl", "kl", ".4f"),
    ("mismatch", "off_policy/mismatch_kl", ".4f"),
    ("entropy", "entropy", ".3f"),
    ("grad", "grad_norm", ".2f"),
    ("idle r", "idle/rollout", ".0%"),
    ("idle l", "idle/learner", ".0%"),
)

# One row per quantile (from 1) of the lengths of all responses there are tokens of.
_QUANTILES = f"""
SELECT quantile, MIN(length), MAX(length), COUNT(*), AVG(reward),
    COALESCE(SUM(reason IN ('length', 'finished_early')), 0),
    SUM(ending IS 'consumed'), SUM(ending IS 'filtered'), SUM(ending IS 'aborted'),
    SUM(ending IS NULL)
FROM (SELECT *, NTILE({_NUM_QUANTILES}) OVER (ORDER BY length, group_id, member) AS quantile
    FROM responses)
GROUP BY quantile ORDER BY quantile
"""

_TRAINED = "SELECT trained + 1, COUNT(*) FROM trajectories WHERE trained IS NOT NULL GROUP BY 1"

# Per value of {key}: responses, tokens, iterations that generated them, drafted tokens.
_DRAFTS = """
SELECT {key}, COUNT(DISTINCT group_id || '.' || member), SUM(length), SUM(steps),
    SUM(drafted)
FROM spans JOIN groups USING (group_id) GROUP BY 1 ORDER BY 1
"""


def show(run_dir: Path, reader: TrajectoryReader, console: Console) -> None:
    """Print all of it."""
    steps = metrics.read(run_dir)
    show_curves(run_dir, steps, reader, console)
    show_last_responses(steps, reader, console)
    console.print()
    if steps:
        console.print(_step_table(steps, console))
        _show_pace(steps, reader, console)
    staleness = reader.query("SELECT staleness, COUNT(*) FROM trained GROUP BY 1 ORDER BY 1")
    if staleness:
        console.print(_histogram("Staleness of trained trajectories", "versions", staleness))
    _show_drafts(steps, reader, console)
    _show_lengths(steps, console)
    quantiles = reader.query(_QUANTILES)
    if quantiles:
        console.print(_quantile_table(quantiles))
    for name, count in reader.query(
        "SELECT ending_reason, COUNT(*) FROM groups"
        " WHERE ending_reason IS NOT NULL AND suite IS NULL GROUP BY 1"
    ):
        console.print(Text(f"Groups left out ({printable(name)}): {count:,}"))
    _show_mirror(run_dir, reader, console)


def show_shortly(run_dir: Path, reader: TrajectoryReader, console: Console) -> None:
    """Print what changes with each step, without what all tokens would have to be looked at for;
    figures come first, since a window may hold no more."""
    steps = metrics.read(run_dir)
    show_curves(run_dir, steps, reader, console)
    if steps:
        _show_pace(steps, reader, console)
        console.print(_step_table(steps, console))
    show_last_responses(steps, reader, console)


def _show_pace(steps: Steps, reader: TrajectoryReader, console: Console) -> None:
    """How fast it goes, and what limits that."""
    _show_throughput(steps, reader, console)
    if (limit := _limit(steps, reader)) is not None:
        console.print(Text(f"Pace: {limit.line} (last {limit.steps} steps)"))


def _limit(steps: Steps, reader: TrajectoryReader) -> limits.Limit | None:
    """What limits the run, at the staleness bound of its last attempt."""
    attempts = reader.attempts()
    return limits.of_rows(steps.values(), attempts[-1].config) if attempts else None


def as_json(run_dir: Path, reader: TrajectoryReader) -> dict[str, Any]:
    """What the run is, how far it has come, and the metrics of its last step; under the names that
    the dashboard uses where it says the same."""
    steps = metrics.read(run_dir)
    attempts = reader.attempts()
    config = json.loads(attempts[-1].config) if attempts else {}
    ((events, seconds),) = reader.query("SELECT COALESCE(MAX(seq), 0), MAX(time) FROM events")
    endings = dict(
        reader.query(
            "SELECT COALESCE(ending, 'open'), COUNT(*) FROM groups WHERE suite IS NULL GROUP BY 1"
        )
    )
    staleness = reader.query("SELECT staleness, COUNT(*) FROM trained GROUP BY 1 ORDER BY 1")
    state = state_of(run_dir, reader)
    limit = _limit(steps, reader)
    last = max((step for step in steps if step), default=None)
    evaluated = [[step, row[REWARD]] for step, row in steps.items() if row.get(REWARD) is not None]
    return {
        "name": run_dir.resolve().name,
        "directory": str(run_dir.resolve()),
        "state": state,
        "config": config,
        "attempts": [{"started": each.started, "time": each.time} for each in attempts],
        "steps": last or 0,
        "max_steps": config.get("learner", {}).get("max_steps"),
        "seconds": seconds or 0.0,
        "events": events,
        "groups": sum(endings.values()),
        "endings": endings,
        "ended": reader.query(LAST_COMMAND) == [("Finish",)],
        "metrics": list(dict.fromkeys(name for row in metrics.rows(run_dir) for name in row)),
        "latest": None if last is None else steps[last],
        "held_out": evaluated,
        "staleness": {str(versions): count for versions, count in staleness},
        "limit": None if limit is None else {**vars(limit), "line": limit.line},
    }


def _show_mirror(run_dir: Path, reader: TrajectoryReader, console: Console) -> None:
    """How far the mirror is, and what is not in the log any more."""
    last = reader.query("SELECT seq, time FROM events ORDER BY seq DESC LIMIT 1")
    mirror = mirror_state(run_dir, *last[0]) if last else None
    if mirror is not None:
        console.print(Text(f"Mirror: {printable(mirror_line(mirror))}"))
    ((gone, left),) = reader.query(
        "SELECT (SELECT COUNT(*) FROM (SELECT DISTINCT group_id, member FROM pruned)),"
        " (SELECT COUNT(*) FROM (SELECT DISTINCT group_id, member FROM segments"
        " WHERE +group_id >= 0))"
    )
    if gone:
        console.print(Text(f"Tokens: of {left:,} responses, those of {gone:,} were deleted"))


def _step_table(steps: Steps, console: Console) -> Table:
    shown = list(steps)
    stride = -(-len(shown) // _MAX_STEP_ROWS)
    # Every stride-th, the first and the last, and those with a held-out reward if they are few.
    evaluated = {step for step, row in steps.items() if any(n.startswith("eval/") for n in row)}
    kept = {*shown[::stride], shown[-1]} | (
        evaluated if len(evaluated) <= _MAX_STEP_ROWS else set()
    )
    columns = [c for c in _STEP_COLUMNS if any(c[1] in row for row in steps.values())]
    table = _rows_of(steps, kept, columns, 1 if console.width >= _WIDE else 0)
    unlimited = console.options.update(width=_NO_LIMIT)
    while Measurement.get(console, unlimited, table).maximum > console.width and columns:
        columns.pop()
        table = _rows_of(steps, kept, columns, 0)
    left_out = len(shown) - len(kept)
    if left_out:
        table.caption = f"{left_out} more in {metrics.FILE}"
    return table


def _rows_of(
    steps: Steps, kept: set[int], columns: list[tuple[str, str, str]], padding: int
) -> Table:
    table = Table(box=SIMPLE_HEAD, padding=(0, padding), title="Steps", title_justify="left")
    for heading in ("step", "time", *(heading for heading, _, _ in columns)):
        table.add_column(heading, justify="right", no_wrap=True)
    for step in sorted(kept):
        row = steps[step]
        cells = [number(row.get(name), spec) for _, name, spec in columns]
        table.add_row(str(step), number(row.get("time"), ".0f"), *cells)
    return table


def _show_throughput(steps: Steps, reader: TrajectoryReader, console: Console) -> None:
    rows = [row for row in steps.values() if row.get("step_time")]
    if not rows:
        return
    seconds = sum(row["step_time"] for row in rows)
    counts = dict(reader.query(_TRAINED))
    trained = sum(counts.get(row["step"], 0) for row in rows)
    tokens = sum(
        counts.get(row["step"], 0) * (row.get("completions/mean_length") or 0.0) for row in rows
    )
    console.print(
        Text(
            f"Throughput: {trained / seconds:.1f} trained responses/s, {tokens / seconds:,.0f} of "
            f"their tokens/s, median step {median(row['step_time'] for row in rows):.2f} s"
        )
    )


def _histogram(title: str, heading: str, rows: list[tuple[Any, ...]]) -> Table:
    total, most = sum(n for _, n in rows), max(n for _, n in rows)
    table = Table(heading, box=SIMPLE_HEAD, title=title, title_justify="left")
    table.add_column("trajectories", justify="right")
    table.add_column("share", justify="right")
    table.add_column("")
    for value, count in rows:
        bar = "█" * max(round(count / most * _BAR_WIDTH), 1)
        table.add_row(str(value), f"{count:,}", f"{count / total:.1%}", bar)
    return table


def _show_drafts(steps: Steps, reader: TrajectoryReader, console: Console) -> None:
    """Mean acceptance length by epoch and by version, if anything was drafted."""
    ((drafted,),) = reader.query("SELECT TOTAL(drafted) FROM spans")
    if not drafted:
        return
    for key in ("epoch", "version"):
        ((last,),) = reader.query(f"SELECT MAX({key}) FROM spans JOIN groups USING (group_id)")
        span = -(-(last + 1) // _MAX_DRAFT_ROWS)
        rows = reader.query(_DRAFTS.format(key=f"{key} / {span} * {span}"))
        console.print(_draft_table(key, span, rows))
    saved = sum(row.get("draft/time_saved") or 0.0 for row in steps.values())
    console.print(Text(f"Time that drafts saved, as instances estimate it: {saved:.1f} s"))


def _show_lengths(steps: Steps, console: Console) -> None:
    """How well lengths were predicted, as of the last step that knows."""
    rows = [row for row in steps.values() if "lengths/coverage" in row]
    if not rows:
        return
    found = [
        number(rows[-1].get(f"lengths/{name}"), spec)
        for name, spec in (
            ("seen_prompt_share", ".0%"),
            ("rank_correlation", ".2f"),
            ("coverage", ".0%"),
            ("explained_variance", ".2f"),
        )
    ]
    console.print(
        Text(
            "Length prediction: seen prompts {}, rank correlation {}, coverage {}, "
            "explained variance {}".format(*found)
        )
    )


def _draft_table(key: str, span: int, rows: list[tuple[Any, ...]]) -> Table:
    """One row for `span` values of `key`."""
    table = Table(box=SIMPLE_HEAD, title=f"Drafts by {key}", title_justify="left")
    for heading in (key, "responses", "tokens", "acceptance length", "drafted", "accepted"):
        table.add_column(heading, justify="right", no_wrap=True)
    for first, responses, tokens, made_in, drafted in rows:
        table.add_row(
            str(first) if span == 1 else f"{first}-{first + span - 1}",
            f"{responses:,}",
            f"{tokens:,}",
            *draft_cells(tokens, made_in, drafted),
        )
    return table


def _quantile_table(rows: list[tuple[Any, ...]]) -> Table:
    title = "Endings by length quantile"
    table = Table(box=SIMPLE_HEAD, title=title, title_justify="left")
    for heading in ("tokens", "count", "reward", "cut", "consumed", "filtered", "aborted", "open"):
        table.add_column(heading, justify="right", no_wrap=True)
    for _, low, high, count, reward, cut, *endings in rows:
        shares = [f"{ending / count:.1%}" for ending in (cut, *endings)]
        table.add_row(f"{low}-{high}", f"{count:,}", number(reward, ".3f"), *shares)
    return table
