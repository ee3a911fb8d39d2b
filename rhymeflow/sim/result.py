"""The figures of a simulated run, and their display as tables.

Rates and idle shares leave out the first `skip_steps` and the last `uncounted` steps."""

from __future__ import annotations

import dataclasses
import io
import json
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import pairwise
from statistics import median

from rich.console import Console
from rich.table import Table

from rhymeflow.config import Config
from rhymeflow.errors import counted
from rhymeflow.observe.printable import number, table
from rhymeflow.sim.audit import Outcome, PublishedStep
from rhymeflow.sim.cluster import Cluster

_NUM_QUANTILES = 5
_WIDTH = 100
_BAR = 40


@dataclass(frozen=True, slots=True)
class Quantile:
    """Responses of similar full length, and how they ended."""

    shortest: int  # tokens
    longest: int
    responses: int
    endings: dict[str, int]  # `consumed`, `filtered`, or `aborted: REASON`


@dataclass(frozen=True, slots=True)
class SimulationResult:
    """Figures of a simulated run; times in virtual seconds."""

    name: str
    schedule: str
    max_staleness: int
    num_instances: int
    devices: str  # the cluster's devices, in words
    steps: int
    skipped: int  # steps at the beginning that rates and idle shares leave out
    uncounted: int  # steps at the end that they leave out
    seconds: float  # of the whole run
    step_seconds: tuple[float, ...]  # between the publications of consecutive versions
    steps_per_second: float
    throughput: float  # trained tokens, of responses and prompts, per second
    response_throughput: float  # trained tokens of responses per second, observations included
    trajectories_per_second: float  # trained responses per second
    idle_rollout: float  # share of the instances' time in which they were idle
    idle_instances: tuple[float, ...]  # idle share of each, as they joined, in the whole run
    idle_learner: float
    """Share of the learner's time in which it neither trained nor pushed. Being down and repeating
    lost batches count as idle."""
    staleness: dict[int, int]
    """Number of trained responses by the age of their oldest token, in versions."""
    quantiles: tuple[Quantile, ...]
    mean_length: float  # of trained responses
    tokens_generated: int  # of responses, trained on or not
    tokens_wasted: int  # of `tokens_generated`, those not trained on
    tokens_recomputed: int  # of responses, after pulls, migrations and preemptions
    pulls: int
    preemptions: int
    interrupts: int  # responses stopped for a migration, a pull or an early end
    tokens_per_iteration: float  # mean per decoding trajectory; 1 without drafts
    drafted: int  # tokens
    accepted: int  # tokens
    rank_correlation: float | None
    """Spearman's, of the lengths predicted when a group was requested and the true ones, at the end
    of the run; None if no prompt came twice."""
    deaths: dict[str, int]
    """Number of deaths in the whole run by victim: `instance`, `learner`, `devices` (all of them)
    or `controller`."""
    tokens_lost: int
    """Generated tokens that were not stored when their instance died; part of `tokens_wasted`."""
    batches_retrained: int  # batches that were repeated after a death of the learner
    events: int
    commands: int
    ticks: int

    def json(self) -> str:
        """Return all figures as one JSON object."""
        return json.dumps(dataclasses.asdict(self), indent=2)

    def text(self) -> str:
        """Return the figures as tables."""
        text = io.StringIO()
        console = Console(file=text, width=_WIDTH, color_system=None)
        for grid in (_summary(self), _staleness(self), _endings(self)):
            console.print(grid)
        lines = (line.rstrip() for line in text.getvalue().splitlines())
        return "\n".join(lines).strip("\n")


def result(cluster: Cluster, config: Config, devices: str, uncounted: int) -> SimulationResult:
    """Compute the figures of a run that has ended; `devices` describes the cluster in words."""
    audit, steps, skipped = cluster.audit, cluster.steps, config.simulation.skip_steps
    counted_to = len(steps) - uncounted
    start = steps[skipped - 1] if skipped else PublishedStep(0, 0.0, 0.0, 0.0)
    end = steps[counted_to - 1]
    seconds = end.time - start.time
    measured = audit.batches[skipped:counted_to]
    times = [0.0, *(step.time for step in steps)]
    tallies = [instance.tally for instance in cluster.all_instances]
    generated = round(sum(tally.tokens_generated for tally in tallies))
    accepted = sum(tally.accepted for tally in tallies)
    trained = sum(batch.response_tokens for batch in audit.batches)
    sampled = sum(batch.sampled_tokens for batch in audit.batches)
    tokens = sum(batch.total_tokens for batch in measured)
    response_tokens = sum(batch.response_tokens for batch in measured)
    responses = sum(batch.responses for batch in audit.batches)
    rollout_busy = end.rollout_busy - start.rollout_busy
    lengths = cluster.coordinator.state.lengths.metrics()
    return SimulationResult(
        name=config.name,
        schedule=config.schedule.name,
        max_staleness=cluster.plan.max_staleness,
        num_instances=cluster.num_instances,
        devices=devices,
        steps=len(steps),
        skipped=skipped,
        uncounted=uncounted,
        seconds=steps[-1].time,
        step_seconds=tuple(b - a for a, b in pairwise(times)),
        steps_per_second=len(measured) / seconds,
        throughput=tokens / seconds,
        response_throughput=response_tokens / seconds,
        trajectories_per_second=sum(batch.responses for batch in measured) / seconds,
        idle_rollout=1 - rollout_busy / (seconds * cluster.num_instances),
        idle_instances=tuple(i.idle_share(steps[-1].time) for i in cluster.all_instances),
        idle_learner=1 - (end.learner_busy - start.learner_busy) / seconds,
        staleness=dict(sorted(audit.staleness.items())),
        quantiles=quantiles(audit.outcomes),
        mean_length=trained / responses,
        tokens_generated=generated,
        tokens_wasted=generated - sampled,
        tokens_recomputed=sum(tally.recomputed for tally in tallies),
        pulls=sum(tally.pulls for tally in tallies),
        preemptions=sum(tally.preemptions for tally in tallies),
        interrupts=sum(tally.interrupts for tally in tallies),
        tokens_per_iteration=1 + accepted / max(1, sum(tally.decode_steps for tally in tallies)),
        drafted=round(sum(tally.drafted for tally in tallies)),
        accepted=round(accepted),
        rank_correlation=lengths.get("lengths/rank_correlation"),
        deaths=dict(sorted(cluster.deaths.counts.items())),
        tokens_lost=sum(tally.lost for tally in tallies),
        batches_retrained=cluster.learner.retrained,
        events=cluster.events,
        commands=cluster.commands,
        ticks=cluster.ticks,
    )


def quantiles(outcomes: Sequence[Outcome]) -> tuple[Quantile, ...]:
    """Cut the responses, sorted by full length, into parts of equal size."""
    ordered = sorted(outcomes, key=lambda outcome: outcome.length)
    cuts = [round(i * len(ordered) / _NUM_QUANTILES) for i in range(_NUM_QUANTILES + 1)]
    parts = [ordered[a:b] for a, b in pairwise(cuts) if a < b]
    return tuple(
        Quantile(
            part[0].length,
            part[-1].length,
            len(part),
            dict(sorted(Counter(_label(outcome) for outcome in part).items())),
        )
        for part in parts
    )


def _label(outcome: Outcome) -> str:
    return f"aborted: {outcome.reason}" if outcome.ending == "aborted" else outcome.ending


# -- tables ----------------------------------------------------------------------------------------


def _summary(r: SimulationResult) -> Table:
    measured = r.step_seconds[r.skipped : r.steps - r.uncounted]
    rows = {
        "cluster": r.devices,
        "schedule": f"{r.schedule}, staleness at most {r.max_staleness}",
        "virtual time": f"{r.seconds:,.1f} s for {r.steps} steps",
        "step": (
            f"median {median(measured):,.2f} s, {min(measured):,.2f} to {max(measured):,.2f} s; "
            f"{r.steps_per_second:.4g} steps/s"
        ),
        "trained": (
            f"{r.throughput:,.0f} tokens/s ({r.response_throughput:,.0f} of responses), "
            f"{r.trajectories_per_second:,.2f} responses/s of {r.mean_length:,.0f} tokens"
        ),
        "idle": (
            f"rollout {r.idle_rollout:.1%} (in the whole run, instances from "
            f"{min(r.idle_instances):.1%} to {max(r.idle_instances):.1%}), "
            f"learner {r.idle_learner:.1%}"
        ),
        "tokens generated": (
            f"{r.tokens_generated:,}, {r.tokens_wasted / max(1, r.tokens_generated):.2%} of them "
            f"not trained on; {r.tokens_recomputed:,} recomputed"
        ),
        "instances": (
            f"{r.pulls:,} pulls, {r.interrupts:,} responses interrupted, "
            f"{r.preemptions:,} preempted"
        ),
        "lengths": f"predicted with rank correlation {number(r.rank_correlation, '.2f')}",
    }
    if r.drafted:
        drafts = f"{r.drafted:,} tokens, {r.accepted / r.drafted:.1%} accepted"
        per_iteration = f"{r.tokens_per_iteration:.2f} tokens per iteration and response"
        rows["drafts"] = f"{drafts}; {per_iteration}"
    if r.deaths:
        counts = ", ".join(f"{victim} {count:,}" for victim, count in r.deaths.items())
        lost = f"{r.tokens_lost:,} tokens lost, {counted(r.batches_retrained, 'batch')}"
        rows["deaths"] = f"{counts}; {lost} trained again"
    title = f"{r.name}: rates and idle shares of steps {r.skipped + 1} to {r.steps - r.uncounted}"
    grid = Table(box=None, title=title, title_justify="left", show_header=False, pad_edge=False)
    for row in rows.items():
        grid.add_row(*row)
    return grid


def _staleness(r: SimulationResult) -> Table:
    title = "Staleness of trained responses (their oldest token)"
    grid = table(title, ("versions", "responses"), ())
    grid.add_column("share")
    total = sum(r.staleness.values())
    for age, count in r.staleness.items():
        share = count / total
        bar = "█" * round(share * _BAR)
        grid.add_row(str(age), f"{count:,}", f"{bar} {share:.1%}")
    return grid


def _endings(r: SimulationResult) -> Table:
    labels = sorted({label for q in r.quantiles for label in q.endings})
    labels.sort(key=lambda label: (label.startswith("aborted"), label))
    title = "Endings by full length"  # of aborted responses too: what they would have become
    rows = []
    for quantile in r.quantiles:
        shares = [_share(quantile.endings.get(label, 0), quantile.responses) for label in labels]
        span = f"{quantile.shortest:,} – {quantile.longest:,}"
        rows.append((span, f"{quantile.responses:,}", *shares))
    return table(title, ("tokens", "responses", *labels), rows)


def _share(count: int, of: int) -> str:
    return f"{count / of:.1%}" if count else "–"
