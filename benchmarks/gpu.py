"""A machine with GPUs: what works on it, and how fast, part by part, beside what is expected.

Each part has a process and a time limit of its own, and is a line of JSON as soon as it is done;
nothing stops at a failure. Models are random, of real shapes. What is expected are estimates for an
H100, made before there was one to measure on.
"""

from __future__ import annotations

import argparse
import importlib
import json
import os
import signal
import subprocess
import sys
import time
from contextlib import suppress
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

from benchmarks import harness
from rhymeflow.utils.disk import check_writable

ROOT = Path(__file__).resolve().parent.parent
MARK = "result: "
"""What a result begins with in the output of a part's process."""

PARTS = {
    "1a": ("copies, a product, a sum over two GPUs", 120, "device:machine"),
    "1b": ("tests marked `gpu`", 240, "runs:marked"),
    "1c": ("noise and sampling", 60, "device:draws"),
    "1d": ("hash of weights", 60, "device:hashes"),
    "1e": ("publish and pull", 120, "device:weights"),
    "2a": ("speed and memory of the learner", 300, "policy:speed"),
    "2b": ("the learner's head", 60, "device:head"),
    "2c": ("three steps of GRPO", 180, "policy:steps"),
    "3a": ("native engine", 300, "policy:native"),
    "3b": ("traces for ui.perfetto.dev", 120, "policy:traces"),
    "3c": ("a run whose workers are killed", 180, "runs:killed"),
    "4": ("vLLM", 600, "vllm:vllm"),
    "5": ("two GPUs", 300, "runs:ranks"),
    "6": ("two nodes", 600, "runs:nodes"),
}
"""What each measures, its limit in seconds, and its function in `gpus/`."""


def add_arguments(parser: argparse.ArgumentParser) -> None:
    what = "may be repeated (default: all): " + ", ".join(f"{n} ({p[0]})" for n, p in PARTS.items())
    parser.add_argument("--part", choices=PARTS, action="append", metavar="PART", help=what)
    harness.add_number(parser, "--minutes", None, "limit of all parts together")
    models = [f"random:{path.stem[6:]}" for path in ROOT.glob("rhymeflow/models/arch*/*.json")]
    what = "default: as the part says"
    parser.add_argument("--model", choices=[*sorted(models), "random:tiny"], help=what)
    parser.add_argument("--device", choices=["cuda", "cpu"], default="cuda")
    what = "where traces go (default: runs/gpu)"
    parser.add_argument("--output", metavar="DIR", default="runs/gpu", help=what)


def run(args: argparse.Namespace) -> dict[str, Any]:
    check_writable(Path(args.output), "--output")
    parts = args.part or list(PARTS)
    end = time.monotonic() + 60.0 * (args.minutes or 10**6)
    rows, failed = list[dict[str, Any]](), list[str]()
    for name in parts:
        limit = end - time.monotonic()
        if len(parts) > 1 or not args.minutes:  # a single part may take all of it
            limit = min(limit, PARTS[name][1])
        found = measure(name, max(limit, 0.0), args)
        print(json.dumps(found), flush=True)
        part, state, results = f"{name} {found['what']}", found["state"], found["results"]
        failed += [] if state.startswith(("done", "skipped")) else [f"{part}: {state}"]
        failed += [f"{part}: {r['what']}: {r['measured']}" for r in results if not r.pop("ok")]
        rows += [{"part": name, "what": f"{found['what']}: {state}"}]
        rows += [{"part": name, **each} for each in results]
    notes = "\n".join([__doc__ or "", f"{len(failed)} failures", *failed])
    return harness.report("gpu", rows, [], args, notes)


def measure(name: str, limit: float, args: argparse.Namespace) -> dict[str, Any]:
    """Do a part in a process of its own, which is then ended with all that it started."""
    started = time.monotonic()
    with TemporaryDirectory(prefix="rhymeflow-gpu-", ignore_cleanup_errors=True) as folder:
        given = {key: getattr(args, key) for key in ("model", "device", "output")}
        command = [sys.executable, "-m", "benchmarks.gpu", name, json.dumps(given), folder]
        path = f"{ROOT}{os.pathsep}{os.environ.get('PYTHONPATH', '')}"
        with Path(folder, "output").open("w+") as output:
            process = subprocess.Popen(
                command, cwd=ROOT, env=os.environ | {"PYTHONPATH": path}, start_new_session=True,
                stdout=output, stderr=output,
            )  # fmt: skip
            try:
                code = process.wait(limit)
            except subprocess.TimeoutExpired:
                code = None
            finally:
                with suppress(ProcessLookupError):
                    os.killpg(process.pid, signal.SIGKILL)
            output.seek(0)
            lines = output.read().strip().splitlines() or [""]
    results = [json.loads(line.removeprefix(MARK)) for line in lines if line.startswith(MARK)]
    failed = lines[-1] if lines[-1].startswith("skipped: ") else f"failed ({code}): {lines[-1]}"
    state = {None: f"ended after {limit:.0f} s", 0: "done"}.get(code, failed)
    found = {"part": name, "what": PARTS[name][0], "state": state, "results": results}
    return found | {"seconds": round(time.monotonic() - started, 1)}


def alone(name: str, args: argparse.Namespace) -> None:
    import torch

    if args.device == "cuda" and not torch.cuda.is_available():
        sys.exit("skipped: no GPU; --device cpu --model random:tiny tries the code on the CPU")
    module, _, function = PARTS[name][2].partition(":")
    part = getattr(importlib.import_module(f"benchmarks.gpus.{module}"), function)
    for given in part(args):
        what, value, expected, ok = tuple(given) + ("", True)[len(given) - 2 :]
        measured = float(f"{value:.4g}") if isinstance(value, float) else value
        row = {"what": what, "measured": measured, "expected": expected, "ok": ok}
        print(MARK + json.dumps(row), flush=True)


if __name__ == "__main__":
    alone(sys.argv[1], argparse.Namespace(**json.loads(sys.argv[2]), folder=sys.argv[3]))
