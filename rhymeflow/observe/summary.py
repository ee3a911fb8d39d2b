"""The results of a run: `summary.json` and the panel at its end. They are computed from the run
directory alone, so also of a run that was killed."""

from __future__ import annotations

import json
from collections.abc import Iterable, Mapping
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import msgspec
from rich.panel import Panel

from rhymeflow.core.types import Version
from rhymeflow.observe import metrics, query
from rhymeflow.observe.audit import LogAudit, audit_run
from rhymeflow.observe.learning import DIVERGENCE
from rhymeflow.observe.printable import clock, facts, sparkline
from rhymeflow.store.backup import copied
from rhymeflow.store.damage import open_undamaged
from rhymeflow.store.schema import EVENTS, PUBLISHED
from rhymeflow.suites.figures import figures_of, headlines, metrics_of
from rhymeflow.utils import disk

_ENDINGS = """SELECT COALESCE(ending, 'unfinished'), COUNT(*) FROM groups
    WHERE suite IS NULL GROUP BY 1"""


@dataclass(frozen=True)
class DraftSummary:
    """Results of drafting. Held-out answers count only in the time."""

    mean_acceptance_length: float
    """Tokens generated for each iteration that generated any; 1 without drafts."""
    acceptance_rate: float
    time_saved: float  # seconds, of all instances, by their own estimate


@dataclass(frozen=True)
class Summary:
    """A run in numbers. `None`: the run did not get that far."""

    steps: int
    seconds: float  # from the run's beginning to its last event
    emulated: str  # what is emulated, whose times all times are; empty if nothing
    trajectories: int
    trained_tokens: int
    generated_tokens: int  # response tokens stored, held-out answers not counted
    eval_reward_before: float | None  # held-out mean reward of version 0
    eval_reward_after: float | None
    """That of the newest version that was evaluated, if one after version 0 was."""
    eval_rewards: tuple[tuple[Version, float], ...]
    evaluations: dict[str, dict[Version, dict[str, float]]]
    """Of each other suite its figures, by the version that had them."""
    reward_first: float | None  # mean reward of the first batch
    reward_last: float | None
    divergence_first: float | None  # from the teacher, in the first step, nats a token
    divergence_last: float | None
    staleness_max: int | None
    staleness_mean: float | None
    staleness: dict[int, int]
    """Trajectories trained on, by how many versions old their oldest token was."""
    endings: dict[str, int]
    """Groups by how they ended; `unfinished` were in flight when the run ended."""
    idle: dict[str, float]
    """Share of the time that instances and learner stood idle, of that of all steps together."""
    drafts: DraftSummary | None  # `None` of a run that drafted nothing
    verdicts: tuple[query.Record, ...]
    """On learning, at the end: `name`, `said`, `remedy`, `since` of each."""
    audit: LogAudit | None
    """How often each law was broken; `None` of a run that no attempt has begun."""
    backup: str | None  # how much of the run is in its backup; `None` of a run without one


def summarize(run_dir: Path, *, judges: bool = True) -> Summary:
    """Compute the summary; without `judges` it has no verdicts and no audit, which take long.
    Raises `UserError` if there is no run, or it cannot be read."""
    with open_undamaged(run_dir / EVENTS) as reader:
        ((steps,),) = reader.query(PUBLISHED) or [(0,)]
        num_events, seconds = reader.last_event()
        staleness, totals = query.staleness(reader), query.totals(reader)
        rows = metrics.read(run_dir)
        verdicts = query.LiveVerdicts().after(reader, [*rows.values()]) if judges else []
        attempts = reader.attempts()
        audited = audit_run(reader) if judges and attempts else None
        endings = dict(reader.query(_ENDINGS))
    evaluations = query.held_out(rows)
    idle = {
        part: metrics.time_weighted_mean(rows.values(), f"idle/{part}")
        for part in ("rollout", "learner")
    }
    (reward_first, reward_last), apart = _ends(rows, "reward"), _ends(rows, DIVERGENCE)
    total, count = sum(age * n for age, n in staleness.items()), sum(staleness.values())
    return Summary(
        steps=steps,
        seconds=round(seconds, 3),
        emulated=query.emulated(json.loads(attempts[-1].config)) if attempts else "",
        trajectories=totals["trajectories"],
        trained_tokens=int(totals["trained"]),
        generated_tokens=int(totals["generated"]),
        eval_reward_before=evaluations.get(0),
        eval_reward_after=evaluations[max(evaluations)] if any(evaluations) else None,
        eval_rewards=tuple(evaluations.items()),
        evaluations=_evaluations(rows),
        reward_first=reward_first,
        reward_last=reward_last,
        divergence_first=apart[0],
        divergence_last=apart[1],
        staleness_max=max(staleness, default=None),
        staleness_mean=total / count if count else None,
        staleness=staleness,
        endings={"consumed": 0, "filtered": 0, "aborted": 0} | endings,
        idle={part: share for part, share in idle.items() if share is not None},
        drafts=_drafts(totals, rows.values()),
        verdicts=tuple(verdicts),
        audit=audited,
        backup=backup_line(run_dir, num_events, seconds),
    )


def backup_line(run_dir: Path, num_events: int, seconds: float) -> str | None:
    """How much of a run is in its backup; the log has `num_events`, the last at `seconds`."""
    found = copied(run_dir)
    if found is None:
        return None
    if found.event >= num_events:
        return f"{found.url}: up to date"
    behind = f"{num_events - found.event:,} events, {seconds - found.time:.0f} s behind"
    return f"{found.url}: {behind}{f' ({found.problem})' if found.problem else ''}"


def write(run_dir: Path) -> Summary:
    """Write `summary.json` and return the summary."""
    summary = summarize(run_dir)
    text = msgspec.json.format(msgspec.json.encode(asdict(summary)), indent=2)
    disk.replace(run_dir / query.SUMMARY, text + b"\n")
    return summary


def panel(summary: Summary, run_dir: Path) -> Panel:
    """The panel at the end of a run."""
    where = [("run directory", str(run_dir)), ("look closer", f"rhymeflow inspect {run_dir}")]
    grid = facts([*_lines(summary), *where])
    return Panel(grid, title="done", title_align="left", padding=(0, 1), expand=False)


def _ends(
    rows: Mapping[Version, Mapping[str, Any]], name: str
) -> tuple[float | None, float | None]:
    """The first and the last value of a metric."""
    values = [row[name] for row in rows.values() if row.get(name) is not None]
    return (values[0], values[-1]) if values else (None, None)


def _evaluations(
    rows: Mapping[Version, Mapping[str, Any]],
) -> dict[str, dict[Version, dict[str, float]]]:
    """{suite: {version: its figures}}, without the held-out prompts."""
    found: dict[str, dict[Version, dict[str, float]]] = {}
    for version, row in rows.items():
        for suite, figures in figures_of(row).items():
            found.setdefault(suite, {})[version] = figures
    return found


def _drafts(totals: query.Record, rows: Iterable[Mapping[str, Any]]) -> DraftSummary | None:
    if not totals["drafted"]:
        return None
    found = query.draft_figures(totals["generated"], totals["steps"], totals["drafted"])
    saved = sum(row.get("draft/time_saved") or 0.0 for row in rows)
    return DraftSummary(found["acceptance_length"], found["acceptance_rate"], saved)


def _held_out(summary: Summary) -> str:
    """Held-out rewards before and after; a version that is not the last is named."""
    before = summary.eval_reward_before
    said = "" if before is None else f"{before:.3f} before"
    if summary.eval_reward_after is None:
        return f"{said}; no later version was evaluated"
    newest, after = summary.eval_rewards[-1]
    which = "" if newest == summary.steps else f" {newest} of {summary.steps} steps"
    curve = sparkline([reward for _, reward in summary.eval_rewards])
    return f"{said}{', ' * bool(said)}{after:.3f} after{which}  {curve}"


def _suite_lines(suite: str, versions: Mapping[Version, dict[str, float]]) -> list[tuple[str, str]]:
    """The headline figures of a suite, at the first and the last version, where these have them."""
    found: dict[str, list[str]] = {}
    for version in (min(versions), max(versions)):
        for name, value in headlines(metrics_of(suite, versions[version])).items():
            found.setdefault(name, []).append(f"{value:.3f} at {version}")
    return [(name, ", ".join(values)) for name, values in found.items()]


def _lines(summary: Summary) -> list[tuple[str, str]]:
    lines = [(each["name"], f"{query.dated(each)}; {each['remedy']}") for each in summary.verdicts]
    lines.append(("steps", f"{summary.steps:,} in {clock(summary.seconds)}"))
    if summary.emulated:
        lines.append(("times", summary.emulated))
    if summary.eval_rewards:
        lines.append(("held-out reward", _held_out(summary)))
    for suite, versions in summary.evaluations.items():
        lines += _suite_lines(suite, versions)
    if summary.reward_first is not None:
        rewards = f"{summary.reward_first:.3f} first, {summary.reward_last:.3f} last"
        lines.append(("training reward", rewards))
    if summary.divergence_first is not None:
        apart = f"{summary.divergence_first:.4f} first, {summary.divergence_last:.4f} last"
        lines.append(("from teacher", apart))
    return [*lines, *how_it_went(summary)]


def how_it_went(summary: Summary) -> list[tuple[str, str]]:
    """The part of the panel that does not say what was learned: labels and texts."""
    lines: list[tuple[str, str]] = []
    if summary.staleness_max is not None:
        ages = f"mean {summary.staleness_mean:.2f}, greatest {summary.staleness_max}"
        lines.append(("staleness", ages))
    tokens = f"{summary.trained_tokens:,} tokens of {summary.generated_tokens:,} generated"
    lines.append(("trained on", f"{summary.trajectories:,} trajectories, {tokens}"))
    lines.append(("groups", ", ".join(f"{n:,} {name}" for name, n in summary.endings.items() if n)))
    if (drafts := summary.drafts) is not None:
        said = f"acceptance length {drafts.mean_acceptance_length:.2f}, "
        said += f"{drafts.acceptance_rate:.0%} accepted, {drafts.time_saved:.1f} s saved"
        lines.append(("drafts", said))
    if summary.backup is not None:
        lines.append(("backup", summary.backup))
    if summary.idle:
        lines.append(("idle", ", ".join(f"{part} {x:.0%}" for part, x in summary.idle.items())))
    return lines
