"""A learner's training steps: tokens per second, against the learner of another checkout.

Batches are sampled from a recipe's first policy and rewarded, so lengths and the share of groups
without a gradient are a run's. Each side is a process of its own that stands still while the other
works; every batch is trained on by both, one right after the other, and ratios are medians over
these pairs. Tokens are those of prompts and responses, every response with its prompt, as
`num_tokens` counts them.
"""

from __future__ import annotations

import argparse
import functools
import json
import sys
import tempfile
from contextlib import ExitStack, closing
from pathlib import Path
from typing import Any

from benchmarks import harness
from benchmarks.peers.process import Peer
from benchmarks.training.train import ROOT
from rhymeflow.config import Config
from rhymeflow.config.load import read_config

RECIPES = {"demo": 8, "smollm2": 2}
"""And how many batches of each."""
LEAST = 1.3
"""Times the tokens per second of the checkout it is compared with."""
SIDE = Path(__file__).parent / "peers" / "learner_side.py"


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Add this benchmark's options."""
    harness.add_choice(parser, "--recipe", RECIPES)
    harness.add_number(parser, "--repeats", 5, "times that each batch is trained on")
    harness.add_number(parser, "--threads", 1, "of every side")
    parser.add_argument("--dtype", default="auto", help="model.dtype (default: the recipe's)")
    what = "another checkout of Rhymeflow, whose learner is the other side"
    parser.add_argument("--against", type=_checkout, metavar="DIR", help=what)


def _checkout(path: str) -> Path:
    if not (Path(path) / "rhymeflow" / "learner").is_dir():
        raise argparse.ArgumentTypeError(f"{path}: not a checkout of Rhymeflow")
    return Path(path).resolve()


def run(args: argparse.Namespace) -> dict[str, Any]:
    """Measure each recipe and report."""
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
    "says. After a step that is not counted."
)


def measure(recipe: str, args: argparse.Namespace) -> dict[str, list[float]]:
    """Tokens per second of each side, batch by batch."""
    sides = {"rhymeflow": ROOT} | ({"against": args.against} if args.against else {})
    config = read_config(recipe, {"model.dtype": args.dtype, "model.device": "cpu"})
    with tempfile.TemporaryDirectory() as folder, ExitStack() as stack:
        path = Path(folder) / "batches.json"
        path.write_text(json.dumps(batches(config, RECIPES[recipe])), encoding="utf-8")
        peers = {}
        for side, checkout in sides.items():
            given = [str(SIDE), str(checkout), recipe, args.dtype, str(path), str(args.threads)]
            peers[side] = stack.enter_context(closing(Peer(sys.executable, given, args.threads)))
        found: dict[str, list[float]] = {side: [] for side in sides}
        for batch in range(RECIPES[recipe]):
            ask = {side: functools.partial(_speed, peer, batch) for side, peer in peers.items()}
            for side, speeds in harness.interleave(ask, args.repeats, f"{recipe} {batch}").items():
                found[side] += speeds
    return found


def _speed(peer: Peer, batch: int) -> float:
    return float(peer.ask({"batch": batch})["tokens/s"])

    import sys

    return sys.executable


def batches(config: Config, count: int) -> list[list[dict[str, Any]]]:
    """Batches of rewarded responses of the recipe's first policy, as fields of `Sample`."""
    from benchmarks.rollouts.policy import Policy, drain, one_core

    groups, found = config.learner.groups_per_batch, []
    with one_core():
        policy = Policy(config)
        for batch in range(count):
            rows = range(batch * groups, (batch + 1) * groups)
            requests = policy.requests(rows, 0, config.rollout.temperature)
            drain(policy.engine(config.rollout.max_num_seqs), requests)
            found.append(
                [
                    {
                        "group": request.noise_key.prompt,
                        "prompt_ids": request.prompt_ids,
                        "completion_ids": request.tokens,
                        "logprobs": request.logprobs,
                        "versions": [0] * len(request.tokens),
                        "reward": reward,
                        "truncated": request.finish_reason() == "length",
                    }
                    for request, reward in zip(requests, policy.rewards(requests), strict=True)
                ]
            )
    return found
