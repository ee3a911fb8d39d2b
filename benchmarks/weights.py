"""New weights from the learner to an instance: whole, and what changed.

SmolLM2-135M in bfloat16 learns sums in one process, on one core, without warm-up; each version is
published and pulled both ways. A row is the median of the steps, the spread of what changed over
them. `dense` and `delta`: seconds to publish and to pull, proof included; `still`: to put in what
was fetched while decoding went on; `repack`: to lay all weights out anew, after either.
"""

from __future__ import annotations

import argparse
import statistics
import sys
import time
from collections import defaultdict
from collections.abc import Callable, Mapping
from functools import partial
from typing import Any

import numpy as np
import torch
from torch import Tensor

from benchmarks import harness
from benchmarks.rollouts.policy import Policy, learner_of
from rhymeflow.config import Config
from rhymeflow.config.load import read_config
from rhymeflow.weights.install import Installation
from rhymeflow.weights.manifest import Manifest, manifest_of
from rhymeflow.weights.proof import bytes_of
from rhymeflow.weights.shared_memory import SharedMemoryWeightStore

RATES = (1e-6, 1e-5)
KEEP = 3
SECONDS = ["publish dense", "publish delta", "pull dense", "still", "repack"]


def add_arguments(parser: argparse.ArgumentParser) -> None:
    harness.add_number(parser, "--steps", 8, "training steps at each learning rate")
    harness.add_number(parser, "--groups", 16, "groups of responses a step")


def run(args: argparse.Namespace) -> dict[str, Any]:
    torch.set_num_threads(1)
    rows, targets = [], []
    for rate in RATES:
        config = read_config("smollm2", {
            "learner.learning_rate": str(rate),
            "learner.warmup_steps": "0",
            "learner.groups_per_batch": str(args.groups),
            "model.dtype": "bfloat16",
            "model.device": "cpu",
            "data.size": "64",
        })  # fmt: skip
        found = measure(config, args.steps)
        rows.append(_row(rate, found))
        still = harness.median_ratio(found["still"], found["pull dense"])
        targets.append(harness.at_most(f"{rate:g}: still/dense pull", round(still, 3), 0.2))
    return harness.report("weights", rows, targets, args, __doc__ or "")


def measure(config: Config, num_steps: int) -> dict[str, list[float]]:
    """For each version what changed, and seconds of all that is done with it."""
    policy = Policy(config)
    learner = learner_of(config)
    weights = learner.rows()
    manifest = manifest_of(weights)
    stores = {
        "dense": SharedMemoryWeightStore(manifest),
        "delta": SharedMemoryWeightStore(manifest, keep=KEEP),
    }
    engine = policy.engine(config.rollout.max_num_seqs)
    into: dict[str, dict[str, Tensor]] = {
        "dense": {name: torch.empty_like(tensor) for name, tensor in weights.items()},
        "delta": dict(policy.model.named_parameters()),
    }
    held = {side: Installation(tensors) for side, tensors in into.items()}
    readers = {side: store.handle.open() for side, store in stores.items()}
    found: dict[str, list[float]] = defaultdict(list)
    try:
        for version in range(num_steps + 1):
            if version:
                groups = config.learner.groups_per_batch
                rows = [(version * groups + i) % len(policy.prompts) for i in range(groups)]
                learner.train(policy.sampled(engine, rows, version, version - 1), version - 1)
            order = ("dense", "delta") if version % 2 else ("delta", "dense")
            for side in order:
                seconds = _timed(stores[side].publish, version, weights)
                found[f"publish {side}"].append(seconds)
            while (holds := held["delta"].holds) is not None:
                if readers["delta"].prepare(holds, version):
                    break
                time.sleep(0.001)
            for side in order:
                seconds = _timed(held[side].pull, readers[side], version)
                found["still" if side == "delta" else "pull dense"].append(seconds)
            _compare(manifest, into, weights)
            found["repack"].append(_timed(partial(engine.set_version, version, keep_cache=False)))
            for name, value in stores["delta"].metrics.items():
                found[name.removeprefix("params/")].append(value)
            print(f"  version {version}", file=sys.stderr, flush=True)
    finally:
        for store in stores.values():
            store.close()
    # The first publication touches memory for the first time, and all has changed.
    return {name: values[-num_steps:] for name, values in found.items()}


def _compare(
    manifest: Manifest, into: dict[str, dict[str, Tensor]], weights: Mapping[str, Tensor]
) -> None:
    for spec in manifest:
        expected = bytes_of(weights[spec.name])
        for side, tensors in into.items():
            assert np.array_equal(bytes_of(tensors[spec.name]), expected), (side, spec.name)


def _timed(call: Callable[..., Any], *values: Any) -> float:
    started = time.perf_counter()
    call(*values)
    return time.perf_counter() - started


def _row(rate: float, found: dict[str, list[float]]) -> dict[str, Any]:
    median = {name: statistics.median(values) for name, values in found.items()}
    shares = found["changed_share"]
    return {
        "learning rate": f"{rate:g}",
        "changed": f"{median['changed_share']:.3%} ({min(shares):.3%} to {max(shares):.3%})",
        "MB": round(median["delta_bytes"] / 1e6, 2),
        **{name: round(median[name], 4) for name in SECONDS},
    }
