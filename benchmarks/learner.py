"""A learner's training steps, in this process: tokens per second, prompts included.

Batches are sampled from a recipe's first policy and rewarded. To compare two commits, call it in a
checkout of each, in turn.
"""

from __future__ import annotations

import argparse
import time
from typing import Any

from benchmarks import harness
from benchmarks.rollouts.policy import Policy, learner_of, one_core
from rhymeflow.config import Config
from rhymeflow.config.load import read_config
from rhymeflow.learner.learner import Learner
from rhymeflow.learner.sample import Sample
from rhymeflow.utils.process import keep_freed_memory

RECIPES = {"demo": 8, "smollm2": 2}
"""And how many batches of each."""


def add_arguments(parser: argparse.ArgumentParser) -> None:
    harness.add_choice(parser, "--recipe", RECIPES)
    harness.add_number(parser, "--repeats", 5, "times that each batch is trained on")
    parser.add_argument("--dtype", default="auto", help="model.dtype (default: the recipe's)")


def run(args: argparse.Namespace) -> dict[str, Any]:
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
