"""Noise that rhymes: what it does to learning, and how much more responses repeat.

Runs of the demo recipe that differ in `rollout.rhyming_noise` and seed only, in turn; a seed gives
its shares the same prompts in the same order, so the unit is a run and differences are taken per
seed. Drafting is off: it would only change how long a run takes. Runs are kept with `--runs`, and
those that are complete are not made again, so a benchmark that was interrupted goes on.
"""

from __future__ import annotations

import argparse
import functools
import json
import math
import shutil
import sys
import tempfile
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import msgspec

from benchmarks import harness
from benchmarks.e2e import call
from benchmarks.learning import curves, figures, kept
from benchmarks.learning.figures import MEASURES, Figures
from benchmarks.learning.intervals import detectable, interval
from rhymeflow.config import Config
from rhymeflow.config.load import dump_config, read_config

EVAL_STEPS = 8
MARGIN = -0.05
"""Lower ends of intervals of differences in held-out reward should stay above: a loss that a user
would see."""

COMMON = {
    "drafting.window": "off",
    # Every response is of one version, as the theory has it, and an epoch's batches are an epoch.
    "schedule.name": "one_step",
    "data.eval_size": "256",
    "run.eval_steps": str(EVAL_STEPS),
    "run.report_to": "[]",
    "run.worker_timeout": "3600",  # these runs are long, and run beside other work
}


@dataclass(frozen=True)
class Setting:
    """What is learnt, and how fast."""

    about: str
    steps: int
    overrides: dict[str, str] = field(default_factory=dict)


# `demo` has learnt most of what it will by the time noise can rhyme; `slow` has not; in `few` noise
# can rhyme in all but the first four steps.
SETTINGS = {
    "demo": Setting("the recipe, 4 epochs", 64),
    "slow": Setting(
        "learning rate 2e-5, 6 epochs",
        96,
        {"learner.learning_rate": "2e-5"},
    ),
    "few": Setting(
        "64 prompts, learning rate 5e-5, 16 epochs",
        64,
        {"data.size": "64", "learner.learning_rate": "5e-5"},
    ),
}


Runs = dict[str, dict[float, list[Figures]]]
"""By setting and share, in the order of seeds."""


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Add this benchmark's options."""
    parser.add_argument(
        "--shares", type=_shares, default="0,0.5,1", help="of rhyming noise (default: 0,0.5,1)"
    )
    parser.add_argument(
        "--seeds", type=harness.positive, default=3, help="runs of each share (default: 3)"
    )
    parser.add_argument(
        "--setting", choices=list(SETTINGS), action="append", help="default: all of them"
    )
    parser.add_argument(
        "--steps", type=harness.positive, help="of each run (default: the setting's own)"
    )
    parser.add_argument(
        "--runs", type=Path, metavar="DIR", help="keep runs here, and go on with those that are"
    )
    parser.add_argument("--picture", type=Path, help="draw the curves (a PNG)")


def _shares(text: str) -> list[float]:
    try:
        shares = [float(part) for part in text.split(",")]
    except ValueError as error:
        raise argparse.ArgumentTypeError(f"{text}: not numbers with commas") from error
    if 0.0 not in shares or len(shares) < 2 or not all(0 <= share <= 1 for share in shares):
        raise argparse.ArgumentTypeError(f"{text}: 0, and others from 0 to 1, to compare with it")
    return sorted(set(shares))


def run(args: argparse.Namespace) -> dict[str, Any]:
    """Make the runs that are missing, and report."""
    names = args.setting or list(SETTINGS)
    seen: Runs = {name: {share: [] for share in args.shares} for name in names}
    with tempfile.TemporaryDirectory(prefix="rhymeflow-rhyming-") as temporary:
        folder = args.runs or Path(temporary)
        folder.mkdir(parents=True, exist_ok=True)
        sides = {
            f"{name}, share {share:g}": functools.partial(
                measure, name, share, args.steps, folder, seen[name][share]
            )
            for name in names
            for share in args.shares
        }
        harness.interleave(sides, args.seeds)
    if args.picture:
        draw(args.picture, seen, args.seeds)
    result = harness.report("rhyming", table(seen), targets(seen), args, notes=notes(names, args))
    if args.record:
        keep_curves(seen)
    return result


def measure(name: str, share: float, steps: int | None, folder: Path, seen: list[Figures]) -> float:
    """Make the next seed's run, or take it as it was kept; return its final held-out reward."""
    run_dir = folder / f"{name}-{share:g}-{len(seen)}"
    overrides = {
        **COMMON,
        **SETTINGS[name].overrides,
        "learner.max_steps": str(steps or SETTINGS[name].steps),
        "rollout.rhyming_noise": str(share),
        "run.seed": str(len(seen)),
    }
    found = kept.load(run_dir, overrides, Figures)
    if found is None:
        found = train(run_dir, overrides)
    seen.append(found)
    return figures.final(found)


def train(run_dir: Path, overrides: Mapping[str, str]) -> Figures:
    """Make a run, in place of what an interrupted one left, and keep its figures."""
    if run_dir.exists():
        shutil.rmtree(run_dir)
    config = configure({**overrides, "run.output_dir": str(run_dir.resolve())})
    path = run_dir.with_suffix(f"{run_dir.suffix}.yaml")
    path.write_text(dump_config(config), encoding="utf-8")
    call([sys.executable, "-m", "rhymeflow", "train", str(path.resolve())], "rhyming")
    found = figures.read(run_dir, config)
    kept.keep(run_dir, overrides, found)
    return found


def configure(overrides: Mapping[str, str]) -> Config:
    """The recipe with these fields; reading the runs needs that no member is left out."""
    config = read_config("demo", dict(overrides))
    assert not config.schedule.extra_generations
    assert not config.schedule.filter_zero_variance
    return config


# -- report ----------------------------------------------------------------------------------------


def table(seen: Runs) -> list[dict[str, str]]:
    """A row for each setting and measure: means by share, and differences from share 0."""
    rows = []
    for name, sides in seen.items():
        for what, measure_of in MEASURES.items():
            values = {share: [measure_of(run) for run in runs] for share, runs in sides.items()}
            row = {"setting": name, "measure": what}
            row |= {f"{share:g}": mean(found) for share, found in values.items()}
            row |= {
                f"{share:g} less 0": difference(values[0.0], found)
                for share, found in values.items()
                if share
            }
            rows.append(row)
    return rows


def mean(values: Sequence[float]) -> str:
    """The mean and its interval, or how many runs there is a value of."""
    there = [value for value in values if not math.isnan(value)]
    if len(there) == len(values):
        return str(interval(values))
    return f"{len(there)} of {len(values)}" if there else "–"


def paired(base: Sequence[float], values: Sequence[float]) -> list[float]:
    """Differences, seed by seed."""
    return [b - a for a, b in zip(base, values, strict=True)]


def difference(base: Sequence[float], values: Sequence[float]) -> str:
    """The mean difference, its interval, and in brackets what would have been detectable."""
    found = paired(base, values)
    if any(math.isnan(value) for value in found):
        return "–"
    return f"{interval(found)} ({detectable(found):.3f})"


def targets(seen: Runs) -> list[harness.Target]:
    """No share may cost more held-out reward than `MARGIN`, chance included."""
    return [
        harness.Target(
            f"rhyming/{name}/{share:g} less 0/{what}, lower end",
            interval(paired([of(r) for r in sides[0.0]], [of(r) for r in runs])).low,
            MARGIN,
        )
        for name, sides in seen.items()
        for share, runs in sides.items()
        if share
        for what, of in (("last quarter", figures.final), ("area", figures.area))
    ]


def notes(names: Sequence[str], args: argparse.Namespace) -> str:
    """How it was measured."""
    made = "; ".join(f"`{name}`: {SETTINGS[name].about}" for name in names)
    steps = f" All of {args.steps} steps." if args.steps else ""
    return (
        f"The demo recipe under `one_step`, {args.seeds} seeds, which are few. Settings: "
        f"{made}.{steps} Mean ± half a 95% t interval over seeds; differences are paired by seed, "
        "and in brackets stands the difference that an interval would have shown as other than 0 "
        "in 4 of 5 repetitions. One such interval in twenty leaves out 0 by chance. Held-out "
        f"reward is greedy, over 256 problems, every {EVAL_STEPS} steps. Measures are from the "
        "second epoch on, except distinct responses and staleness. Agreement: how often a token "
        "is that of the same member an epoch before, if all tokens before it are. Distinct: 1 if "
        "no prompt was ever answered twice with the same words. All curves: rhyming-runs.jsonl."
    )


def draw(path: Path, seen: Runs, num_seeds: int) -> None:
    """Draw all curves."""
    columns = {
        f"{name}: {SETTINGS[name].about}": {
            f"share {share:g}": runs for share, runs in sides.items()
        }
        for name, sides in seen.items()
    }
    title = f"Noise that rhymes on the demo:\nmeans and 95% t intervals of {num_seeds} seeds"
    curves.draw(path, columns, title)


def keep_curves(seen: Runs) -> None:
    """Record every run's figures beside the report."""
    runs = [
        {"setting": name, "share": share, "seed": seed, **msgspec.to_builtins(found)}
        for name, sides in seen.items()
        for share, found_runs in sides.items()
        for seed, found in enumerate(found_runs)
    ]
    lines = "".join(json.dumps(_rounded(run)) + "\n" for run in runs)
    (harness.RESULTS / "rhyming-runs.jsonl").write_text(lines, encoding="utf-8")


def _rounded(value: Any) -> Any:
    match value:
        case float():
            return round(value, 5)
        case dict():
            return {key: _rounded(entry) for key, entry in value.items()}
        case list() | tuple():
            return [_rounded(entry) for entry in value]
    return value
