"""Short emulated runs: ways of drafting, and the same run at half the scale."""

from __future__ import annotations

import argparse
import functools
import itertools
import statistics
import sys
import tempfile
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import msgspec

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
    kept_up,
    published_at,
    scale_of,
    split_of,
)
from benchmarks.schedules import Side
from benchmarks.training.train import train, training_rows
from rhymeflow.config.load import build_config

DRAFTING = harness.RESULTS / "emulated-drafting-runs.jsonl"
DRAFTING_SIDES = DRAFTED, OURS
DEFAULT = "default"
VARIANTS: dict[str, dict[str, Any]] = {
    DEFAULT: {},
    "tree": {"drafting.shape": "tree"},
    "32 tokens": {"drafting.max_draft": 32},
    "tree, 32 tokens": {"drafting.shape": "tree", "drafting.max_draft": 32},
    "half of the noise rhymes": {"rollout.rhyming_noise": 0.5},
    "all noise rhymes": {"rollout.rhyming_noise": 1.0},
    "tree, 32 tokens, all noise rhymes": {
        **{"drafting.shape": "tree", "drafting.max_draft": 32},
        "rollout.rhyming_noise": 1.0,
    },
}
VARIANT_STEPS = 16
"""After the first epoch, of a run with a way of drafting."""
CHECKED_STEPS = 8
"""Of runs that check the scale, after the first epoch."""


class Short(msgspec.Struct, frozen=True):
    """What a short run found after its first epoch."""

    setting: str
    side: Side
    variant: str
    seed: int
    seconds: float
    """Of a step."""
    tokens_per_iteration: float
    long_tokens_per_iteration: float
    late: float


def short(name: str, side: Side, variant: str, seed: int, scale: float, steps: int) -> Short:
    config = configure(name, side, seed, split_of(name, side, scale), Path("run"), scale)
    config = build_config(VARIANTS[variant], base=config, where=variant)
    with tempfile.TemporaryDirectory(prefix="rhymeflow-bench-") as folder:
        run_dir = Path(folder) / "run"
        train(
            config.changed(learner={"max_steps": SKIPPED + steps}, run={"output_dir": str(run_dir)})
        )
        published, rows = published_at(run_dir), training_rows(run_dir)[SKIPPED:]
        late = max(behind_of(rows).values())
        seconds = (published[-1] - published[SKIPPED - 1]) / steps
        found = Short(name, side, variant, seed, seconds, *drafts_of(run_dir), late)
    print(f"  {name} {side}, {variant}: {seconds:.1f} s a step", file=sys.stderr, flush=True)
    return found


def half_scale(args: argparse.Namespace) -> harness.Found:
    """Seconds of a step of the cluster against those at half the scale, where this machine has
    twice the time."""
    rows = []
    for name, side in itertools.product(args.setting or ["a"], (BASE, DRAFTED, OURS)):
        scale = scale_of(name, split_of(name, side, args.scale), args.scale)
        whole, half = (
            short(name, side, DEFAULT, 0, each, CHECKED_STEPS) for each in (scale, scale / 2)
        )
        row = {"setting": name, "side": str(side), "scale": round(scale)}
        row |= {"s/step": round(whole.seconds, 1), "at half": round(half.seconds, 1)}
        row |= {"behind": round(whole.late, 3), "behind at half": round(half.late, 3)}
        rows.append(row | {"over half": round(whole.seconds / half.seconds, 3)})
    worst = max(abs(row["over half"] - 1) for row in rows)
    return rows, [harness.at_most("emulated/step time against half the scale", worst, LATE)]


def drafting(args: argparse.Namespace) -> harness.Found:
    """Ways of drafting where verifying is nearly free, against the default one, with all runs that
    are recorded; `gain` is paired by seed."""
    runs = harness.lines(DRAFTING, Short)
    seeds = range(1 if args.seeds is None else args.seeds)
    names = args.setting or ["a"]
    for name, seed, side, variant in itertools.product(names, seeds, DRAFTING_SIDES, VARIANTS):
        if not any(
            (e.setting, e.seed, e.side, e.variant) == (name, seed, side, variant) for e in runs
        ):
            measure = functools.partial(short, name, side, variant, seed, steps=VARIANT_STEPS)
            scale = scale_of(name, split_of(name, side, args.scale), args.scale)
            runs.append(kept_up(measure, lambda found: found.late, scale))
            if args.record:
                harness.add_line(DRAFTING, runs[-1])
    return [
        row
        for name, side, variant in itertools.product(names, DRAFTING_SIDES, VARIANTS)
        if (row := drafting_row(runs, name, side, variant))
    ], []


def drafting_row(runs: Sequence[Short], name: str, side: Side, variant: str) -> dict[str, Any]:
    def by_seed(variant: str) -> dict[int, Short]:
        found = (e for e in runs if (e.setting, e.side, e.variant) == (name, side, variant))
        return {each.seed: each for each in found}

    found, base, median = by_seed(variant), by_seed(DEFAULT), statistics.median
    if not found:
        return {}
    gains = [base[seed].seconds / found[seed].seconds for seed in found.keys() & base.keys()]
    return {
        **{"setting": name, "side": str(side), "drafting": variant, "seeds": len(found)},
        "s/step": round(median(each.seconds for each in found.values()), 1),
        **(harness.spread("gain", gains, 3) if gains else {}),
        "tokens/iteration": round(median(e.tokens_per_iteration for e in found.values()), 2),
        "long": round(median(e.long_tokens_per_iteration for e in found.values()), 2),
        "behind": round(max(each.late for each in found.values()), 3),
    }
