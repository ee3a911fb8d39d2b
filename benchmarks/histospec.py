"""Rollouts with and without drafts from history: tokens per second in the state of real RL runs.

Parts `demo`, `smollm2`, `rhyming` run in this process: weights of a real run at its third epoch,
the epochs before as history, the prompts that come next; two engines generate the same responses in
turn. `runs` trains the demo end to end, with drafts and without; the last steps, in which nothing
is generated any more, are left out.
"""

from __future__ import annotations

import argparse
import functools
import statistics
from collections.abc import Callable, Mapping, Sequence
from contextlib import closing
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from benchmarks import harness
from benchmarks.rollouts import record
from benchmarks.rollouts.policy import Policy, drain, one_core
from benchmarks.rollouts.recorded import Rollout, empty_history, load, remember
from benchmarks.training.train import repeated, train, training_rows
from rhymeflow.config.load import read_config
from rhymeflow.engine.base import Request
from rhymeflow.histospec.drafter import Drafter
from rhymeflow.observe.metrics import time_weighted_mean
from rhymeflow.observe.query import draft_figures
from rhymeflow.store.reader import TrajectoryReader
from rhymeflow.store.schema import EVENTS

EPOCH = 2
"""From 0: its weights and prompts; the epochs before it are history."""
STEPS = {"demo": 16, "smollm2": 4}
"""Steps of an epoch."""
REQUESTS = {1: 4, 8: 32, 32: 64, 64: 64, 128: 128}
"""Responses of one measurement, by how many run at a time."""
WARM_UP = 2
"""Measurements that are not counted: iteration times and acceptance are learned."""


@dataclass(frozen=True)
class Case:
    recipe: str
    batch: int
    temperature: float = 1.0
    rhymes: bool = False
    target: float = 0.98
    """Least ratio of tokens per second, with drafts over without."""

    @property
    def name(self) -> str:
        noise = "-rhyming" if self.rhymes else ""
        return f"{self.recipe}{noise}/T{self.temperature}/epoch-{EPOCH}/batch-{self.batch}"

    @property
    def history(self) -> str:
        other = "" if self.temperature == 1.0 else f"-{self.temperature}"
        return self.recipe + ("-rhyming" if self.rhymes else other)


def cases(part: str) -> list[Case]:
    if part == "rhyming":
        targets = {1: 0.98, 8: 1.5, 32: 0.98}
        return [Case("smollm2", n, rhymes=True, target=target) for n, target in targets.items()]
    batches = (1, 8, 32, 64, 128) if part == "demo" else (1, 8, 32, 64)
    return [
        Case(part, n, temperature, target=2.5 if (n, temperature) == (128, 1.0) else 0.98)
        for temperature in (1.0, 0.6)
        for n in batches
    ]


def add_arguments(parser: argparse.ArgumentParser) -> None:
    record.add_arguments(parser)
    harness.add_parts_argument(parser, PARTS)
    harness.add_number(parser, "--repeats", 7, "measurements of a case")
    harness.add_number(parser, "--pairs", 3, "of real runs")
    harness.add_number(parser, "--steps", 48, "of a real run")


def run(args: argparse.Namespace) -> dict[str, Any]:
    return harness.report_parts("histospec", PARTS, args, NOTES)


NOTES = (
    "In one process, one thread: weights of a recorded run at the beginning of its third epoch, "
    "rollouts of the epochs before it as history, the next prompts in slices, each generated once "
    "without drafts and once with them, interleaved; tokens per second, prefill included; ratios "
    "are medians of neighbouring pairs, `least` and `greatest` their range. `identical`: share of "
    "responses that are token for token the same on both sides (in bfloat16 logits depend on the "
    "shape of the batch in their last bits, with or without drafts). `mean acceptance length`: "
    "tokens per iteration of a sequence; `acceptance rate`: share of drafted tokens."
)


def in_process(args: argparse.Namespace, part: str) -> harness.Found:
    rows, targets = [], []
    with one_core():
        policy = Policy(record.configuration(cases(part)[0].recipe))
        for case in cases(part):
            found, target = compare(case, policy, args)
            rows += [{"part": part, **row} for row in found]
            targets.append(target)
    return rows, targets


def compare(
    case: Case, policy: Policy, args: argparse.Namespace
) -> tuple[list[dict[str, Any]], harness.Target]:
    """A row for an engine without drafts, and one for another with them over the same policy."""
    policy.load(record.checkpoint(case.recipe, args.runs, EPOCH * STEPS[case.recipe]))
    history, prompts = material(case, args.runs)
    makers = slices(prompts, case, policy)
    index = empty_history(history)
    remember(index, history)
    longest = max(map(len, policy.prompts)) + policy.config.rollout.max_completion_length
    drafter = Drafter(index, policy.config.drafting, max_sequences=case.batch, max_length=longest)
    engines = {
        "off": policy.engine(case.batch),
        "cost": policy.engine(case.batch, drafter=drafter),
    }
    done: dict[str, list[list[Request]]] = {side: [] for side in engines}

    def measure(side: str) -> float:
        requests = makers[len(done[side])]()
        seconds = drain(engines[side], requests)
        done[side].append(requests)
        return sum(len(request.tokens) for request in requests) / seconds

    sides = {side: functools.partial(measure, side) for side in engines}
    harness.interleave(sides, WARM_UP, f"{case.name}, warm-up")
    values = harness.interleave(sides, min(args.repeats, len(makers) - WARM_UP), case.name)
    counted = {side: [one for each in done[side][WARM_UP:] for one in each] for side in engines}
    ratio = harness.median_ratio(values["cost"], values["off"])
    target = harness.Target(f"histospec/{case.name}", ratio, case.target)
    return [row(case, side, values, counted) for side in engines], target


def row(
    case: Case, side: str, values: dict[str, list[float]], done: dict[str, list[Request]]
) -> dict[str, Any]:
    ratios = [on / off for on, off in zip(values[side], values["off"], strict=True)]
    pairs = zip(done[side], done["off"], strict=True)
    generated = sum(len(request.tokens) for request in done[side])
    steps, drafted = (sum(getattr(r, n) for r in done[side]) for n in ("steps", "drafted"))
    drafts = draft_figures(generated, steps, drafted)
    return {
        "model": case.recipe + (", rhyming noise" if case.rhymes else ""),
        "temperature": case.temperature,
        "batch": case.batch,
        "window": side,
        "tokens/s": round(statistics.median(values[side])),
        **harness.spread("ratio", ratios, 3),
        "mean acceptance length": round(drafts["acceptance_length"], 2),
        "acceptance rate": round(drafts["acceptance_rate"], 3) if drafted else "",
        "identical": round(statistics.fmean(a.tokens == b.tokens for a, b in pairs), 3),
    }


def material(case: Case, runs: Path) -> tuple[list[Rollout], list[int]]:
    """History, and the rows of the prompts that come next, in the run's order."""
    history = load(record.recording(case.history, runs))
    order = load(record.recording(case.recipe, runs))
    rows = dict.fromkeys(rollout.row for rollout in order if rollout.epoch == EPOCH)
    return [rollout for rollout in history if rollout.epoch < EPOCH], list(rows)


def slices(rows: list[int], case: Case, policy: Policy) -> list[Callable[[], list[Request]]]:
    """Makers of equal requests for both sides: the epoch's prompts, so many at a time."""
    noise_epoch = 0 if case.rhymes else EPOCH
    members, size = policy.config.rollout.num_generations, REQUESTS[case.batch]

    def make(first: int) -> list[Request]:
        groups = rows[first // members : -(-(first + size) // members)]
        start = first % members
        return policy.requests(groups, noise_epoch, case.temperature)[start : start + size]

    num_slices = len(rows) * members // size
    return [functools.partial(make, size * number) for number in range(num_slices)]


# -- whole runs ------------------------------------------------------------------------------------

RATIOS = {
    "steps/s": ("steps", 1.5),
    "steps/s, later epochs": ("steps, later epochs", 1.5),
    "rollout tokens/s, later epochs": ("rollout", 2.5),
}
"""Figures whose ratio has a target: its name and value."""
UNCOUNTED = 2
"""Steps at the end that are not counted."""
_DRAFTS = """SELECT SUM(length), SUM(steps), SUM(drafted) FROM spans
    WHERE version >= ? AND version < ?"""


def whole_runs(args: argparse.Namespace) -> harness.Found:
    sides = {window: functools.partial(one_run, window, args.steps) for window in ("off", "cost")}
    seen = repeated(sides, args.pairs, lambda found: found["steps/s"])
    rows = []
    for window, runs in seen.items():
        medians = {n: round(statistics.median(run[n] for run in runs), 3) for n in runs[0]}
        speeds = [run["steps/s"] for run in runs]
        row = {"part": "runs", **harness.side_row(window, speeds, "steps/s"), **medians}
        del row["steps/s"]  # the median
        rows.append(row)
    targets = []
    for figure, (name, least) in RATIOS.items():
        ratio = harness.median_ratio(*([run[figure] for run in seen[s]] for s in ("cost", "off")))
        targets.append(harness.Target(f"histospec/runs/{name}", ratio, least))
    return rows, targets


def one_run(window: str, steps: int, _: int, run_dir: Path) -> dict[str, float]:
    fields = {
        "drafting.window": window,
        "learner.max_steps": str(steps),
        "run.eval_steps": str(STEPS["demo"]),
        "run.report_to": "[]",
        "run.output_dir": str(run_dir),
    }
    return figures(train(read_config("demo", fields)), steps)


def figures(run_dir: Path, steps: int) -> dict[str, float]:
    """Of a run, or of its later epochs; acceptance is of all their iterations together."""
    rows, last = training_rows(run_dir), steps - UNCOUNTED
    assert len(rows) == steps, f"{len(rows)} steps"
    later = rows[STEPS["demo"] : last]
    assert len(later) > 1, "no step of the second epoch is counted"
    idle = {
        name: time_weighted_mean(later, name) or 0.0 for name in ("idle/rollout", "idle/learner")
    }
    tokens = time_weighted_mean(later, "rollout/tokens_per_s") or 0.0
    with closing(TrajectoryReader(run_dir / EVENTS)) as reader:
        (sums,) = reader.query(_DRAFTS, STEPS["demo"], last)
    found = {
        "steps/s": rate(rows[:last]),
        "steps/s, later epochs": rate(rows[STEPS["demo"] - 1 : last]),
        "rollout tokens/s, later epochs": tokens / (1 - idle["idle/rollout"]),
        **idle,
    }
    drafts = draft_figures(*sums)
    if drafts["drafted"]:
        found["draft/mean_acceptance_length"] = drafts["acceptance_length"]
        found["draft/acceptance_rate"] = drafts["acceptance_rate"]
    return found


def rate(rows: Sequence[Mapping[str, float]]) -> float:
    """Steps per second from the end of the first to the end of the last."""
    return (len(rows) - 1) / (rows[-1]["time"] - rows[0]["time"])


PARTS: dict[str, Callable[[argparse.Namespace], harness.Found]] = {
    **{name: functools.partial(in_process, part=name) for name in ("demo", "smollm2", "rhyming")},
    "runs": whole_runs,
}
