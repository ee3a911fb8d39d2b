"""Fake runs with the real controller, store and resuming, under faults by the hundred thousand.

They are those of `tests/fake_run`, small ones in virtual time, under each schedule in turn. In the
end the audit that users have must find nothing wrong, nor must what more is known of a fake run.
`--record` adds a line for each thousand faults or so to results/chaos-fake-runs.jsonl.
"""

from __future__ import annotations

import argparse
import shutil
import sys
import tempfile
import time
import traceback
from collections import Counter
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import msgspec

from benchmarks import harness
from rhymeflow.core.coordinator import Coordinator
from tests.core import invariants
from tests.fake_run.run import NOT_COUNTED, SCHEDULE_NAMES, run_with_faults

RUNS = "chaos-fake-runs.jsonl"
FAULTS = 100_000
"""Target."""
LINE_FAULTS = 1_000
"""Faults of a line of the record, about."""
MEMORY = Path("/dev/shm")
"""A file system in memory, where there is one."""
LOOK_EVERY = 8
"""So many of the runs, one has its coordinator looked at after each event: that takes longest."""
NOTES = (
    "Messages are counted apart: what was delivered again, and delays; so are calls that programs "
    "of an agent no longer wait for. A run takes no more faults "
    "than its seed draws (4 to 40). A `log cut` is a death of the controller with up to 400 kB of "
    "the log that no checkpoint of SQLite had brought into the file."
)


class Part(msgspec.Struct):
    """Some runs, one after the other: a line of the file."""

    first_seed: int
    runs: int
    faults: dict[str, int]
    violations: list[str]
    seconds: float

    @property
    def num_faults(self) -> int:
        """Without what is counted apart."""
        return sum(n for kind, n in self.faults.items() if kind not in NOT_COUNTED)


def add_arguments(parser: argparse.ArgumentParser) -> None:
    what = "faults, messages not counted, or a few more"
    harness.add_number(parser, "--faults", LINE_FAULTS, what)
    what = "of the first run (default: the next one after those that are recorded)"
    parser.add_argument("--seed", type=harness.whole(0), metavar="N", help=what)


def run(args: argparse.Namespace) -> dict[str, Any]:
    """Run and report; with `--record`, together with all that was recorded."""
    recorded = harness.RESULTS / RUNS
    parts = harness.lines(recorded, Part)
    next_seed = max((part.first_seed + part.runs for part in parts), default=0)
    seed = next_seed if args.seed is None else args.seed
    parts = parts if args.record else []
    left = args.faults
    while left > 0:
        part = measure(seed, min(left, LINE_FAULTS))
        parts.append(part)
        seed, left = seed + part.runs, left - part.num_faults
        speed = part.num_faults / part.seconds
        line = f"  runs {part.first_seed} to {seed - 1}: {part.num_faults} faults, {speed:.0f}/s"
        print(line, file=sys.stderr, flush=True)
        if args.record:
            harness.add_line(recorded, part)
    return harness.report("chaos_fake", rows(parts), targets(parts), args, notes(parts))


def measure(first_seed: int, num_faults: int) -> Part:
    """Runs from this seed on, until there were so many faults."""
    part, counts = Part(first_seed, 0, {}, [], 0.0), Counter[str]()
    started = time.monotonic()
    while part.num_faults < num_faults:
        one_run(first_seed + part.runs, counts, part.violations)
        part.runs += 1
        part.faults = dict(sorted(counts.items()))
    part.seconds = round(time.monotonic() - started, 1)
    return part


def one_run(seed: int, counts: Counter[str], violations: list[str]) -> None:
    """One run, in a directory that stays only if something was violated."""
    schedule = SCHEDULE_NAMES[seed % len(SCHEDULE_NAMES)]
    folder, stays = new_folder(), False
    try:
        run_with_faults(seed, folder, schedule, counts, look if seed % LOOK_EVERY == 0 else None)
    except Exception as error:  # noqa: BLE001 - whatever ends a run is a violation, and is counted
        stays = True
        traceback.print_exc()
        what = str(error).partition("\n")[0]
        violations.append(f"seed {seed}, {schedule}: {type(error).__name__}: {what}")
        print(f"violation in {folder}: {violations[-1]}", file=sys.stderr, flush=True)
    finally:
        if not stays:
            shutil.rmtree(folder)


def new_folder() -> Path:
    place = MEMORY if MEMORY.is_dir() else None
    return Path(tempfile.mkdtemp(prefix="rhymeflow-chaos-fake-", dir=place))


def look(coordinator: Coordinator) -> None:
    invariants.check(coordinator.state)


def rows(parts: Sequence[Part]) -> list[dict[str, Any]]:
    counts = sum((Counter(part.faults) for part in parts), Counter[str]())
    return [{"fault": kind, "times": times} for kind, times in sorted(counts.items())]


def targets(parts: Sequence[Part]) -> list[harness.Target]:
    violations = sum(len(part.violations) for part in parts)
    faults = sum(part.num_faults for part in parts)
    return [
        harness.at_most("chaos-fake/violations", violations, 0),
        harness.Target("chaos-fake/faults", faults, FAULTS),
    ]


def notes(parts: Sequence[Part]) -> str:
    runs, seconds = sum(part.runs for part in parts), sum(part.seconds for part in parts)
    faults = sum(part.num_faults for part in parts)
    return (
        f"{runs} runs, each schedule in turn, {faults} faults, {faults / seconds:.0f} a second on "
        f"one core. {NOTES}"
    )
