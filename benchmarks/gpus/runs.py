"""Marked tests, whole runs that are hurt and audited, two ranks, and two nodes."""

from __future__ import annotations

import argparse
import os
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path
from tempfile import mkdtemp

import numpy as np
import torch

from benchmarks.faults.plan import Fault
from benchmarks.faults.run import run_with_faults
from benchmarks.gpus.device import Results, once, sized
from benchmarks.training.train import ROOT, training_rows
from rhymeflow.config.load import read_config
from rhymeflow.doctor import RAY_CLUSTER


def marked(args: argparse.Namespace) -> Results:
    which = ["tests/engine", "tests/learner", "tests/weights", "-m", "gpu"]
    if args.device == "cpu":
        which = ["tests/benchmarks/test_harness.py", "-k", "pairs"]
    command = [sys.executable, "-m", "pytest", "-rfE", "-p", "no:cacheprovider", *which]
    said = subprocess.run(command, cwd=ROOT, capture_output=True, text=True).stdout.splitlines()
    yield from ((line, "", "", False) for line in said if line.startswith(("FAILED", "ERROR")))
    yield "pytest -m gpu", said[-1], "none fails", "passed" in said[-1]


def killed(args: argparse.Namespace) -> Results:
    plan = (Fault(1, 0.0, "learner"), Fault(2, 0.0, "rollout"))[: sized(args, 2, 1)]
    yield from whole_run(args, {"learner.max_steps": str(sized(args, 12, 2))}, plan)


def whole_run(
    args: argparse.Namespace, fields: dict[str, str], plan: Sequence[Fault] = ()
) -> Results:
    """Train the demo through these faults, and audit its log."""
    run_dir = Path(mkdtemp(dir=args.folder)) / "run"
    given = {"model.device": args.device, "run.output_dir": str(run_dir), "data.eval_size": "2"}
    if args.model == "random:tiny":
        given |= {"learner.groups_per_batch": "2", "drafting.window": "off"}
    found = run_with_faults(read_config("demo", given | fields), plan)
    said = "; ".join(found.violations) or f"{found.steps} steps, {len(found.faults)} kills"
    is_right = not found.violations and len(found.faults) == len(plan)
    yield f"demo with {fields}", said, "all laws hold", is_right
    loss = training_rows(run_dir)[0]["loss"] if found.steps else "none"
    yield "loss of its first step", loss, "the same on one and more ranks"


def ranks(args: argparse.Namespace) -> Results:
    count = torch.cuda.device_count() if args.device == "cuda" else 3
    if count < 2:
        sys.exit(f"skipped: {count} GPU, and two are needed")
    for number in range(1, min(count, 3)):  # the instance has a GPU of its own
        yield from whole_run(args, {"learner.num_ranks": str(number), "learner.max_steps": "3"})


def nodes(args: argparse.Namespace) -> Results:
    if not RAY_CLUSTER.exists() and "RAY_ADDRESS" not in os.environ:
        sys.exit("skipped: this machine is part of no Ray cluster (`ray start`)")
    import ray
    from ray.util.scheduling_strategies import NodeAffinitySchedulingStrategy

    ray.init("auto", log_to_driver=False)
    here, alive = ray.get_runtime_context().get_node_id(), [n for n in ray.nodes() if n["Alive"]]
    if not (others := [node["NodeID"] for node in alive if node["NodeID"] != here]):
        sys.exit("skipped: Ray's cluster has one node")
    there = NodeAffinitySchedulingStrategy(others[0], soft=False)
    fetch = ray.remote(num_cpus=0, scheduling_strategy=there)(lambda data: data.nbytes)
    ray.get(fetch.remote(np.zeros(1)))
    data = ray.put(np.ones(size := sized(args, 1 << 32, 1 << 20), np.uint8))
    yield "node to node: GB/s", size / once(lambda: ray.get(fetch.remote(data))) / 1e9, "2 to 5"
    gpus = int(alive[0]["Resources"].get("GPU", 0))
    ray.shutdown()
    # Ranks fill a node; steps take longer than the time after which a silent worker is replaced.
    yield from whole_run(args, {
        "runtime": "ray", "ray.address": "auto", "learner.num_ranks": str(max(gpus, 2)),
        "rollout.num_instances": str(max(gpus, 1)), "weights.transport": "delta",
        "learner.max_steps": "3", "learner.num_iterations": "50", "run.worker_timeout": "5",
    })  # fmt: skip
