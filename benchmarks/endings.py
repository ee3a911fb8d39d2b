"""Whether runs that are killed and resumed train on other lengths than runs that are not (demo).

A run that skips what was in flight when it was killed, or begins it anew, trains on too few long
responses: they are in flight more often. Here some runs are killed (`kill -9` of the controller, at
random moments) and resumed, and others go on undisturbed, each with a seed of its own. Compared are
the shares of the responses trained on by length, in quantiles of all runs together. The statistic
is the sum of squared differences over the expected; its p-value is exact: the share of all ways to
call as many of these runs killed that give as large a statistic. So differences between seeds,
which are larger than those between responses, are allowed for.
"""

from __future__ import annotations

import argparse
import random
import signal
import sqlite3
import subprocess
import sys
import tempfile
import time
from collections.abc import Sequence
from itertools import combinations
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np

from benchmarks import harness
from rhymeflow.observe import metrics

QUANTILES = 5
TIMEOUT = 600.0
ENOUGH = 0.05
"""The p-value below which the runs are taken for different. The least that can be is 2 over the
number of choices: 0.029 with four runs of either kind."""


class Lengths(NamedTuple):
    """What a run trained on."""

    seed: int
    kills: int
    lengths: np.ndarray
    """int [responses], of those trained on."""
    left_out: int
    """Responses of groups that ended otherwise."""
    seconds: float


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Add this benchmark's options."""
    harness.add_number(parser, "--runs", 4, "that are killed, and as many that are not")
    harness.add_number(parser, "--steps", 20, "of each run")
    harness.add_number(parser, "--kills", 3, "of each run that is killed")
    parser.add_argument("--schedule", default="staleflow", help="(default staleflow)")


def run(args: argparse.Namespace) -> dict[str, Any]:
    """Run all, and compare."""
    found = []
    for seed in range(2 * args.runs):  # in turn, so that a machine that drifts affects both alike
        kills = args.kills if seed % 2 else 0
        found.append(one(seed, kills, args.steps, args.schedule))
        print(f"seed {seed}, {kills} kills: {found[-1].seconds:.0f} s", file=sys.stderr, flush=True)
    bounds = quantile_bounds([each.lengths for each in found])
    counts = np.array([histogram(each.lengths, bounds) for each in found])
    is_killed = np.array([bool(each.kills) for each in found])
    p_value = permutation_p_value(counts, is_killed)
    rows = [
        row("undisturbed", counts[~is_killed], bounds),
        row("killed and resumed", counts[is_killed], bounds),
    ]
    targets = [harness.Target("endings/p-value", p_value, ENOUGH)]
    notes = (
        f"Demo, {args.schedule}, {args.runs} runs of {args.steps} steps of either kind, "
        f"{args.kills} kills in each of one kind; responses trained on by length in tokens, mean "
        f"share of the runs and its standard deviation. {sum(each.left_out for each in found)} "
        "responses ended otherwise."
    )
    return harness.report("endings", rows, targets, args, notes=notes)


def one(seed: int, kills: int, steps: int, schedule: str) -> Lengths:
    """A run, killed so often and resumed each time."""
    started, rng = time.monotonic(), random.Random(seed)
    with tempfile.TemporaryDirectory(prefix="rhymeflow-endings-") as folder:
        run_dir = Path(folder) / "run"
        command = ["train", "demo", "--schedule.name", schedule, "--run.seed", str(seed)]
        command += ["--learner.max_steps", str(steps), "--run.output_dir", str(run_dir)]
        command += ["--run.report_to", "[]", "--data.eval_size", "0"]
        for step in sorted(rng.sample(range(1, steps - 1), kills)):
            kill_at(command, run_dir, step + rng.random())
            command = ["resume", str(run_dir)]
        subprocess.run(arguments(command), check=True, stdout=subprocess.DEVNULL, timeout=TIMEOUT)
        lengths, left_out = read(run_dir)
    return Lengths(seed, kills, lengths, left_out, time.monotonic() - started)


def arguments(command: Sequence[str]) -> list[str]:
    """The command line of `rhymeflow`."""
    return [sys.executable, "-m", "rhymeflow", *command]


def kill_at(command: Sequence[str], run_dir: Path, when: float) -> None:
    """Start it, and kill its controller this much of a step after that step."""
    process = subprocess.Popen(arguments(command), stdout=subprocess.DEVNULL)
    deadline = time.monotonic() + TIMEOUT
    while max(metrics.read(run_dir), default=0) < int(when):
        assert process.poll() is None, f"{command} ended by itself"
        assert time.monotonic() < deadline, f"{command} does not reach step {when:.0f}"
        time.sleep(0.1)
    time.sleep(when % 1)
    process.send_signal(signal.SIGKILL)
    process.wait()
    time.sleep(3.0)  # its workers end


def read(run_dir: Path) -> tuple[np.ndarray, int]:
    """Lengths of the responses trained on; how many others there are of groups that ended."""
    connection = sqlite3.connect(run_dir / "events.db")
    lengths = connection.execute("SELECT length FROM trajectories WHERE trained IS NOT NULL")
    found = np.array([length for (length,) in lengths.fetchall()])
    ((left_out,),) = connection.execute(
        "SELECT COUNT(*) FROM responses WHERE ending IS NOT NULL AND trained IS NULL"
    )
    connection.close()
    return found, left_out


def quantile_bounds(lengths: Sequence[np.ndarray]) -> np.ndarray:
    """The least length of each quantile but the first, of all; fewer where many are equal."""
    shares = np.arange(1, QUANTILES) / QUANTILES
    return np.unique(np.quantile(np.concatenate(lengths), shares, method="higher"))


def histogram(lengths: np.ndarray, bounds: np.ndarray) -> np.ndarray:
    """How many are in each quantile."""
    return np.bincount(np.searchsorted(bounds, lengths, side="right"), minlength=len(bounds) + 1)


def statistic(counts: np.ndarray, chosen: np.ndarray) -> float:
    """How different the chosen runs (rows) are from the others: chi-square of mean shares."""
    shares = counts / counts.sum(axis=1, keepdims=True)
    difference = shares[chosen].mean(axis=0) - shares[~chosen].mean(axis=0)
    return float((difference**2 / shares.mean(axis=0)).sum())


def permutation_p_value(counts: np.ndarray, chosen: np.ndarray) -> float:
    """The share of all choices of as many rows that are at least as different."""
    observed = statistic(counts, chosen)
    found = []
    for rows in combinations(range(len(counts)), int(chosen.sum())):
        other = np.zeros(len(counts), bool)
        other[list(rows)] = True
        found.append(statistic(counts, other) >= observed * (1 - 1e-12))
    return sum(found) / len(found)


def row(name: str, counts: np.ndarray, bounds: np.ndarray) -> dict[str, Any]:
    """A table row: mean and standard deviation of the share of each quantile."""
    shares = counts / counts.sum(axis=1, keepdims=True)
    edges = ["", *map(str, bounds), ""]
    found: dict[str, Any] = {"runs": name, "responses": int(counts.sum())}
    for index in range(counts.shape[1]):
        low, high = edges[index], edges[index + 1]
        label = (
            f"below {high}" if not low else f"{low} on" if not high else f"{low} to below {high}"
        )
        of_runs = shares[:, index]
        spread = of_runs.std(ddof=1) if len(of_runs) > 1 else 0.0
        found[label] = f"{of_runs.mean():.3f} ± {spread:.3f}"
    return found
