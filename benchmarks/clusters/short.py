"""Short emulated runs: ways of drafting, and the same run at half the scale."""

from __future__ import annotations

import argparse
import sys
import tempfile
from pathlib import Path
from typing import Any, NamedTuple

from benchmarks import harness
from benchmarks.clusters.runs import (
    BASE,
    DRAFTED,
    LATE,
    OURS,
    SKIPPED,
    behind_of,
    configure,
    drafts_of,
    published_at,
    scale_of,
    split_of,
)
from benchmarks.training.train import train, training_rows
from rhymeflow.config import Config
from rhymeflow.config.load import build_config

VARIANTS: dict[str, dict[str, Any]] = {
    "default": {},
    "tree": {"drafting.shape": "tree"},
    "32 tokens": {"drafting.max_draft": 32},
    "tree, 32 tokens": {"drafting.shape": "tree", "drafting.max_draft": 32},
    "by reward": {"drafting.ranking": "reward"},
    "by frequency": {"drafting.ranking": "frequency"},
    "half of the noise rhymes": {"rollout.rhyming_noise": 0.5},
    "all noise rhymes": {"rollout.rhyming_noise": 1.0},
}
VARIANT_STEPS = 16
"""After the first epoch, of a run with a way of drafting."""
CHECKED_STEPS = 8
"""Of runs that check the scale, after the first epoch."""


class Short(NamedTuple):
    """What a short run found after its first epoch."""

    seconds: float
    """Of a step."""
    tokens_per_iteration: float
    long_tokens_per_iteration: float
    late: float


def short(config: Config, steps: int) -> Short:
    with tempfile.TemporaryDirectory(prefix="rhymeflow-bench-") as folder:
        run_dir = Path(folder) / "run"
        train(
            config.changed(learner={"max_steps": SKIPPED + steps}, run={"output_dir": str(run_dir)})
        )
        published, rows = published_at(run_dir), training_rows(run_dir)[SKIPPED:]
        late = max(behind_of(rows).values())
        seconds = (published[-1] - published[SKIPPED - 1]) / steps
        return Short(seconds, *drafts_of(run_dir), late)


def half_scale(args: argparse.Namespace) -> harness.Found:
    """Seconds of a step of the cluster against those at half the scale, where this machine has
    twice the time."""
    rows = []
    for name in args.setting or ["a"]:
        for side in (BASE, DRAFTED, OURS):
            training = split_of(name, side, args.scale)
            scale = scale_of(name, training, args.scale)
            whole, half = (
                short(configure(name, side, 0, training, Path("run"), each), CHECKED_STEPS)
                for each in (scale, scale / 2)
            )
            row = {"setting": name, "side": str(side), "scale": round(scale)}
            row |= {"s/step": round(whole.seconds, 1), "at half": round(half.seconds, 1)}
            rows.append(row | {"over half": round(whole.seconds / half.seconds, 3)})
            print(f"  {rows[-1]}", file=sys.stderr, flush=True)
    worst = max(abs(row["over half"] - 1) for row in rows)
    return rows, [harness.at_most("emulated/step time against half the scale", worst, LATE)]


def drafting(args: argparse.Namespace) -> harness.Found:
    """Ways of drafting where verifying is nearly free, against the default one."""
    rows = []
    for name in args.setting or ["a"]:
        for side in (DRAFTED, OURS):
            training = split_of(name, side, args.scale)
            scale = scale_of(name, training, args.scale)
            base = 0.0
            for variant, fields in VARIANTS.items():
                config = configure(name, side, 0, training, Path("run"), scale)
                config = build_config(fields, base=config, where=variant)
                found = short(config, VARIANT_STEPS)
                base = base or found.seconds
                row = {"setting": name, "side": str(side), "drafting": variant}
                row |= {"s/step": round(found.seconds, 1), "gain": round(base / found.seconds, 3)}
                row["tokens/iteration"] = round(found.tokens_per_iteration, 2)
                row["long"] = round(found.long_tokens_per_iteration, 2)
                rows.append(row | {"behind": round(found.late, 3)})
                print(f"  {rows[-1]}", file=sys.stderr, flush=True)
    return rows, []
