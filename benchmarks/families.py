"""How far apart engine and learner compute a policy that does not change, for each type of models.

Small random models (`tests/families`) in bfloat16: the engine samples, the learner scores the same
tokens under the same weights. What is left is rounding, which off-policy corrections see. With
`--lora`, the policy is the model with a random adapter.
"""

from __future__ import annotations

import argparse
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import torch

from benchmarks import harness
from rhymeflow.config import LearnerConfig, LoraConfig, ModelConfig, RolloutConfig
from rhymeflow.engine.base import NoiseKey, Request, Sampling
from rhymeflow.engine.native.engine import Engine
from rhymeflow.learner.algorithms.losses import mismatch
from rhymeflow.learner.packing import pack
from rhymeflow.learner.policy import proved_scorer
from rhymeflow.learner.sample import Sample
from rhymeflow.models.families import FAMILIES, carries_state
from rhymeflow.models.load import load_config
from rhymeflow.models.lora import draw_adapter, load_policy
from rhymeflow.models.precision import resolve_device
from tests.families import cases

NUM_PROMPTS, NUM_MEMBERS, PROMPT, RESPONSE = 8, 4, 24, 128
DTYPES = ("float32", "bfloat16")


def add_arguments(parser: argparse.ArgumentParser) -> None:
    names = [name for group in cases.GROUPS for name in group]
    harness.add_choice(parser, "--case", dict.fromkeys(names))
    harness.add_number(parser, "--lora", None, "rank of an adapter")


def run(args: argparse.Namespace) -> dict[str, Any]:
    names = args.case or [name for group in cases.GROUPS for name in group]
    lora = LoraConfig(rank=args.lora or 0)
    rows = [row for name in names if (row := measured(name, lora)) is not None]
    notes = (
        f"{NUM_PROMPTS * NUM_MEMBERS} responses of {RESPONSE} tokens at temperature 1; models of "
        f"two layers and {cases.SIZES['vocab_size']} tokens."
    )
    return harness.report("families", rows, [], args, notes)


def measured(name: str, lora: LoraConfig) -> dict[str, Any] | None:
    """The row of a case; None if the native engine does not run it."""
    row: dict[str, Any] = {"model": name}
    with TemporaryDirectory() as folder:
        cases.save(name, Path(folder))
        config = ModelConfig(name=folder, lora=lora)
        hf_config = load_config(config)
        if FAMILIES[hf_config.model_type].not_native or carries_state(hf_config.to_dict()):
            return None
        for dtype in DTYPES:
            kl, max_ratio = mismatch_of(config, getattr(torch, dtype))
            row |= {f"mismatch_kl, {dtype}": kl, f"max_ratio, {dtype}": max_ratio}
    return row


def mismatch_of(config: ModelConfig, dtype: torch.dtype) -> tuple[float, float]:
    """Metrics `off_policy/mismatch_kl` and `max_ratio` of responses that the engine samples."""
    model = load_policy(config, dtype=dtype, device=resolve_device(config))
    draw_adapter(model)
    scorer = proved_scorer(model, RolloutConfig(), LearnerConfig(max_steps=1))
    samples = sampled(model)
    (row,) = pack(samples, range(len(samples)), 10**6)
    behaviour = [x for sample in samples for x in sample.logprobs]
    logprob_R = scorer.score(row)[0].cpu()
    kl, max_ratio = mismatch(logprob_R, torch.tensor(behaviour))
    return float(kl) / len(behaviour), float(max_ratio)


def sampled(model: Any) -> list[Sample]:
    """Responses of the native engine, all running at a time, in groups of one prompt each."""
    size = NUM_PROMPTS * NUM_MEMBERS
    engine = Engine(
        model, seed=0, max_num_seqs=size, max_prefill_tokens=512, instance="bench", version=0
    )
    how = Sampling(1.0, 1.0, 0, RESPONSE, frozenset())
    drawn = torch.Generator().manual_seed(0)
    shape, vocabulary = (NUM_PROMPTS, PROMPT), cases.SIZES["vocab_size"]
    prompts = torch.randint(3, vocabulary, shape, generator=drawn).tolist()
    requests = [
        Request((p, m), prompt, NoiseKey(p, 0, m), how)
        for p, prompt in enumerate(prompts)
        for m in range(NUM_MEMBERS)
    ]
    for request in requests:
        engine.submit(request)
    while engine.has_work:
        engine.step()
    zeros = [0] * RESPONSE
    return [
        Sample(n // NUM_MEMBERS, r.prompt_ids, r.tokens, r.logprobs, zeros, 0.0, False)
        for n, r in enumerate(requests)
    ]
