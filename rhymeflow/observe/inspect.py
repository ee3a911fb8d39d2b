"""`rhymeflow inspect`: what happened in a run, and one trajectory in full.

Holds true: reads the run directory and writes nothing, also while the run is going; no share hides
its count. Knows the names of metrics, not their meaning.
"""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

from rich.box import SIMPLE_HEAD
from rich.console import Console
from rich.panel import Panel
from rich.table import Table
from rich.text import Text

from rhymeflow.core.types import TrajectoryId
from rhymeflow.errors import UserError
from rhymeflow.observe import metrics
from rhymeflow.observe.summary import EVENTS
from rhymeflow.store.reader import TrajectoryDetails, TrajectoryReader

_MAX_STEP_ROWS = 40
_NUM_QUANTILES = 5
_MAX_DRAFT_ROWS = 12
_BAR_WIDTH = 30
_WIDE = 110

# Column heading, metric, format.
_STEP_COLUMNS = (
    ("reward", "reward", ".3f"),
    ("eval", "eval/reward", ".3f"),
    ("length", "completions/mean_length", ".1f"),
    ("stale", "staleness/mean", ".2f"),
    ("max", "staleness/max", ".0f"),
    ("kl", "off_policy/mismatch_kl", ".4f"),
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


# Per value of {key}: responses, tokens, iterations that generated them, drafted tokens.
_DRAFTS = """
SELECT {key}, COUNT(DISTINCT group_id || '.' || member), SUM(LENGTH(tokens) / 4), SUM(steps),
    SUM(drafted)
FROM segments JOIN groups USING (group_id) GROUP BY 1 ORDER BY 1
"""


def inspect(run_dir: Path, trajectory: str | None, console: Console) -> None:
    """Print the run's steps, staleness, lengths and endings, or one trajectory (`group.member`).

    Raises:
        UserError: no run there, or no such trajectory in it.
    """
    if not run_dir.is_dir():
        raise UserError(f"{run_dir}: no such directory")
    if not (run_dir / EVENTS).is_file():
        raise UserError(f"{run_dir}: is not a run directory, it has no {EVENTS}")
    reader = TrajectoryReader(run_dir / EVENTS)
    try:
        if trajectory is None:
            _show_run(run_dir, reader, console)
        else:
            _show_trajectory(run_dir, reader, _parse(trajectory), console)
    finally:
        reader.close()


# -- the run --------------------------------------------------------------------------------------


def _show_run(run_dir: Path, reader: TrajectoryReader, console: Console) -> None:
    steps = metrics.read(run_dir)
    if steps:
        console.print(_step_table(steps, console.width))
    else:
        console.print("No step has been completed.")
    staleness = reader.query("SELECT staleness, COUNT(*) FROM trained GROUP BY 1 ORDER BY 1")
    if staleness:
        console.print(_histogram("Staleness of trained trajectories", "versions", staleness))
    _show_drafts(steps, reader, console)
    _show_lengths(steps, console)
    quantiles = reader.query(_QUANTILES)
    if quantiles:
        console.print(_quantile_table(quantiles))
    for name, count in reader.query(
        "SELECT ending_reason, COUNT(*) FROM groups WHERE ending_reason IS NOT NULL GROUP BY 1"
    ):
        console.print(Text(f"Groups left out ({name}): {count:,}"))


def _step_table(steps: dict[int, dict[str, Any]], width: int) -> Table:
    shown = list(steps)
    stride = -(-len(shown) // _MAX_STEP_ROWS)
    # Every stride-th, the first and the last; rows with a held-out reward are never left out.
    kept = {*shown[::stride], shown[-1]} | {s for s, row in steps.items() if "eval/reward" in row}
    columns = [c for c in _STEP_COLUMNS if any(c[1] in row for row in steps.values())]
    left_out = len(shown) - len(kept)
    caption = f"{left_out} more in {metrics.FILE}" if left_out else None
    # All columns fit 80 characters without padding.
    padding = (0, 1 if width >= _WIDE else 0)
    table = Table(box=SIMPLE_HEAD, padding=padding, title="Steps", title_justify="left")
    table.caption = caption
    for heading in ("step", "time"):
        table.add_column(heading, justify="right", no_wrap=True)
    for heading, _, _ in columns:
        table.add_column(heading, justify="right", no_wrap=True)
    for step in sorted(kept):
        row = steps[step]
        cells = [_number(row.get(name), spec) for _, name, spec in columns]
        table.add_row(str(step), _number(row.get("time"), ".0f"), *cells)
    return table


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


def _show_drafts(
    steps: dict[int, dict[str, Any]], reader: TrajectoryReader, console: Console
) -> None:
    """Mean acceptance length by epoch and by version, if anything was drafted."""
    ((drafted,),) = reader.query("SELECT TOTAL(drafted) FROM segments")
    if not drafted:
        return
    for key in ("epoch", "version"):
        ((last,),) = reader.query(f"SELECT MAX({key}) FROM segments JOIN groups USING (group_id)")
        span = -(-(last + 1) // _MAX_DRAFT_ROWS)
        rows = reader.query(_DRAFTS.format(key=f"{key} / {span} * {span}"))
        console.print(_draft_table(key, span, rows))
    saved = sum(row.get("draft/time_saved") or 0.0 for row in steps.values())
    console.print(Text(f"Time that drafts saved, as instances estimate it: {saved:.1f} s"))


def _show_lengths(steps: dict[int, dict[str, Any]], console: Console) -> None:
    """How well lengths were predicted, as of the last step that knows."""
    rows = [row for row in steps.values() if "lengths/coverage" in row]
    if not rows:
        return
    found = [
        _number(rows[-1].get(f"lengths/{name}"), spec)
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
            *_draft_cells(tokens, made_in, drafted),
        )
    return table


def _draft_cells(tokens: int, steps: int, drafted: int) -> tuple[str, str, str]:
    """Mean acceptance length, drafted tokens, and the share of them that was accepted."""
    # Each iteration makes one token without any draft.
    accepted = (tokens - steps) / drafted if drafted else None
    return f"{tokens / steps:.2f}", f"{drafted:,}", _number(accepted, ".1%")


def _quantile_table(rows: list[tuple[Any, ...]]) -> Table:
    title = "Endings by length quantile"
    table = Table(box=SIMPLE_HEAD, title=title, title_justify="left")
    for heading in ("tokens", "count", "reward", "cut", "consumed", "filtered", "aborted", "open"):
        table.add_column(heading, justify="right", no_wrap=True)
    for _, low, high, count, reward, cut, *endings in rows:
        shares = [f"{ending / count:.1%}" for ending in (cut, *endings)]
        table.add_row(f"{low}-{high}", f"{count:,}", _number(reward, ".3f"), *shares)
    return table


# -- one trajectory -------------------------------------------------------------------------------


def _parse(text: str) -> TrajectoryId:
    match = re.fullmatch(r"(\d+)\.(\d+)", text)
    if match is None:
        raise UserError(f"--trajectory {text}: is not GROUP.MEMBER, such as 12.3")
    return TrajectoryId(int(match[1]), int(match[2]))


def _show_trajectory(
    run_dir: Path, reader: TrajectoryReader, trajectory: TrajectoryId, console: Console
) -> None:
    details = reader.details(trajectory)
    if details is None:
        ((groups,),) = reader.query("SELECT COUNT(DISTINCT group_id) FROM segments")
        raise UserError(f"{run_dir}: has no trajectory {trajectory}; {groups} groups have any")
    console.print(_overview(details))
    console.print(Panel(Text(details.prompt), title="prompt", title_align="left"))
    console.print(_segment_table(details))
    if details.text is not None:
        console.print(Panel(Text(details.text), title="response", title_align="left"))


def _overview(details: TrajectoryDetails) -> Table:
    grid = Table.grid(padding=(0, 2, 0, 0))
    grid.add_column(no_wrap=True, style="dim")
    grid.add_column(overflow="fold")
    rows = [
        ("trajectory", str(details.trajectory)),
        ("prompt", f"row {details.row}, epoch {details.epoch}"),
        ("columns", ", ".join(f"{k} = {v}" for k, v in details.columns.items()) or "none"),
        ("length", _length(details)),
        ("reward", _reward(details)),
        ("ending", _ending(details)),
    ]
    for label, text in rows:
        grid.add_row(label, Text(text))
    return grid


def _length(details: TrajectoryDetails) -> str:
    if details.length is None:
        return f"{sum(len(s.tokens) for s in details.segments)} tokens so far"
    return f"{details.length} tokens, ended by {details.reason}"


def _reward(details: TrajectoryDetails) -> str:
    if details.reward is None:
        return "none yet"
    parts = ", ".join(f"{name} {value:g}" for name, value in (details.components or {}).items())
    return f"{details.reward:g}" + (f" ({parts})" if parts else "")


def _ending(details: TrajectoryDetails) -> str:
    if details.ending is None:
        return "open"
    if details.ending != "consumed":
        return f"{details.ending}: {details.ending_reason}"
    batch = details.trained
    if batch is None:
        return "aborted: its group did not need it"
    age = batch - min(segment.version for segment in details.segments)
    return f"trained on in batch {batch}, {age} version{'' if age == 1 else 's'} old"


def _segment_table(details: TrajectoryDetails) -> Table:
    table = Table(box=SIMPLE_HEAD, title="Segments", title_justify="left")
    drafts = ("acceptance length", "drafted", "accepted")
    for heading in ("from", "to", "version", "instance", "log-probability", *drafts):
        table.add_column(heading, justify="right", no_wrap=True)
    for segment in details.segments:
        count = len(segment.tokens)
        table.add_row(
            str(segment.start),
            str(segment.start + count - 1),
            str(segment.version),
            segment.instance,
            f"{sum(segment.logprobs) / count:.3f}",
            *_draft_cells(count, segment.steps, segment.drafted),
        )
    return table


def _number(value: float | None, spec: str) -> str:
    return "-" if value is None else format(value, spec)
