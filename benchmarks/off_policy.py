"""Where staleness costs reward: bounds, corrections, algorithms and learning rates.

Runs differ in these and the seed only. On the emulated cluster rollout is faster than the learner,
so responses are as stale as the bound lets them be. Rewards are of sampled answers to held-out
prompts, in the mean of the last versions that were saved. With `--record` runs accumulate.
"""

from __future__ import annotations

import argparse
import itertools
import multiprocessing
import statistics
import sys
import tempfile
from collections.abc import Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple

import msgspec
from matplotlib.backends.backend_agg import FigureCanvasAgg
from matplotlib.figure import Figure

from benchmarks import harness
from benchmarks.clusters.runs import evaluator
from benchmarks.training.train import QUIET, train, training_rows
from rhymeflow.config.load import read_config
from rhymeflow.store.checkpoint_dirs import paths_of

RUNS = harness.RESULTS / "off-policy-runs.jsonl"
BOUNDS = (0, 1, 3, 8, 16)
FIRST, LATER = (8, 3), (16, 1)
"""Bounds above 0, in the order of their runs."""
CORRECTIONS: dict[str, dict[str, str]] = {
    "none": {"off_policy_correction": "none"},
    "tis": {"off_policy_correction": "tis"},
    "decoupled": {"off_policy_correction": "decoupled"},
    "proximal": {"off_policy_correction": "proximal"},
    "tis, sequence": {"off_policy_correction": "tis", "off_policy_level": "sequence"},
    "decoupled, sequence": {
        **{"off_policy_correction": "decoupled", "off_policy_level": "sequence"},
        "importance_sampling_cap": "3",  # TRL's default with vLLM: `sequence_mask`
    },
}
DEFAULT, WEIGHTED, ALGORITHM = "none", "tis", "dapo"
ALGORITHMS = "grpo", "dr_grpo", "gspo", "cispo", "rloo", "sapo"
"""Beside the default one, with the default correction and with weights of tokens."""
USUAL, HIGH, TENFOLD = 2e-4, 8e-4, 2e-3
"""Learning rates: the recipe's; about the highest at which fresh responses learn; ten times it."""
STEPS, GROUPS, EPOCH = 48, 16, 128
"""Of a run; groups in a batch; prompts in an epoch."""
HELD_OUT, ANSWERS = 128, 2
"""Held-out prompts, which none of the run's training prompts is, and answers to each."""
EVALUATED = (12, 24, 36, 42, 48)
LAST = 2
"""Reward is the mean of so many evaluated versions, the last ones."""
TERMS, LONGEST = 16, 200
"""Of a problem, and the tokens of a response: 16 terms take up to 160."""
PROFILE, DEVICES, TRAINING, GRAIN = "qwen2.5-14b-h20", 2, 1, 5
"""Emulated: one instance of many rows, which this machine computes fastest. At so few
`tokens_per_token` it is faster than the learner even where half of the groups teach nothing."""
AT_ONCE = 5
"""Runs: while one waits for the model's time, another starts or is evaluated."""
HOLDS, LEAST_SEEDS = 0.02, 3
"""Reward holds where its median is lower by at most this than at bound 0; of so many runs each."""


class Side(NamedTuple):
    rate: float
    bound: int
    correction: str
    algorithm: str = ALGORITHM

    def __str__(self) -> str:
        how = f"{self.algorithm}, {self.correction}"
        return f"learning rate {self.rate:g}, bound {self.bound}, {how}"


SIDES = [
    # In the order of their runs: what is asked first, then what fills the map in. Without
    # staleness there is nothing to correct; these runs go by `WEIGHTED`.
    Side(HIGH, 0, WEIGHTED),
    *(Side(HIGH, bound, how) for how, bound in itertools.product(CORRECTIONS, FIRST)),
    *(Side(USUAL, bound, WEIGHTED) for bound in (0, *FIRST)),
    *(Side(HIGH, 0, WEIGHTED, name) for name in ALGORITHMS),
    *(Side(HIGH, bound, DEFAULT, name) for name, bound in itertools.product(ALGORITHMS, FIRST)),
    *(Side(HIGH, bound, how) for how, bound in itertools.product(CORRECTIONS, LATER)),
    *(Side(USUAL, bound, WEIGHTED) for bound in LATER),
    *(Side(USUAL, bound, DEFAULT) for bound in BOUNDS[1:]),
    Side(TENFOLD, 0, WEIGHTED),
    *(Side(HIGH, bound, WEIGHTED, name) for name, bound in itertools.product(ALGORITHMS, FIRST)),
]


class Run(msgspec.Struct, frozen=True):
    """What one run found."""

    side: Side
    seed: int
    rewards: dict[int, float]
    """Held-out, by version."""
    staleness: float
    """Mean of trained responses in the second half, in versions."""
    mismatch_kl: float
    """Mean of the second half: from the policies that sampled to the learner's."""
    grad_norm: float
    """Median of the second half."""

    @property
    def reward(self) -> float:
        return statistics.fmean([self.rewards[version] for version in EVALUATED[-LAST:]])


def add_arguments(parser: argparse.ArgumentParser) -> None:
    what = "runs of each side (0: report what is recorded)"
    parser.add_argument("--seeds", type=harness.whole(0), default=3, help=what, metavar="N")
    what = "seconds of the cluster in one of this machine (default 9)"
    parser.add_argument("--scale", type=harness.whole(1), default=9.0, help=what, metavar="S")


def run(args: argparse.Namespace) -> dict[str, Any]:
    runs = harness.lines(RUNS, Run)
    known = {(each.side, each.seed) for each in runs}
    pairs = [(side, seed) for seed in range(args.seeds) for side in SIDES]
    missing = [pair for pair in pairs if pair not in known]
    ended = harness.ended_with_their_pool
    with multiprocessing.get_context("spawn").Pool(AT_ONCE, initializer=ended) as pool:
        for found in pool.imap(partial(measured, args.scale), missing):
            runs.append(found)
            if args.record:
                harness.add_line(RUNS, found)
    if args.record:
        draw(runs)
    return harness.report("off_policy", table(runs), [], args, notes())


def measured(scale: float, which: tuple[Side, int]) -> Run:
    side, seed = which
    with tempfile.TemporaryDirectory(prefix="rhymeflow-bench-") as folder:
        run_dir = Path(folder) / "run"
        fields = {
            **QUIET,
            "data.size": str(EPOCH),
            "data.options": f"{{max_terms: {TERMS}}}",
            "rollout.max_completion_length": str(LONGEST),
            "drafting.window": "off",  # drafts change no token, and cost processor time here
            "emulation.profile": PROFILE,
            "emulation.devices": str(DEVICES),
            "emulation.tokens_per_token": str(GRAIN),
            "emulation.time_scale": str(scale),
            "emulation.train_devices": str(TRAINING),
            "schedule.name": "rhymeflow" if side.bound else "synchronous",
            "schedule.max_staleness": str(side.bound),
            "learner.groups_per_batch": str(GROUPS),
            "learner.learning_rate": str(side.rate),
            "learner.algorithm": side.algorithm,
            **{f"learner.{key}": value for key, value in CORRECTIONS[side.correction].items()},
            "learner.max_steps": str(STEPS),
            "run.save_steps": "6",
            "run.save_total_limit": "0",
            "run.seed": str(seed),
            "run.output_dir": str(run_dir),
        }
        if not side.bound:  # in turn on all devices
            del fields["emulation.train_devices"]
        config = read_config("emulated", fields)
        train(config)
        rows = training_rows(run_dir)[STEPS // 2 :]
        evaluate = evaluator(config.changed(data={"eval_size": HELD_OUT}), ANSWERS)
        paths = paths_of(run_dir)
        found = Run(
            side,
            seed,
            {version: evaluate(str(paths[version])) for version in EVALUATED},
            statistics.fmean(row["staleness/mean"] for row in rows),
            statistics.fmean(row["off_policy/mismatch_kl"] for row in rows),
            statistics.median(row["grad_norm"] for row in rows),
        )
    what = f"  {side}, seed {seed}: {found.reward:.3f}, staleness {found.staleness:.1f}"
    print(what, file=sys.stderr, flush=True)
    return found


def table(runs: Sequence[Run]) -> list[dict[str, Any]]:
    rows: list[dict[str, Any]] = []
    for side, found in by_side(runs).items():
        rows.append(
            {
                **side._asdict(),
                "seeds": len(found),
                **harness.spread("reward", [each.reward for each in found], 3),
                "best": round(statistics.median(max(e.rewards.values()) for e in found), 3),
                "staleness": round(statistics.fmean(e.staleness for e in found), 2),
                "mismatch KL": statistics.median(e.mismatch_kl for e in found),
                "gradient": statistics.median(e.grad_norm for e in found),
            }
        )
    enough = [row for row in rows if row["seeds"] >= LEAST_SEEDS]
    fresh = {(r["rate"], r["algorithm"]): r["reward"] for r in enough if r["bound"] == 0}
    for row in enough:
        if (row["rate"], row["algorithm"]) in fresh:
            row["holds"] = str(row["reward"] >= fresh[row["rate"], row["algorithm"]] - HOLDS)
    return sorted(rows, key=lambda row: (-row["rate"], row["algorithm"] != ALGORITHM, row["bound"]))


def by_side(runs: Sequence[Run]) -> Mapping[Side, list[Run]]:
    found = {side: [each for each in runs if each.side == side] for side in SIDES}
    return {side: each for side, each in found.items() if each}


def draw(runs: Sequence[Run]) -> None:
    """Write `off-policy.png`: reward by bound, of corrections and algorithms at the high learning
    rate and of corrections at the usual one."""
    figure = Figure(figsize=(11, 4.6), dpi=110, layout="constrained")
    FigureCanvasAgg(figure)
    panels = figure.subplots(1, 3, sharey=True)
    found = by_side(runs)
    usual = [(how, how, ALGORITHM) for how in (DEFAULT, WEIGHTED)]
    for axes, title, rate, lines in (
        (panels[0], ALGORITHM, HIGH, [(how, how, ALGORITHM) for how in CORRECTIONS]),
        (panels[1], DEFAULT, HIGH, [(name, DEFAULT, name) for name in (ALGORITHM, *ALGORITHMS)]),
        (panels[2], ALGORITHM, USUAL, usual),
    ):
        if fresh := found.get(Side(rate, 0, WEIGHTED)):
            reward = statistics.median(each.reward for each in fresh)
            how = {"color": "grey", "linestyle": ":", "linewidth": 1.2}
            axes.axhline(reward, label=f"{ALGORITHM}, bound 0", **how)
        for number, (label, correction, algorithm) in enumerate(lines):
            sides = [Side(rate, b, correction if b else WEIGHTED, algorithm) for b in BOUNDS]
            at = {p: [r.reward for r in found[s]] for p, s in enumerate(sides) if s in found}
            if not any(at):  # at bound 0 all corrections are one run
                continue
            low, high, middle = (
                [pick(each) for each in at.values()] for pick in (min, max, statistics.median)
            )
            axes.fill_between([*at], low, high, color=f"C{number}", alpha=0.12)
            axes.plot([*at], middle, color=f"C{number}", marker="o", label=label)
        axes.set_xticks(range(len(BOUNDS)), [str(bound) for bound in BOUNDS])
        axes.set_xlim(-0.2, len(BOUNDS) - 0.8)
        axes.set_ylim(0.0, 1.0)
        axes.set_xlabel("max_staleness")
        axes.set_title(f"{title}, learning rate {rate:g}", fontsize=10)
        axes.grid(alpha=0.3)
        axes.legend(loc="upper center", bbox_to_anchor=(0.5, -0.16), ncol=2, fontsize=8)
    panels[0].set_ylabel("held-out reward")
    drawn = sum(len(each) for side, each in found.items() if side.rate in (HIGH, USUAL))
    figure.suptitle(
        f"Median, least and greatest of seeds: {drawn} runs", fontsize=9, x=0.99, ha="right"
    )
    figure.savefig(harness.RESULTS / "off-policy.png")


def notes() -> str:
    return (
        f"Recipe `emulated`, {STEPS} steps of {GROUPS} groups, {EPOCH} prompts an epoch. `reward`: "
        f"of {ANSWERS} sampled answers to each of {HELD_OUT} held-out prompts, in the mean of "
        f"versions {', '.join(map(str, EVALUATED[-LAST:]))}; median, least and greatest of seeds. "
        f"`best`: of all evaluated versions. `holds`: at most {HOLDS} below bound 0, of "
        f"{LEAST_SEEDS} seeds and more. Other columns are of the second half of the steps."
    )
