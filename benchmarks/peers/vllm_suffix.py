"""Repeated prompts in vLLM's CPU build with and without `suffix`, and here with and without drafts.

SmolLM2 in bfloat16, one thread on every side. Chat prompts, all at once, responses of one length,
pass after pass over the same prompts: what a pass said is history for the next on both sides, as
vLLM's `suffix` keeps its cache. Sides in turn, vLLM's processes stopped while others are measured.
Before speeds are compared the greedy responses of each system with drafts are compared with its own
without. vLLM's `suffix` may draft as many tokens as are drafted here; its other settings are its
own.
"""

from __future__ import annotations

import argparse
import statistics
import sys
from contextlib import ExitStack, closing
from typing import Any

from benchmarks import harness
from benchmarks.peers.vllm_driver import Made, Vllm

PROMPTS, TOKENS, PASSES = 8, 64, 5
SUFFIX = {"speculative_config": {"method": "suffix", "num_speculative_tokens": 16}}


class Here:
    """The engine of this project; `drafts`: with a drafter, whose history grows by each pass."""

    def __init__(self, policy: Any, *, drafts: bool) -> None:
        from rhymeflow.histospec.drafter import Drafter
        from rhymeflow.histospec.index import Index

        drafting = policy.config.drafting
        self.history = Index(max_tokens=100_000, max_responses=1000)
        self.drafter = None
        if drafts:
            self.drafter = Drafter(
                self.history,
                window="cost",
                max_draft=drafting.max_draft,
                shape=drafting.shape,
                ranking=drafting.ranking,
                max_sequences=PROMPTS,
                max_length=1024,
            )
        self.engine = policy.engine(PROMPTS, drafter=self.drafter)
        self.passes = 0

    def generate(self, prompts: list[list[int]], lengths: list[int], temperature: float) -> Made:
        """One pass, with fresh noise."""
        from benchmarks.rollouts.history import remember
        from benchmarks.rollouts.policy import drain
        from benchmarks.rollouts.recorded import Rollout
        from rhymeflow.engine.base import NoiseKey, Request, Sampling

        epoch, self.passes = self.passes, self.passes + 1
        requests = [
            Request(
                row,
                prompt,
                NoiseKey(row, epoch, 0),
                Sampling(temperature, 1.0, 0, length, frozenset()),
            )
            for row, (prompt, length) in enumerate(zip(prompts, lengths, strict=True))
        ]
        seconds = drain(self.engine, requests)
        if self.drafter is not None:
            said = [
                Rollout(row, epoch, 0, 0, epoch, row, request.prompt_ids, request.tokens, 0.0)
                for row, request in enumerate(requests)
            ]
            remember(self.history, said)
        return Made([request.tokens for request in requests], seconds)


def measure(args: argparse.Namespace) -> tuple[list[dict[str, Any]], list[harness.Target]]:
    """Greedy and temperature 1; rows of four sides each."""
    import torch

    from benchmarks.rollouts.policy import Policy
    from benchmarks.rollouts.record import configuration
    from rhymeflow.models.converted import converted
    from rhymeflow.models.source import locate

    torch.set_num_threads(1)
    policy = Policy(configuration("long"))
    checkpoint = converted(locate(policy.config.model).gguf_path)
    rows, targets = [], []
    with ExitStack() as stack:
        sides: dict[str, Any] = {
            "rhymeflow": Here(policy, drafts=False),
            "rhymeflow, drafts": Here(policy, drafts=True),
        }
        for name, options in (("vllm", {}), ("vllm, suffix", SUFFIX)):
            print(f"  starting {name} ...", file=sys.stderr, flush=True)
            side = Vllm(args.vllm_python, 1, checkpoint, **options)
            sides[name] = stack.enter_context(closing(side))
        for temperature in (0.0, 1.0):
            found = _passes(sides, policy.prompts[:PROMPTS], temperature)
            rows += [{"part": "vllm", "temperature": temperature, **row} for row in found[0]]
            targets += found[1]
    return rows, targets


def _passes(
    sides: dict[str, Any], prompts: list[list[int]], temperature: float
) -> tuple[list[dict[str, Any]], list[harness.Target]]:
    lengths = [TOKENS] * len(prompts)
    texts: dict[str, list[list[list[int]]]] = {name: [] for name in sides}

    def speed(name: str) -> float:
        made = sides[name].generate(prompts, lengths, temperature)
        texts[name].append(made.tokens)
        return sum(lengths) / made.seconds

    measures = {name: lambda name=name: speed(name) for name in sides}
    harness.interleave(measures, 2, progress=lambda line: None)  # warm, and history is there
    values = harness.interleave(measures, PASSES)
    rows = []
    for name in sides:
        row = {"window": name, "tokens/s": round(statistics.median(values[name]))}
        plain = name.split(",")[0]
        row["ratio"] = round(harness.median_ratio(values[name], values[plain]), 3)
        if temperature == 0:
            pairs = zip(texts[name], texts[plain], strict=True)
            same = [a == b for left, right in pairs for a, b in zip(left, right, strict=True)]
            row["identical"] = round(sum(same) / len(same), 3)
        rows.append(row)
    ratio = harness.median_ratio(values["rhymeflow, drafts"], values["vllm, suffix"])
    name = "greedy" if temperature == 0 else f"T{temperature}"
    return rows, [harness.Target(f"histospec/vllm-suffix/{name}", ratio, 1.0)]


__all__ = ["measure"]
