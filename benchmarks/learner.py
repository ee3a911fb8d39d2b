"""A learner's training steps: tokens per second, against another checkout's.

Batches are sampled from a recipe's first policy and rewarded; each side is a process of its own,
and trains on every batch right after the other.
"""

from __future__ import annotations

import argparse
import functools
import json
import sys
import tempfile
from collections.abc import Iterator
from contextlib import ExitStack, closing, contextmanager
from dataclasses import asdict
from pathlib import Path
from typing import Any

from benchmarks import harness
from benchmarks.training.train import ROOT, Peer
from rhymeflow.config import Config
from rhymeflow.config.load import read_config
from rhymeflow.errors import UserError

RECIPES = {"demo": 8, "smollm2": 2}
"""And how many batches of each."""
LEAST = 1.3
"""Times the tokens per second of the checkout it is compared with."""
SIDE = Path("benchmarks/peers/learner_side.py")
"""Of each checkout its own, which knows its modules by the names that they have there."""


def add_arguments(parser: argparse.ArgumentParser) -> None:
    harness.add_choice(parser, "--recipe", RECIPES)
    harness.add_number(parser, "--repeats", 5, "times that each batch is trained on")
    harness.add_number(parser, "--threads", 1, "of every side")
    parser.add_argument("--dtype", default="auto", help="model.dtype (default: the recipe's)")
    what = "another checkout of Rhymeflow, whose learner is the other side"
    parser.add_argument("--against", type=Path, metavar="DIR", help=what)


def run(args: argparse.Namespace) -> dict[str, Any]:
    """Measure and report.

    Raises:
        UserError: `--against` is not a checkout.
    """
    if args.against and not (args.against / SIDE).is_file():
        raise UserError(f"--against {args.against}: no checkout of Rhymeflow, there is no {SIDE}")
    rows: list[dict[str, Any]] = []
    targets = []
    for recipe in args.recipe or RECIPES:
        values = measure(recipe, args)
        for side, speeds in values.items():
            rows.append({"recipe": recipe, **harness.side_row(side, speeds, "tokens/s")})
        if args.against:
            ratio = harness.median_ratio(*values.values())
            targets.append(harness.Target(f"learner/{recipe}", ratio, LEAST))
    return harness.report("learner", rows, targets, args, NOTES)


NOTES = (
    "Each side has the same batches, of the recipe's groups, and as many threads as `--threads` "
    "says, after a step that is not counted."
)


def measure(recipe: str, args: argparse.Namespace) -> dict[str, list[float]]:
    sides = {"rhymeflow": ROOT} | ({"against": args.against.resolve()} if args.against else {})
    found: dict[str, list[float]] = {side: [] for side in sides}
    with serving(configuration(recipe, args), sides, RECIPES[recipe], args) as peers:
        for batch in range(RECIPES[recipe]):
            ask = {side: functools.partial(_speed, peer, batch) for side, peer in peers.items()}
            for side, speeds in harness.interleave(ask, args.repeats, f"{recipe} {batch}").items():
                found[side] += speeds
    return found


def configuration(recipe: str, args: argparse.Namespace) -> Config:
    return read_config(recipe, {"model.dtype": args.dtype, "model.device": "cpu"})


@contextmanager
def serving(
    config: Config, sides: dict[str, Path], num_batches: int, args: argparse.Namespace
) -> Iterator[dict[str, Peer]]:
    with tempfile.TemporaryDirectory() as folder, ExitStack() as stack:
        path = Path(folder) / "batches.json"
        path.write_text(json.dumps(batches(config, num_batches)), encoding="utf-8")
        peers = {}
        for side, checkout in sides.items():
            given = [str(checkout / SIDE), str(checkout), config.name, args.dtype, str(path)]
            peer = Peer(sys.executable, [*given, str(args.threads)], args.threads)
            peers[side] = stack.enter_context(closing(peer))
        yield peers


def _speed(peer: Peer, batch: int) -> float:
    return float(peer.ask({"batch": batch})["tokens/s"])


def batches(config: Config, count: int) -> list[list[dict[str, Any]]]:
    """Batches of rewarded responses of the recipe's first policy, as fields of `Sample`."""
    from benchmarks.rollouts.policy import Policy, drain, one_core, sample_of

    groups, found = config.learner.groups_per_batch, []
    with one_core():
        policy = Policy(config)
        for batch in range(count):
            rows = range(batch * groups, (batch + 1) * groups)
            requests = policy.requests(rows, 0, config.rollout.temperature)
            drain(policy.engine(config.rollout.max_num_seqs), requests)
            rewarded = zip(requests, policy.rewards(requests), strict=True)
            found.append([asdict(sample_of(each, 0, reward)) for each, reward in rewarded])
    return found
