"""The learner and the native engine, of random weights."""

from __future__ import annotations

import argparse
import gc
import itertools
import math
from contextlib import closing
from functools import partial
from pathlib import Path
from typing import Any

import torch
from torch.profiler import profile

from benchmarks.gpus.device import Results, configured, drawn, once, peak_gb, sized
from benchmarks.rollouts.policy import drain, random_batch
from benchmarks.rollouts.recorded import enter
from rhymeflow import memory
from rhymeflow.config import Config
from rhymeflow.engine.base import NoiseKey, Request, Sampling
from rhymeflow.engine.native.engine import Engine
from rhymeflow.histospec.drafter import drafter_of
from rhymeflow.histospec.index import Index
from rhymeflow.learner.learner import Learner
from rhymeflow.learner.sample import Sample
from rhymeflow.workers.rollout import prepare

PEAK_TFLOPS = {"H200": 989.0, "H100": 989.0, "A100": 312.0, "L40S": 362.0, "RTX 4090": 165.0}
"""Dense bfloat16, by part of the device's name (vendor's data sheets, SXM where there are two)."""
RATES = {"Qwen3-8B, 1": "80 to 110", "Qwen3-8B, 256": "5000 to 8000"}


def learner_of(config: Config) -> Learner:
    model = drawn(config, torch.float32)
    return Learner(model, None, config.learner, config.rollout, torch.bfloat16)


def native_engine(model: Any, drafter: Any = None) -> Engine:
    how: Any = {"max_num_seqs": 256, "max_prefill_tokens": 8192, "instance": "bench"}
    return Engine(model, seed=0, version=0, drafter=drafter, **how)


def made(count: int, length: int, epoch: int = 0) -> list[Request]:
    """Requests for responses of this length, eight a prompt."""
    how = Sampling(1.0, 1.0, 0, length, frozenset())
    prompts = [[2 + (7 * i + j) % 500 for j in range(40)] for i in range(count)]
    return [Request(i, prompts[i // 8], NoiseKey(i // 8, epoch, i), how) for i in range(count)]


def speed(args: argparse.Namespace) -> Results:
    name = torch.cuda.get_device_name() if args.device == "cuda" else ""
    peak_tflops = next((each for part, each in PEAK_TFLOPS.items() if part in name), math.nan)
    kinds = ["sdpa", "flex"] if args.device == "cuda" else ["sdpa"]
    for attention, full, again in itertools.product(kinds, (8192, 16384), ("true", "false")):
        learner: Any = None
        length = sized(args, full, 256) // 8 - 8
        fields = {
            "learner.attention": attention, "learner.gradient_checkpointing": again,
            "learner.max_tokens_per_microbatch": str(full),
            "rollout.max_completion_length": str(length),
        }  # fmt: skip
        config = configured(args, "Qwen3-8B", fields, num_hidden_layers=8)
        what, size = f"{attention}, {full}, recomputed: {again}", memory.model_here(config)
        parts = [*memory.of_optimizer(config, size), *memory.of_rank(config, size, 8)]
        rises = [p for p in parts if not p.what.startswith(("master", "AdamW", "weights"))]
        plan = f"{memory.total(rises) / 1e9:.1f} by the plan"
        try:
            learner = learner_of(config)
            batch = random_batch(2, 8, 8, length, 512)
            learner.train(batch, 0)
            yield f"{what}: GB rise", peak_gb(partial(learner.train, batch, 1)), plan
            rate = 16 * length / min(learner.train(batch, step)["step_time"] for step in (2, 3))
            mfu = f"MFU {6 * size.num_parameters * rate / 1e12 / peak_tflops:.3f}"
            yield f"{what}: tokens/s, {mfu}", rate, "MFU 0.33 to 0.42; recomputed 0.25"
        except torch.OutOfMemoryError:
            yield f"{what}: GB rise", "more than there is", plan
        finally:
            learner = None
            gc.collect()
            torch.cuda.empty_cache()


def steps(args: argparse.Namespace) -> Results:
    length = sized(args, 256, 16)
    config = configured(args, "Qwen3-1.7B", {"rollout.max_completion_length": str(length)})
    learner, model = learner_of(config), drawn(config)
    engine = native_engine(model)
    for step in range(3):
        for name, tensor in learner.rows().items():
            model.get_parameter(name).data.copy_(tensor)
        engine.set_version(step, keep_cache=False)
        drain(engine, requests := made(64, length, step))
        batch = [
            Sample(r.id // 8, r.prompt_ids, r.tokens, r.logprobs, [step] * length, r.id % 2, False)
            for r in requests
        ]
        found = learner.train(batch, step)
        loss, kl = found["loss"], found["off_policy/mismatch_kl"]
        yield f"step {step + 1}: loss", loss, "finite", math.isfinite(loss)
        yield f"step {step + 1}: mismatch_kl", kl, "< 0.002", kl < 0.002


def native(args: argparse.Namespace) -> Results:
    for name in ("Qwen3-1.7B", "Qwen3-8B") if args.model is None else (args.model[7:],):
        config = configured(args, name, {"rollout.max_num_seqs": "256"})
        prepare(config)
        model = drawn(config)
        with closing(Index(max_tokens=1_000_000, max_responses=4_000, shared=True)) as index:
            drafting = partial(drafter_of, config, index.handle, 2048, ())
            for count in (1, 32, 256)[: sized(args, 3, 1)]:
                yield from rates(f"{name}, {count}", partial(native_engine, model), drafting, index)


def rates(name: str, engine: Any, drafter: Any, index: Index) -> Results:
    """Each after a warm-up of its shape, without drafts; then the same responses with drafts."""
    count = int(name.rpartition(" ")[2])
    plain, first, again = engine(), made(count, 128), made(count, 128)
    drain(plain, made(count, 128))
    yield f"{name} requests: tokens/s", count * 128 / drain(plain, first), RATES.get(name, "")
    for each in first:
        enter(index, each.prompt_ids, each.tokens, 1.0, sample=each.id)
    drafting = engine(drafter())
    drain(drafting, made(count, 128))
    yield f"{name} requests with drafts: tokens/s", count * 128 / drain(drafting, again)
    yield "  tokens a step", count * 128 / sum(each.steps for each in again)
    same = sum(a.tokens == b.tokens for a, b in zip(first, again, strict=True))
    yield "  responses as without drafts", same, f"{count}; less in bfloat16"


def traces(args: argparse.Namespace) -> Results:
    config = configured(args, "Qwen3-1.7B", num_hidden_layers=4)
    learner, engine = learner_of(config), native_engine(drawn(config))
    for each in made(sized(args, 32, 2), 64):
        engine.submit(each)
    batch = random_batch(1, 8, 40, sized(args, 900, 16), 512)
    step: Any = partial(learner.train, batch, 1)
    for warm_up in (*[engine.step] * 8, step):
        warm_up()
    Path(args.output).mkdir(parents=True, exist_ok=True)
    for name, work, due in (("decode", engine.step, "2"), ("learner", step, "2")):
        with profile() as recorded:
            taken = once(work)
        recorded.export_chrome_trace(path := f"{args.output}/{name}.json.gz")
        events = recorded.key_averages()
        share = sum(each.self_device_time_total for each in events) / 1e6 / taken
        yield f"{path}: share of the time that the GPU computes", share
        waits = sum(each.count for each in events if each.key == "cudaStreamSynchronize")
        yield f"{path}: waits for the GPU", waits, due
