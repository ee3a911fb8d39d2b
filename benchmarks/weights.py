"""New weights from the learner to an instance: whole, and what changed; or an adapter's.

A model in bfloat16 learns sums in one process, on one core, without warm-up; each version is
published and pulled both ways. A row is the median of the steps, the spread of what changed over
them. `dense` and `delta`: seconds to publish and to pull, proof included; `still`: to put in what
was fetched while decoding went on; `repack`: to lay weights out anew after either, and to prove it.
`train MB`: the learner's peak, with loading. `mismatch_kl`: by the learner, of what was sampled.
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
from benchmarks.ranks import Memory
from benchmarks.rollouts.policy import Policy, learner_of
from rhymeflow.config import Config
from rhymeflow.config.load import read_config
from rhymeflow.models.copies import CopyProof
from rhymeflow.models.frozen_base import NAME, FrozenBase
from rhymeflow.models.lora import versioned
from rhymeflow.weights.install import Installation
from rhymeflow.weights.manifest import Manifest, manifest_of
from rhymeflow.weights.proof import bytes_of
from rhymeflow.weights.publish import row_digests
from rhymeflow.weights.shared_memory import SharedMemoryWeightStore

RATES = (1e-6, 1e-5)
KEEP = 3
SECONDS = ["publish dense", "publish delta", "pull dense", "still", "repack", "train"]
ADAPTER_RATE = 10
"""Learning rate of an adapter, in that of all weights."""


def add_arguments(parser: argparse.ArgumentParser) -> None:
    harness.add_number(parser, "--steps", 8, "training steps at each learning rate")
    harness.add_number(parser, "--groups", 16, "groups of responses a step")
    parser.add_argument("--recipe", choices=("smollm2", "demo"), default="smollm2")
    harness.add_number(parser, "--lora", None, "an adapter of this rank beside all weights")


def run(args: argparse.Namespace) -> dict[str, Any]:
    torch.set_num_threads(1)
    sides = [(rate, 0) for rate in RATES]
    if args.lora is not None:
        sides = [(RATES[1], 0), (RATES[1] * ADAPTER_RATE, args.lora)]
    found = {side: measure(_config(args, *side), args.steps) for side in sides}
    targets = []
    for (rate, _), each in found.items():
        still = harness.median_ratio(each["still"], each["pull dense"])
        targets.append(harness.at_most(f"{rate:g}: still/dense pull", round(still, 3), 0.2))
    if args.lora is not None:
        whole, adapter = (
            [a + b for a, b in zip(each["pull dense"], each["repack"], strict=True)]
            for each in found.values()
        )
        still = harness.median_ratio(adapter, whole)
        targets = [harness.at_most("adapter/all weights: standing still", round(still, 3), 0.25)]
    rows = [_row(rate, lora, each) for (rate, lora), each in found.items()]
    name = "weights" if args.lora is None else "weights-adapter"
    return harness.report(name, rows, targets, args, __doc__ or "")


def _config(args: argparse.Namespace, rate: float, lora: int) -> Config:
    return read_config(args.recipe, {
        "learner.learning_rate": str(rate),
        "learner.warmup_steps": "0",
        "learner.groups_per_batch": str(args.groups),
        "model.dtype": "bfloat16",
        "model.device": "cpu",
        "model.lora.rank": str(lora),
        "data.size": "64",
    })  # fmt: skip


def measure(config: Config, num_steps: int) -> dict[str, list[float]]:
    """For each version what changed, and seconds of all that is done with it."""
    policy, peaks = Policy(config), dict[str, float]()
    engine = policy.engine(config.rollout.max_num_seqs)
    batch = policy.sampled(engine, range(config.learner.groups_per_batch), 0, 0)
    memory = Memory()
    with memory.peak(peaks, "train MB"):
        learner = learner_of(config)
        learner.train(batch, 0)
    weights = learner.rows()
    manifest = manifest_of(weights)
    stores = {
        "dense": SharedMemoryWeightStore(manifest),
        "delta": SharedMemoryWeightStore(manifest, keep=KEEP),
    }
    into: dict[str, dict[str, Tensor]] = {
        "dense": {name: torch.empty_like(tensor) for name, tensor in weights.items()},
        "delta": dict(versioned(policy.model)),
    }
    copies = CopyProof(policy.model, engine._lm_head, engine._body)
    base = FrozenBase(policy.model) if config.model.lora.is_used else None
    if base is not None:
        into["delta"][NAME] = base.checksum
    held = {side: Installation(tensors) for side, tensors in into.items()}
    readers = {side: store.handle.open() for side, store in stores.items()}
    found: dict[str, list[float]] = defaultdict(list)

    def pull(side: str, version: int) -> None:
        if base is not None:  # as an instance does
            row_digests(manifest, into[side])
            base.check_part()
            copies.require_adapter()
        held[side].pull(readers[side], version)

    try:
        for version in range(num_steps + 1):
            if version:
                groups = config.learner.groups_per_batch
                rows = [(version * groups + i) % len(policy.prompts) for i in range(groups)]
                batch = policy.sampled(engine, rows, version, version - 1)
                metrics = learner.train(batch, version - 1)
                found["train"].append(metrics["step_time"])
                found["mismatch_kl"].append(metrics["off_policy/mismatch_kl"])
            order = ("dense", "delta") if version % 2 else ("delta", "dense")
            for side in order:
                seconds = _timed(lambda: stores[side].publish(version, learner.rows()))  # noqa: B023
                found[f"publish {side}"].append(seconds)
            while (holds := held["delta"].holds) is not None:
                if readers["delta"].prepare(holds, version):
                    break
                time.sleep(0.001)
            for side in order:
                seconds = _timed(pull, side, version)
                found["still" if side == "delta" else "pull dense"].append(seconds)
            _compare(manifest, into, weights)
            found["repack"].append(
                _timed(partial(engine.set_version, version, keep_cache=False))
                + _timed(copies.require_next)
            )
            for name, value in stores["delta"].metrics.items():
                found[name.removeprefix("params/")].append(value)
            found["bytes"].append(sum(spec.num_bytes for spec in manifest))
            print(f"  version {version}", file=sys.stderr, flush=True)
    finally:
        for store in stores.values():
            store.close()
    # The first publication touches memory for the first time, and all has changed.
    found["train MB"] = [*peaks.values()]
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


def _row(rate: float, lora: int, found: dict[str, list[float]]) -> dict[str, Any]:
    median = {name: statistics.median(values) for name, values in found.items()}
    shares = found["changed_share"]
    return {
        "trained": f"adapter of rank {lora}" if lora else "all weights",
        "learning rate": f"{rate:g}",
        "version MB": round(median["bytes"] / 1e6, 2),
        "changed": f"{median['changed_share']:.3%} ({min(shares):.3%} to {max(shares):.3%})",
        "delta MB": round(median["delta_bytes"] / 1e6, 2),
        **{name: round(median[name], 4) for name in SECONDS},
        "train MB": round(median["train MB"]),
        "mismatch_kl": median["mismatch_kl"],
    }
