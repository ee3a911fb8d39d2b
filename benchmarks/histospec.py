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
from collections.abc import Callable, Sequence
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
from rhymeflow.engine.native.engine import Engine
from rhymeflow.histospec.drafter import Drafter
from rhymeflow.observe.metrics import mean

EPOCH = 2
"""From 0: its weights and prompts; the epochs before it are history."""
STEPS = {"demo": 16, "smollm2": 4}
"""Steps of an epoch."""
REQUESTS = {1: 4, 8: 32, 32: 64, 64: 64, 128: 128}
"""Responses of one measurement, by how many run at a time."""
WARM_UP = 2
"""Measurements that are not counted: iteration times and acceptance are learned."""

UNCOUNTED = 2
"""Steps at the end that are not counted."""
RATIOS = {
    "steps/s": ("steps", 1.5),
    "steps/s, later epochs": ("steps, later epochs", 1.5),
    "rollout tokens/s, later epochs": ("rollout", 2.5),
}
"""Figures whose ratio has a target: its name and value."""
Figures = dict[str, float]


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
            found, target = Comparison(case, policy, args.runs).measure(args.repeats)
            rows += [{"part": part, **row} for row in found]
            targets.append(target)
    return rows, targets


PARTS: dict[str, Callable[[argparse.Namespace], harness.Found]] = {
    **{name: functools.partial(in_process, part=name) for name in ("demo", "smollm2", "rhyming")},
    "runs": lambda args: whole_runs(args.pairs, args.steps),
}


class Comparison:
    """Two engines over one policy: without drafts and with them."""

    def __init__(self, case: Case, policy: Policy, runs: Path) -> None:
        self.case, self.policy = case, policy
        policy.load(record.checkpoint(case.recipe, runs, EPOCH * STEPS[case.recipe]))
        history, prompts = material(case, runs)
        self.slices = slices(prompts, case, policy)
        rollout = policy.config.rollout
        index = empty_history(history)
        remember(index, history)
        drafter = Drafter(
            index,
            policy.config.drafting,
            max_sequences=case.batch,
            max_length=max(map(len, policy.prompts)) + rollout.max_completion_length,
        )
        self.sides = {
            "off": Side(policy.engine(case.batch)),
            "cost": Side(policy.engine(case.batch, drafter=drafter)),
        }

    def measure(self, repeats: int) -> tuple[list[dict[str, Any]], harness.Target]:
        repeats = min(repeats, len(self.slices) - WARM_UP)
        sides = {
            name: functools.partial(side.measure, self.slices) for name, side in self.sides.items()
        }
        harness.interleave(sides, WARM_UP, f"{self.case.name}, warm-up")
        for side in self.sides.values():
            side.done.clear()
        values = harness.interleave(sides, repeats, self.case.name)
        ratio = harness.median_ratio(values["cost"], values["off"])
        target = harness.Target(f"histospec/{self.case.name}", ratio, self.case.target)
        return [self._row(name, values) for name in self.sides], target

    def _row(self, name: str, values: dict[str, list[float]]) -> dict[str, Any]:
        case, done = self.case, self.sides[name].done
        ratios = [on / off for on, off in zip(values[name], values["off"], strict=True)]
        pairs = zip(done, self.sides["off"].done, strict=True)
        same = statistics.fmean(a.tokens == b.tokens for a, b in pairs)
        generated = sum(len(request.tokens) for request in done)
        steps, drafted = (sum(getattr(r, n) for r in done) for n in ("steps", "drafted"))
        return {
            "model": case.recipe + (", rhyming noise" if case.rhymes else ""),
            "temperature": case.temperature,
            "batch": case.batch,
            "window": name,
            "tokens/s": round(statistics.median(values[name])),
            **harness.spread("ratio", ratios, 3),
            "mean acceptance length": round(generated / steps, 2),
            "acceptance rate": round((generated - steps) / drafted, 3) if drafted else "",
            "identical": round(same, 3),
        }


class Side:
    """An engine, and the requests that it has completed."""

    def __init__(self, engine: Engine) -> None:
        self.engine = engine
        self.number = 0
        """Of the next slice."""
        self.done: list[Request] = []

    def measure(self, makers: Sequence[Callable[[], list[Request]]]) -> float:
        requests = makers[self.number]()
        seconds = drain(self.engine, requests)
        self.number += 1
        self.done += requests
        return sum(len(request.tokens) for request in requests) / seconds


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

    firsts = range(0, len(rows) * members - size + 1, size)
    return [functools.partial(make, first) for first in firsts]


# -- whole runs ------------------------------------------------------------------------------------


def whole_runs(pairs: int, steps: int) -> harness.Found:
    sides = {window: functools.partial(one_run, window, steps) for window in ("off", "cost")}
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


def one_run(window: str, steps: int, _: int, run_dir: Path) -> Figures:
    fields = {
        "drafting.window": window,
        "learner.max_steps": str(steps),
        "run.eval_steps": str(STEPS["demo"]),
        "run.report_to": "[]",
        "run.output_dir": str(run_dir),
    }
    return figures(training_rows(train(read_config("demo", fields))), steps)


def ratio(ours: list[Figures], theirs: list[Figures], name: str) -> float:
    return harness.median_ratio([run[name] for run in ours], [run[name] for run in theirs])


def figures(rows: list[dict[str, Any]], steps: int) -> Figures:
    assert len(rows) == steps, f"{len(rows)} steps"
    assert steps > STEPS["demo"] + UNCOUNTED + 1, "no step of the second epoch is counted"
    later = rows[STEPS["demo"] : steps - UNCOUNTED]
    busy = sum(row["step_time"] * (1 - row["idle/rollout"]) for row in later)
    generated = sum(row["step_time"] * row["rollout/tokens_per_s"] for row in later)
    return {
        "steps/s": _rate(rows, 0, steps - UNCOUNTED),
        "steps/s, later epochs": _rate(rows, STEPS["demo"] - 1, steps - UNCOUNTED),
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
