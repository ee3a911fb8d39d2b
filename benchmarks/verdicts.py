"""Verdicts on learning: runs that fail on purpose are told why, and healthy ones are not accused.

A failing run has to be given the verdict that it is made for within `STEPS` steps. Of a healthy one
no verdict may hold at any step.
"""

from __future__ import annotations

import argparse
import itertools
import json
import sys
import tempfile
import time
import zlib
from pathlib import Path
from typing import Any, NamedTuple

from benchmarks import harness
from benchmarks.training.train import train
from rhymeflow.config.load import read_config
from rhymeflow.environments import Environment
from rhymeflow.observe import metrics

STEPS, HEALTHY_STEPS = 10, 20
PATIENCE = 180.0
"""Seconds that a run may take that never ends a step."""
DEMO = {"learner.max_steps": str(STEPS), "run.report_to": "[]", "data.eval_size": "0"}
OWN = "benchmarks.verdicts"


def zero(completions: list[str], **columns: Any) -> list[float]:
    return [0.0] * len(completions)


def constant(completions: list[str], **columns: Any) -> list[float]:
    return [0.3] * len(completions)


def of_the_prompt(prompts: list[str], completions: list[str], **columns: Any) -> list[float]:
    """The same for all responses to a prompt."""
    return [float(sum(map(ord, prompt)) % 3) for prompt in prompts]


def chance(completions: list[str], **columns: Any) -> list[float]:
    return [drawn(text) for text in completions]


def drawn(text: str) -> float:
    """A number from 0 to 1 that depends on the text alone, as a repeated call does."""
    return zlib.crc32(text.encode()) / 2**32


def none(completions: list[str], **columns: Any) -> list[None]:
    return [None] * len(completions)


def fails(completions: list[str], **columns: Any) -> list[float]:
    if any(drawn(text) < 0.05 for text in completions):
        raise ValueError("no number in it")
    return [float(len(text)) for text in completions]


class Silent(Environment):
    """Ends each game with the first turn."""

    def step(self, messages: Any) -> None:
        self.text = str(messages)

    def reward(self) -> float:
        return drawn(self.text)


def rewarded(name: str) -> str:
    return f"[{{function: {OWN}.{name}}}]"


class Failing(NamedTuple):
    verdict: str
    settings: dict[str, str]
    recipe: str = "demo"


FAILING = (
    Failing("rewards all 0", {"reward.functions": rewarded("zero")}),
    Failing("rewards constant", {"reward.functions": rewarded("constant")}),
    Failing("no spread of rewards", {"reward.functions": rewarded("of_the_prompt")}),
    Failing("reward collapsed", {"learner.learning_rate": "0.5"}),
    Failing("responses cut", {"rollout.max_completion_length": "12"}),
    Failing(
        "entropy gone",
        {
            "reward.functions": rewarded("chance"),
            "learner.learning_rate": "0.1",
            "schedule.name": "synchronous",
        },
    ),
    Failing(
        "groups filtered",
        {"reward.functions": rewarded("constant"), "schedule.filter_zero_variance": "true"},
    ),
    Failing(
        "rewards fail",
        {"reward.functions": rewarded("fails"), "reward.on_failure": "drop"},
    ),
    Failing(
        "reward function returns None",
        {"reward.functions": f"[recipe:demo, {{function: {OWN}.none}}]"},
    ),
    Failing("reference runs away", {"learner.beta": "1e-6", "learner.learning_rate": "0.02"}),
    Failing("mismatch", {"schedule.max_staleness": "4", "learner.learning_rate": "0.01"}),
    Failing(
        "tokens clipped",
        {
            "learner.num_iterations": "8",
            "learner.learning_rate": "0.001",
            "learner.epsilon": "1e-7",
            "learner.epsilon_high": "1e-7",
        },
    ),
    Failing(
        "turns unused",
        {"environment.classes": f"[{{environment: {OWN}.Silent}}]"},
        recipe="guess",
    ),
    Failing(
        "tools unused",
        {"rollout.max_completion_length": "4", "learner.groups_per_batch": "1"},
        recipe="smollm2_tools",
    ),
)
SCHEDULES = ("synchronous", "one_step", "bounded", "staleflow", "rhymeflow")
HEALTHY = [
    *itertools.product(("demo",), SCHEDULES, (0, 1, 2)),
    *itertools.product(("guess",), ("synchronous", "rhymeflow"), (0, 1)),
    ("smollm2", "rhymeflow", 0),
]
"""Recipe, schedule, seed."""


def add_arguments(parser: argparse.ArgumentParser) -> None:
    harness.add_choice(parser, "--verdict", [each.verdict for each in FAILING])
    parser.add_argument("--failing", action="store_true", help="only the runs that fail")


def run(args: argparse.Namespace) -> dict[str, Any]:
    chosen = [each for each in FAILING if args.verdict is None or each.verdict in args.verdict]
    rows = [failing(each) for each in chosen]
    targets = [harness.Target("verdicts/named", sum(r["named"] for r in rows), len(rows))]
    if args.verdict is None and not args.failing:
        healthy = [healthy_run(*each) for each in HEALTHY]
        rows += healthy
        accused = sum(bool(row["verdicts"]) for row in healthy)
        targets.append(harness.at_most("verdicts/healthy runs accused", accused, 0))
    return harness.report("verdicts", rows, targets, args, __doc__ or "")


def failing(case: Failing) -> dict[str, Any]:
    until = case.verdict if case.verdict == "groups filtered" else None  # that run never ends
    found = verdicts(case.recipe, case.settings, until)
    named = {step for step, name in found if name == case.verdict}
    row = {"run": case.verdict, "named": bool(named), "from step": min(named, default="")}
    return row | {"verdicts": told(found)}


def healthy_run(recipe: str, schedule: str, seed: int) -> dict[str, Any]:
    settings = {"schedule.name": schedule, "run.seed": str(seed)}
    if recipe != "smollm2":
        settings["learner.max_steps"] = str(HEALTHY_STEPS)
    found = verdicts(recipe, settings)
    return {"run": f"{recipe}, {schedule}, seed {seed}", "verdicts": told(found)}


def verdicts(
    recipe: str, settings: dict[str, str], until: str | None = None
) -> list[tuple[int, str]]:
    """The step and the name of each verdict that a run was given, `until` one is given."""
    with tempfile.TemporaryDirectory(prefix="rhymeflow-verdicts-") as folder:
        own = {**DEMO, **settings, "run.output_dir": f"{folder}/run"}
        begun = time.monotonic()

        def is_enough(run_dir: Path) -> bool:
            is_late = time.monotonic() - begun > PATIENCE  # a run may filter all groups
            return is_late or any(name == until for _, name in given(run_dir))

        found = given(train(read_config(recipe, own), is_enough=is_enough if until else None))
    print(f"{recipe} {settings}: {told(found)}", file=sys.stderr, flush=True)
    return found


def given(run_dir: Path) -> list[tuple[int, str]]:
    """The verdicts in a run directory so far."""
    file = run_dir / metrics.VERDICTS
    lines = file.read_text().splitlines() if file.is_file() else []
    return [(each["step"], each["name"]) for each in map(json.loads, lines)]


def told(found: list[tuple[int, str]]) -> str:
    return ", ".join(f"{name} at {step}" for step, name in found)
