"""The policy of a recipe in one process: an engine, and the weights of any checkpoint of a run."""

from __future__ import annotations

import asyncio
import os
import random
import time
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file

from rhymeflow.config import Config
from rhymeflow.data.encode import PromptEncoder
from rhymeflow.data.load import load_prompts
from rhymeflow.engine.base import NoiseKey, Request, Sampling
from rhymeflow.engine.native.engine import Engine
from rhymeflow.learner.learner import Learner
from rhymeflow.learner.sample import Sample
from rhymeflow.models.load import resolve_dtype, stop_token_ids
from rhymeflow.models.lora import load_policy
from rhymeflow.models.precision import resolve_device
from rhymeflow.models.tokenizer import load_tokenizer
from rhymeflow.reward.functions import Judge
from rhymeflow.reward.messages import RewardRequest, TrainerState


class Policy:
    def __init__(self, config: Config) -> None:
        self.config = config
        device = resolve_device(config.model)
        dtype = resolve_dtype(config.model, device)
        self.model = load_policy(config.model, dtype=dtype, device=device)
        self._first = {name: value.clone() for name, value in self.model.state_dict().items()}
        self._tokenizer = load_tokenizer(config.model)
        self.stop_tokens = stop_token_ids(self.model, self._tokenizer)
        encoder = PromptEncoder(self._tokenizer, config.data)
        self._source, _ = load_prompts(config.data, config.run.seed)
        self.prompts = [encoder.encode(self._source[row]) for row in range(len(self._source))]

    def engine(self, max_num_seqs: int, **more: Any) -> Engine:
        return Engine(
            self.model,
            seed=self.config.run.seed,
            max_num_seqs=max_num_seqs,
            max_prefill_tokens=self.config.rollout.max_prefill_tokens,
            instance="bench",
            version=0,
            **more,
        )

    def load(self, checkpoint: Path | None) -> None:
        """Put a checkpoint's weights into the model, the recipe's own for `None`.

        Engines over the model are to be told by `set_version`.
        """
        weights = self._first
        if checkpoint is not None:
            weights = load_file(checkpoint / "model.safetensors")
        missing, unexpected = self.model.load_state_dict(weights, strict=False)
        self.model.tie_weights()
        assert not unexpected, unexpected
        assert set(missing) <= set(self.model.all_tied_weights_keys), missing

    def requests(self, rows: Iterable[int], noise_epoch: int, temperature: float) -> list[Request]:
        """A group for each of these prompts."""
        rollout = self.config.rollout
        sampling = Sampling(
            temperature, rollout.top_p, rollout.top_k, rollout.max_completion_length,
            self.stop_tokens,
        )  # fmt: skip
        return [
            Request((row, sample), self.prompts[row], NoiseKey(row, noise_epoch, sample), sampling)
            for row in rows
            for sample in range(rollout.num_generations)
        ]

    def sampled(
        self, engine: Engine, rows: Iterable[int], noise_epoch: int, version: int
    ) -> list[Sample]:
        """Rewarded responses to these prompts, as the learner gets them."""
        requests = self.requests(rows, noise_epoch, self.config.rollout.temperature)
        drain(engine, requests)
        return [
            Sample(
                group=request.noise_key.prompt,
                prompt_ids=request.prompt_ids,
                completion_ids=request.tokens,
                logprobs=request.logprobs,
                versions=[version] * len(request.tokens),
                reward=reward,
                truncated=request.finish_reason() == "length",
            )
            for request, reward in zip(requests, self.rewards(requests), strict=True)
        ]

    def rewards(self, requests: Iterable[Request]) -> list[float]:
        (function,) = self.config.reward.functions
        judge, found, state = Judge(function), [], TrainerState(0, 1)
        with asyncio.Runner() as runner:
            for request in requests:
                prompt = self._source[request.noise_key.prompt]
                text = self._tokenizer.decode(request.tokens, skip_special_tokens=True)
                asked = RewardRequest(
                    prompt.prompt, [str(text)], [request.tokens], prompt.columns, state
                )
                found += [value or 0.0 for value in judge(asked, runner)]
        return found


def learner_of(config: Config) -> Learner:
    """A learner of one rank, with the recipe's own weights, as its worker makes it."""
    device = resolve_device(config.model)
    compute = resolve_dtype(config.model, device)
    exact = compute if config.model.lora.is_used else torch.float32
    model = load_policy(config.model, dtype=exact, device=device, seed=config.run.seed)
    return Learner(model, None, config.learner, config.rollout, compute)


def random_batch(groups: int, members: int, prompt: int, length: int, vocabulary: int) -> list[Any]:
    """Groups of responses of so many random tokens; every other one is rewarded."""
    rng = random.Random(0)

    def tokens(count: int) -> list[int]:
        return [rng.randrange(vocabulary) for _ in range(count)]

    prompts = [tokens(prompt) for _ in range(groups)]
    return [
        Sample(g, prompts[g], tokens(length), [-9.0] * length, [0] * length, float(m % 2), False)
        for g in range(groups)
        for m in range(members)
    ]


def drain(engine: Engine, requests: Iterable[Request]) -> float:
    """Submit requests, run all to their ends; return seconds."""
    started = time.perf_counter()
    for request in requests:
        engine.submit(request)
    while engine.has_work:
        engine.step()
    return time.perf_counter() - started


@contextmanager
def one_core() -> Iterator[None]:
    """Compute with one thread, on the first of the cores; afterwards all cores are there again."""
    cores = os.sched_getaffinity(0)
    torch.set_num_threads(1)
    os.sched_setaffinity(0, {min(cores)})
    try:
        yield
    finally:
        os.sched_setaffinity(0, cores)
