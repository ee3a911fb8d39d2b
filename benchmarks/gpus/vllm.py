"""vLLM beside the native engine and the learner, of random weights."""

from __future__ import annotations

import argparse
import importlib.util
import itertools
import multiprocessing
import sys
from concurrent.futures import ProcessPoolExecutor
from contextlib import closing
from functools import partial
from typing import Any

import torch

from benchmarks.gpus.device import Results, configured, drawn, once, sized
from benchmarks.gpus.policy import made, native_engine, rates
from benchmarks.rollouts.policy import drain
from rhymeflow.config import RolloutConfig
from rhymeflow.histospec.index import Index
from rhymeflow.learner.logprobs import TokenScorer
from rhymeflow.learner.packing import pack
from rhymeflow.learner.sample import Sample
from rhymeflow.weights.manifest import manifest_of
from rhymeflow.weights.shared_memory import SharedMemoryWeightStore
from rhymeflow.workers.rollout import make_engine, prepare


def vllm(args: argparse.Namespace) -> Results:
    if not importlib.util.find_spec("vllm"):
        sys.exit("skipped: vLLM is not installed")
    runners = ("v1", "v2") if args.device == "cuda" else ("v1",)
    kinds = ("float32", "model"), ("bfloat16", "model"), ("bfloat16", "float32")
    spawn = multiprocessing.get_context("spawn")  # two engines of vLLM do not go into one process
    with ProcessPoolExecutor(1, mp_context=spawn, max_tasks_per_child=1) as pool:
        for runner, kind in itertools.product(runners, kinds):
            yield from pool.submit(of_engine, args, runner, *kind).result()


def of_engine(args: argparse.Namespace, runner: str, dtype: str, head: str) -> list[Any]:
    """It tests itself when it starts. 256 requests with drafts of 16 tokens must fit."""
    exact, what = dtype == "float32", f"{runner}, {dtype}, head {head}"
    name, count = "Qwen3-1.7B" if exact else "Qwen3-8B", sized(args, 256, 8)
    config = configured(args, name, {
        "rollout.engine": "vllm", "rollout.vllm_model_runner": runner, "model.dtype": dtype,
        "rollout.vllm_head_dtype": head, "rollout.max_num_seqs": str(count),
        "rollout.vllm_max_model_length": "512", "rollout.vllm_gpu_memory_utilization": "0.5",
    })  # fmt: skip
    prepare(config)
    model = drawn(config, torch.float32 if exact else torch.bfloat16)
    tensors = {name: each.detach() for name, each in model.named_parameters()}
    store = SharedMemoryWeightStore(manifest_of(tensors))
    index = Index(max_tokens=1_000_000, max_responses=4_000, shared=True)
    with closing(store), closing(index):
        store.publish(0, tensors)
        reader = store.handle.open()
        with closing(make_engine(config, reader, "bench")) as made_engine:
            engine: Any = made_engine
            engine.step = partial(engine.poll, 0.01)  # as the native engine's
            store.publish(1, tensors)
            pull = once(lambda: engine.install(reader, 1, keep_cache=False))
            drain(native_engine(model), ours := made(8, 32))
            drain(engine, theirs := made(8, 32))
            same = sum(a.tokens == b.tokens for a, b in zip(ours, theirs, strict=True))
            batch = [
                Sample(0, r.prompt_ids, r.tokens, r.logprobs, [1] * 32, 0.0, False) for r in theirs
            ]
            (packed,) = pack(batch, range(8), 1 << 20)
            logprob_R, _ = TokenScorer(model, RolloutConfig(), 1024).score(packed)
            sampled = [x for i in packed.members for x in batch[i].logprobs]
            ratio_R = (logprob_R.cpu() - torch.tensor(sampled)).exp()
            kl = float((ratio_R - 1 - ratio_R.log()).mean())

            def with_drafts(is_drafting: bool = False) -> Any:
                if is_drafting:
                    engine.draft_from(index.handle)
                return engine

            return [
                (f"{what}: responses as native, of 8", same, "8, or 7" * exact, same >= 7 * exact),
                (f"{what}: mismatch_kl", kl, "< 0.002"),
                (f"{what}: pull: s", pull, "1.5"),
                *rates(f"vLLM {what}, {name}, {count}", with_drafts, lambda: True, index),
            ]
