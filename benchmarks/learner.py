"""A learner's training steps, in this process: tokens per second, prompts included.

Batches are sampled from a recipe's first policy and rewarded. To compare two commits, call it in a
checkout of each, in turn. With `--lora`, whole runs of the recipe instead, by an adapter and by all
weights: held-out reward before the first step and after the last.
"""

from __future__ import annotations

import argparse
import statistics
import time
from functools import partial
from pathlib import Path
from typing import Any

from benchmarks import harness
from benchmarks.rollouts.policy import Policy, learner_of, one_core
from benchmarks.training.train import repeated, train
from benchmarks.weights import ADAPTER_RATE
from rhymeflow.config import Config
from rhymeflow.config.load import read_config
from rhymeflow.learner.learner import Learner
from rhymeflow.learner.sample import Sample
from rhymeflow.observe import metrics
from rhymeflow.utils.process import keep_freed_memory

RECIPES = {"demo": 8, "smollm2": 2}
"""And how many batches of each."""


def add_arguments(parser: argparse.ArgumentParser) -> None:
    harness.add_choice(parser, "--recipe", RECIPES)
    harness.add_number(parser, "--repeats", 5, "times that each batch is trained on")
    parser.add_argument("--dtype", default="auto", help="model.dtype (default: the recipe's)")
    harness.add_number(parser, "--lora", None, "whole runs, with and without an adapter so wide")
    harness.add_number(parser, "--seeds", 3, "runs of each with --lora")


def run(args: argparse.Namespace) -> dict[str, Any]:
    if args.lora is not None:
        return with_adapter(args)
    keep_freed_memory()  # as the worker does
    rows = []
    for recipe in args.recipe or RECIPES:
        config = read_config(recipe, {"model.dtype": args.dtype, "model.device": "cpu"})
        with one_core():
            speeds = measure(config, RECIPES[recipe], args.repeats)
        rows.append({"recipe": recipe, **harness.side_row("rhymeflow", speeds, "tokens/s")})
    return harness.report("learner", rows, [], args, "One thread, after a step not counted.")


def measure(config: Config, num_batches: int, repeats: int) -> list[float]:
    """Tokens per second on batches of rewarded responses of the recipe's first policy."""
    policy, size = Policy(config), config.learner.groups_per_batch
    engine = policy.engine(config.rollout.max_num_seqs)
    firsts = range(0, num_batches * size, size)
    given = [policy.sampled(engine, range(first, first + size), 0, 0) for first in firsts]
    learner = learner_of(config)
    learner.train(given[0], 1)
    return [speed(learner, batch) for batch in given for _ in range(repeats)]


def speed(learner: Learner, batch: list[Sample]) -> float:
    started = time.perf_counter()
    learner.train(batch, 1)
    tokens = sum(len(sample.prompt_ids) + len(sample.completion_ids) for sample in batch)
    return tokens / (time.perf_counter() - started)


# -- whole runs ------------------------------------------------------------------------------------


def with_adapter(args: argparse.Namespace) -> dict[str, Any]:
    rows, targets = [], []
    for recipe in args.recipe or RECIPES:
        rate = ADAPTER_RATE * read_config(recipe, {}).learner.learning_rate
        adapter = {"model.lora.rank": str(args.lora), "learner.learning_rate": str(rate)}
        sides = {"all weights": {}, f"adapter of rank {args.lora}": adapter}
        measures = {
            side: partial(held_out, recipe, fields | {"model.dtype": args.dtype})
            for side, fields in sides.items()
        }
        seen = repeated(measures, args.seeds, lambda rewards: rewards[-1])
        for side, runs in seen.items():
            first = round(statistics.median(each[0] for each in runs), 3)
            last = harness.spread("last", [each[-1] for each in runs], 3)
            rows.append({"recipe": recipe, "trained": side, "first": first, **last})
        whole, by_adapter = ([each[-1] for each in runs] for runs in seen.values())
        median = statistics.median(by_adapter)
        targets.append(harness.Target(f"{recipe}: held-out reward", median, min(whole)))
    notes = (
        f"{args.seeds} seeds; the adapter's learning rate is {ADAPTER_RATE} times the recipe's. "
        "Its median should be at least the least of all weights'."
    )
    return harness.report("learner-adapter", rows, targets, args, notes)


def held_out(recipe: str, changes: dict[str, str], seed: int, run_dir: Path) -> list[float]:
    """The held-out rewards of a whole run, in order."""
    own = {"run.seed": str(seed), "run.report_to": "[]", "run.output_dir": str(run_dir.resolve())}
    rows = metrics.read(train(read_config(recipe, changes | own)))
    return [row["eval/reward"] for row in rows.values() if "eval/reward" in row]
