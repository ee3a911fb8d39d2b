"""Bad input of every kind: tracebacks, hangs, and what is taken as something else, by kind."""

from __future__ import annotations

import argparse
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

from benchmarks import harness
from tests.fuzzing import KINDS, problem


def add_arguments(parser: argparse.ArgumentParser) -> None:
    harness.add_choice(parser, "--kind", KINDS)
    what = "cases of each kind (default 2000)"
    parser.add_argument("--cases", type=harness.whole(1), default=2000, help=what, metavar="N")


def run(args: argparse.Namespace) -> dict[str, Any]:
    rows, targets = [], []
    for kind in args.kind or KINDS:
        started, problems = time.monotonic(), 0
        with tempfile.TemporaryDirectory(prefix="rhymeflow-bench-") as folder:
            for seed in range(args.cases):
                if found := problem(KINDS[kind], seed, Path(folder)):
                    problems += 1
                    print(f"  {kind}, seed {seed}: {found[:300]}", file=sys.stderr, flush=True)
        seconds = round(time.monotonic() - started, 1)
        rows.append({"kind": kind, "cases": args.cases, "problems": problems, "seconds": seconds})
        targets.append(harness.at_most(f"fuzz/{kind}: problems", problems, 0))
    return harness.report("fuzz", rows, targets, args)
