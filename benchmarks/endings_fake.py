"""Whether fake runs that are hurt and resumed train on other lengths than the same runs unhurt.

`bench endings` asks this of real runs, of which there are few. Here each configuration (that of
`benchmarks/faults/fake`, drawn from a seed) is carried out twice with the real controller, store
and resuming, once without a fault and once under deaths, stops and full disks; `--runs` of them
under each schedule. Compared are the shares of the responses trained on by length.
Both runs of a pair have the same prompts and noise, so what differs is which responses were trained
on. Nothing is generated beyond what is needed and nothing filtered: to train on the first that
finish favours short ones by itself, and less so where faults delay some of them.

The statistic is the sum of squared mean differences over the share; its p-value is the share of
random swaps of the two runs within pairs that give as large a statistic. The target is for the
least of the schedules' p-values times their number (Bonferroni).
"""

from __future__ import annotations

import argparse
import random
import shutil
import sys
import time
from collections import Counter
from typing import Any

import numpy as np

from benchmarks import harness
from benchmarks.chaos_fake import new_folder
from benchmarks.endings import histogram, read, row
from benchmarks.faults.fake.run import SCHEDULE_NAMES, FakeRun, adapted, configuration, with_steps
from benchmarks.faults.fake.runtime import Rates
from benchmarks.faults.fake.world import World

BOUNDS = np.array([2, 3, 5, 9])
"""Least lengths of the classes but the first. A fake response ends at one token in six."""
NEEDED = {"extra_groups": 0, "extra_generations": 0, "filter_zero_variance": False}
STEPS = 8
NUM_FAULTS, OFTEN = 40, 0.03
"""Most faults of a run, and the probability of one at a step."""
SNAPSHOT_EVENTS = 100
SWAPS = 10_000
ENOUGH = 0.05
NOTES = (
    "Mean share of the runs and its standard deviation. Runs differ in batch size, length limit "
    "and bound, so the deviation is not that of the difference, which is between runs of "
    "the same configuration and noise."
)


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Add this benchmark's options."""
    harness.add_number(parser, "--runs", 100, "of each schedule and either kind")


def run(args: argparse.Namespace) -> dict[str, Any]:
    """Run all, and compare each schedule's."""
    rows, p_values, counts = [], {}, Counter[str]()
    for schedule in SCHEDULE_NAMES:
        started = time.monotonic()
        unhurt = [lengths(seed, schedule, False, counts) for seed in range(args.runs)]
        hurt = [lengths(seed, schedule, True, counts) for seed in range(args.runs)]
        before, after = (
            np.array([histogram(each, BOUNDS) for each in runs]) for runs in (unhurt, hurt)
        )
        p_values[schedule] = swap_p_value(before, after)
        rows.append(row(f"{schedule}, unhurt", before, BOUNDS))
        rows.append(row(f"{schedule}, hurt", after, BOUNDS) | {"p": round(p_values[schedule], 3)})
        seconds = time.monotonic() - started
        line = f"{schedule}: p = {p_values[schedule]:.3f}, {seconds:.0f} s"
        print(line, file=sys.stderr, flush=True)
    least = min(1.0, min(p_values.values()) * len(p_values))
    targets = [harness.Target("endings-fake/p-value", least, ENOUGH)]
    faults = ", ".join(f"{counts[kind]} {kind}" for kind in sorted(counts))
    notes = f"{args.runs} pairs of runs of {STEPS} steps a schedule. Faults: {faults}. {NOTES}"
    return harness.report("endings_fake", rows, targets, args, notes=notes)


def lengths(seed: int, schedule: str, is_hurt: bool, counts: Counter[str]) -> np.ndarray:
    """Carry out one run; return how many tokens each response that was trained on has."""
    drawn = configuration(random.Random(f"{seed} {schedule}"), schedule)
    config = with_steps(drawn, STEPS).model_copy(
        update={"schedule": drawn.schedule.model_copy(update=NEEDED)}
    )
    world = World(seed, NUM_FAULTS if is_hurt else 0, OFTEN)
    folder = new_folder()
    try:
        fake = FakeRun(world, folder, config, Rates(0.0, 0.0, 0.0), None)
        with adapted(SNAPSHOT_EVENTS):
            fake.carry_through()
        found, _ = read(fake.path)
    finally:
        shutil.rmtree(folder)
    counts.update(world.counts)
    return found


def swap_p_value(before: np.ndarray, after: np.ndarray, seed: int = 0) -> float:
    """Of counts int [pairs, classes]: how likely so large a difference is by chance."""
    shares = [counts / counts.sum(axis=1, keepdims=True) for counts in (before, after)]
    differences = shares[1] - shares[0]
    mean = (shares[0] + shares[1]).mean(axis=0) / 2
    signs = np.random.default_rng(seed).choice([-1.0, 1.0], (SWAPS, len(differences)))
    found = ((signs @ differences / len(differences)) ** 2 / mean).sum(axis=1)
    observed = (differences.mean(axis=0) ** 2 / mean).sum()
    return float((1 + (found >= observed * (1 - 1e-12)).sum()) / (1 + SWAPS))
