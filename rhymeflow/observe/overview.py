"""The whole run, for `rhymeflow inspect`: what it learned, then how it went."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import pairwise
from pathlib import Path
from statistics import median
from typing import Any

from rich.console import Console
from rich.table import Table
from rich.text import Text

from rhymeflow.observe import metrics, query
from rhymeflow.observe.printable import (
    clock,
    conversation,
    number,
    printable,
    shortened,
    sparkline,
    table,
)
from rhymeflow.observe.query import Record
from rhymeflow.observe.summary import backup_line
from rhymeflow.store.reader import TrajectoryReader
from rhymeflow.suites.figures import headlines

_NUM_QUANTILES = 5
_CURVE_WIDTH = 20
_NAME_WIDTH = 20
_RESPONSE_LINES = 3
_NUM_SHOWN = 2

_STATES = {
    "running": "it is running",
    "ended": "it has ended",
    "stopped": "it was stopped",
    "killed": "it was killed",
}

# What is said of a metric besides rewards, and its name.
_CURVES = (
    ("response tokens", "completions/mean_length"),
    ("cut at the limit", "completions/clipped_ratio"),
    ("entropy", "entropy"),
    ("kl", "kl"),
    ("mismatch kl", "off_policy/mismatch_kl"),
    ("gradient norm", "grad_norm"),
    ("staleness", "staleness/mean"),
    ("idle rollout", "idle/rollout"),
    ("idle learner", "idle/learner"),
)
# One row per quantile (from 1) of the lengths of all responses there are tokens of.
_QUANTILES = f"""
SELECT MIN(length), MAX(length), COUNT(*), AVG(reward),
    COALESCE(AVG(reason IN ('length', 'finished_early')), 0),
    AVG(ending IS 'consumed'), AVG(ending IS 'filtered'), AVG(ending IS 'aborted'),
    AVG(ending IS NULL)
FROM (SELECT *, NTILE({_NUM_QUANTILES}) OVER (ORDER BY length, group_id, member) AS quantile
    FROM responses)
GROUP BY quantile ORDER BY quantile"""
_LEFT_OUT = """SELECT ending_reason, COUNT(*) FROM groups 
    WHERE ending_reason IS NOT NULL AND suite IS NULL GROUP BY 1"""
_DELETED = """SELECT (SELECT COUNT(*) FROM (SELECT DISTINCT group_id, member FROM pruned)),
    (SELECT COUNT(*) FROM (SELECT DISTINCT group_id, member FROM segments WHERE +group_id >= 0))"""

Steps = dict[int, dict[str, Any]]


def show(run_dir: Path, reader: TrajectoryReader, console: Console) -> None:
    """Print all of it."""
    rows = metrics.rows(run_dir)
    run, steps = query.run(run_dir, reader, rows), metrics.by_step(rows)
    _show_learned(run, steps, reader, console)
    _show_last_responses(steps, reader, console)
    console.print()
    _show_throughput(steps, reader, console)
    if (limit := run["limit"]) is not None:
        console.print(Text(f"Pace: {limit['line']} (last {limit['steps']} steps)"))
    if staleness := run["staleness"]:
        total = sum(staleness.values())
        lines = [(str(age), f"{n:,}", f"{n / total:.1%}") for age, n in staleness.items()]
        title = "Staleness when trained on"
        console.print(table(title, ("versions", "trajectories", "share"), lines))
    _show_drafts(steps, reader, console)
    _show_lengths(steps, console)
    _show_endings(reader, console)
    if (line := backup_line(run_dir, run["events"], run["seconds"])) is not None:
        console.print(Text(f"Backup: {printable(line)}"))
    ((gone, left),) = reader.query(_DELETED)
    if gone:
        console.print(Text(f"Tokens: of {left:,} responses, those of {gone:,} were deleted"))


# -- what it learned -------------------------------------------------------------------------------


def _show_learned(run: Record, steps: Steps, reader: TrajectoryReader, console: Console) -> None:
    """How far the run is, and what became of rewards."""
    console.print(Text(_headline(run, max(steps, default=0)), style="bold"), soft_wrap=False)
    if any(step > 0 for step in steps):
        console.print(_curves(steps))
        return
    ((finished, rewarded, mean),) = reader.query(
        "SELECT COUNT(*), COUNT(reward), AVG(reward) FROM trajectories WHERE group_id >= 0"
    )
    text = f"So far: {run['groups']:,} prompts, {finished:,} finished responses, "
    text += f"{rewarded:,} rewarded" + (f", mean reward {_figure(mean)}" if rewarded else "")
    console.print(Text(f"No step has been completed. {text}"))
    if run["held_out"]:
        before = _figure(run["held_out"][0][1])
        console.print(Text(f"Held-out reward before training: {before}"))


def _headline(run: Record, step: int) -> str:
    config, planned = run["config"], run["max_steps"]
    name = run["name"]
    if config:
        name = f"{config.get('name')}, {config.get('schedule', {}).get('name')}"
    of = f" of {planned}" if planned is not None else ""
    after = f" after {clock(run['seconds'])}" if run["events"] else ""
    is_done = (step, run["state"]) == (planned, "ended")
    how = "" if is_done else f"; {_STATES[run['state']]}"
    return printable(f"{name}: step {step}{of}{after}{how}")


def _curves(steps: Steps) -> Table:
    """One line for each number that says what was learned: first, last, best, and its curve."""
    functions = [name for name in steps[max(steps)] if name.startswith("rewards/")]
    functions = [name for name in functions if name.endswith("/mean")]
    suites = dict.fromkeys(name for row in steps.values() for name in headlines(row))
    lines = [("held-out reward", "eval/reward")]
    lines += [(name, f"eval/{'/'.join(name.rsplit(' ', 1))}") for name in suites]
    lines += [("training reward", "reward")]
    if len(functions) > 1:  # one alone is the reward
        lines += [(f"  {n.removeprefix('rewards/').removesuffix('/mean')}", n) for n in functions]
    lines += _CURVES
    grid = Table.grid(padding=(0, 2, 0, 0))
    grid.add_column(no_wrap=True)
    for _ in range(3):
        grid.add_column(justify="right", no_wrap=True)
    grid.add_row(*(Text(each, style="dim") for each in ("", "first", "last", "highest", "")))
    for label, name in lines:
        points = [(row[name], step) for step, row in steps.items() if row.get(name) is not None]
        if not points:
            continue
        values = [value for value, _ in points]
        # Of equals the first: when it came that far.
        best, at = max(points, key=lambda point: (point[0], -point[1]))
        grid.add_row(
            Text(shortened(label, _NAME_WIDTH)),
            _figure(values[0]),
            Text(_figure(values[-1]), style="bold"),
            f"{_figure(best)} at {at}",
            Text(sparkline(_means(values, _CURVE_WIDTH))),
        )
    return grid


def _means(values: Sequence[float], count: int) -> list[float]:
    """At most `count` values, each the mean of as many neighbours as any other, or one more."""
    count = min(count, len(values))
    edges = [len(values) * place // count for place in range(count + 1)]
    return [sum(values[start:end]) / (end - start) for start, end in pairwise(edges)]


def _figure(value: float) -> str:
    return f"{value:.3f}" if value == 0 or 0.001 <= abs(value) < 1000 else f"{value:.3g}"


# -- responses -------------------------------------------------------------------------------------


def _show_last_responses(steps: Steps, reader: TrajectoryReader, console: Console) -> None:
    """Some of the best and the worst responses of the last batch, or of all there are so far."""
    # A batch that is being trained on has no metrics yet.
    ((last,),) = reader.query(
        "SELECT MAX(trained) + 1 FROM trajectories WHERE trained < ?", max(steps, default=0)
    )
    count = len(query.rewarded(reader, "best", 2 * _NUM_SHOWN, last)) // 2
    of = "so far" if last is None else f"of step {last}"
    for kind in query.KINDS if count else ():
        title = f"{kind.capitalize()} responses {of}"
        show_responses(title, query.rewarded(reader, kind, count, last), console)
    if count:
        console.print()
        console.print(Text("More: --worst N, --best N, --trajectory G.M", style="dim"))


def show_responses(title: str, responses: Sequence[Record], console: Console) -> None:
    """Print responses, each with its prompt if it has one, and what it says."""
    if responses:
        console.print()
        console.print(Text(title, style="bold"))
    # Two columns of indentation, nine of labels, and one that stays free.
    width = console.width - 12
    for each in responses:
        where = f"{each['group']}.{each['member']}"
        line = Text.assemble((where, "bold cyan"), f"  {_said_of(each)}")
        console.print(line, overflow="fold")
        parts, text = each["components"] or {}, each["text"]
        rows = {
            "rewards": ", ".join(f"{name} {value:g}" for name, value in parts.items()),
            "prompt": conversation(each["prompt"]) if "prompt" in each else "",
            "response": "(no text is stored)" if text is None else text or "(empty)",
            "columns": ", ".join(f"{n} = {v}" for n, v in each.get("columns", {}).items()),
        }
        if len(parts) == 1:  # it is the reward
            del rows["rewards"]
        grid = Table.grid(padding=0)
        grid.add_column(width=11, no_wrap=True, style="dim")
        grid.add_column(width=width, overflow="fold")
        for label, said in rows.items():
            room = width * (_RESPONSE_LINES if label == "response" else 1)
            if said:
                grid.add_row(f"  {label}", Text(shortened(said, room)))
        console.print(grid)


def _said_of(response: Record) -> str:
    """What is said of a response in one line."""
    reason, ending, step = response["reason"], response["ending"], response["step"]
    tokens = f"{response['length']} token{'' if response['length'] == 1 else 's'}"
    how = {"stop": "", "length": ", cut at the limit", None: " so far"}.get(reason, f", {reason}")
    end = {"consumed": "not needed", None: "waits"}.get(ending, str(ending))
    reward = "-" if response["reward"] is None else _figure(response["reward"])
    said = f"reward {reward}, {tokens}{how}, {end if step is None else f'step {step}'}"
    if step is not None and "first_version" in response:
        said += f", staleness {step - 1 - response['first_version']}"
    return said


# -- how it went -----------------------------------------------------------------------------------


def _show_throughput(steps: Steps, reader: TrajectoryReader, console: Console) -> None:
    rows = [row for row in steps.values() if row.get("step_time")]
    if not rows:
        return
    seconds, counts = sum(row["step_time"] for row in rows), query.trained(reader)
    trained = sum(counts.get(row["step"], 0) for row in rows)
    tokens = sum(
        counts.get(row["step"], 0) * (row.get("completions/mean_length") or 0.0) for row in rows
    )
    said = f"Throughput: {trained / seconds:.1f} trained responses/s, "
    said += f"{tokens / seconds:,.0f} of their tokens/s, "
    said += f"median step {median(row['step_time'] for row in rows):.2f} s"
    console.print(Text(said))


def _show_drafts(steps: Steps, reader: TrajectoryReader, console: Console) -> None:
    epochs = query.drafts_by_epoch(reader)
    if not any(each["drafted"] for each in epochs):
        return
    rows = [
        [str(each["epoch"]), f"{each['tokens']:,}", number(each["acceptance_length"], ".2f"),
         f"{each['drafted']:,}", number(each["acceptance_rate"], ".1%")]
        for each in epochs
    ]  # fmt: skip
    headings = ("epoch", "tokens", "acceptance length", "drafted", "accepted")
    console.print(table("Drafts by epoch", headings, rows))
    saved = sum(row.get("draft/time_saved") or 0.0 for row in steps.values())
    console.print(Text(f"Time that drafts saved, as instances estimate it: {saved:.1f} s"))


def _show_lengths(steps: Steps, console: Console) -> None:
    """How well lengths were predicted, by the last step that says."""
    rows = [{n: v for n, v in row.items() if n.startswith("lengths/")} for row in steps.values()]
    for row in list(filter(None, rows))[-1:]:
        found = [
            f"{name.removeprefix('lengths/').replace('_', ' ')} {number(value, '.2f')}"
            for name, value in row.items()
        ]
        console.print(Text(f"Length prediction: {', '.join(found)}"))


def _show_endings(reader: TrajectoryReader, console: Console) -> None:
    quantiles = [
        [f"{low}-{high}", f"{count:,}", number(reward, ".3f"), *(f"{each:.1%}" for each in shares)]
        for low, high, count, reward, *shares in reader.query(_QUANTILES)
    ]
    if quantiles:
        endings = ("cut", "consumed", "filtered", "aborted", "open")
        headings = ("tokens", "count", "reward", *endings)
        console.print(table("Endings by length quantile", headings, quantiles))
    for reason, count in reader.query(_LEFT_OUT):
        console.print(Text(f"Groups left out ({printable(reason)}): {count:,}"))
