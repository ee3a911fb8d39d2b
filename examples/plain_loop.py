"""Synchronous GRPO on one page and in one process.

    python examples/plain_loop.py [RECIPE_OR_FILE] [--section.field VALUE ...]

Each step samples a group of responses to each of a few prompts, rewards them, compares every
response with the others of its group, and updates the policy once. One model serves the engine and
the training step. `rhymeflow train --schedule synchronous` does the same with parallel processes,
and has the same responses and losses: tests compare both with a reference that uses transformers
only.
"""

from __future__ import annotations

import asyncio
import sys
from collections.abc import Callable, Iterator, Sequence
from typing import NamedTuple

import numpy as np
import torch
from torch import Tensor
from transformers import PreTrainedModel

from rhymeflow.config import Config, LearnerConfig
from rhymeflow.config.load import read_config, split_overrides
from rhymeflow.data.encode import PromptEncoder
from rhymeflow.data.load import load_prompts
from rhymeflow.data.prompts import Prompt
from rhymeflow.data.stream import PromptStream
from rhymeflow.engine.base import NoiseKey, Request, Sampling
from rhymeflow.engine.native.engine import Engine
from rhymeflow.learner.algorithms.advantages import group_advantages
from rhymeflow.learner.algorithms.surrogates import MOST_LOG_RATIO
from rhymeflow.learner.logprobs import TokenScorer
from rhymeflow.learner.optimizer import Optimizer, learning_rate
from rhymeflow.learner.packing import PackedRow, pack
from rhymeflow.learner.sample import Sample
from rhymeflow.models.load import load_model, resolve_dtype, stop_token_ids
from rhymeflow.models.precision import resolve_device
from rhymeflow.models.tokenizer import load_tokenizer
from rhymeflow.reward.functions import Judge
from rhymeflow.reward.messages import RewardRequest, TrainerState
from rhymeflow.utils.consecutive_failures import ConsecutiveFailures


class Step(NamedTuple):
    """What one step did."""

    batch: list[Sample]
    loss: float
    grad_norm: float

    @property
    def reward(self) -> float:
        """The mean over the batch."""
        return sum(sample.reward for sample in self.batch) / len(self.batch)


def train(config: Config) -> Iterator[Step]:
    """Run the loop; yield each step once the policy has been updated."""
    seed, learner, rollout = config.run.seed, config.learner, config.rollout
    device = resolve_device(config.model)
    model = load_model(config.model, dtype=torch.float32, device=device)
    tokenizer = load_tokenizer(config.model)
    # The optimizer keeps float32 master weights and brings the model to the compute precision.
    optimizer = Optimizer(model, learner, resolve_dtype(config.model, device))
    limit = "learner.max_skipped_steps"
    skips = ConsecutiveFailures(learner.max_skipped_steps, limit, "steps")
    scorer = TokenScorer(model, rollout, learner.logits_chunk_size)
    engine, sampling = rollout_engine(model, stop_token_ids(model, tokenizer), config)
    prompts = PromptStream(load_prompts(config.data, seed)[0], seed, config.data.shuffle)
    encoder = PromptEncoder(tokenizer, config.data)
    rewards_of = rewards(config)

    for step in range(learner.max_steps):
        # 1. Sample a group of responses to each prompt. The noise key makes sampling repeatable.
        first = step * learner.groups_per_batch
        groups = {n: prompts.at(n) for n in range(first, first + learner.groups_per_batch)}
        requests = [
            Request((group, i), encoder.encode(prompt), NoiseKey(prompt.row, epoch, i), sampling)
            for group, (epoch, prompt) in groups.items()
            for i in range(rollout.num_generations)
        ]
        generate(engine, requests)

        # 2. Reward them, group by group: a reward function may compare responses.
        batch = []
        for group, (_, prompt) in groups.items():
            members = [each for each in requests if each.id[0] == group]
            texts = [tokenizer.decode(each.tokens, skip_special_tokens=True) for each in members]
            found = rewards_of(step, prompt, texts, [each.tokens for each in members])
            batch += [
                sample(each, step, reward) for each, reward in zip(members, found, strict=True)
            ]

        # 3. A response's advantage is its reward compared with the rest of its group.
        reward_N, group_N = [each.reward for each in batch], [each.group for each in batch]
        advantage_N = group_advantages(reward_N, group_N, learner.scale_rewards).values

        # 4. Accumulate the gradient over packed rows, then take one optimizer step.
        loss = 0.0
        for row in pack(batch, range(len(batch)), learner.max_tokens_per_microbatch):
            loss_of = clipped_objective(batch, row, advantage_N, learner)
            logprob_R, _ = scorer.backward(row, loss_of)
            loss += loss_of(logprob_R, slice(None)).item()
        grad_norm = optimizer.step(learning_rate(step, learner))
        skips.count(optimizer.skipped or None)  # a gradient that is not finite changed nothing

        # 5. The engine samples from the new weights.
        engine.set_version(step + 1, keep_cache=False)
        yield Step(batch, loss, grad_norm)


def rollout_engine(
    model: PreTrainedModel, stop_token_ids: frozenset[int], config: Config
) -> tuple[Engine, Sampling]:
    """The engine over this model, and how it is to sample."""
    rollout = config.rollout
    engine = Engine(
        model,
        seed=config.run.seed,
        max_num_seqs=rollout.max_num_seqs,
        max_prefill_tokens=rollout.max_prefill_tokens,
        instance="engine",
        version=0,
    )
    sampling = Sampling(
        temperature=rollout.temperature,
        top_p=rollout.top_p,
        top_k=rollout.top_k,
        max_new_tokens=rollout.max_completion_length,
        stop_token_ids=stop_token_ids,
    )
    return engine, sampling


def generate(engine: Engine, requests: Sequence[Request]) -> None:
    """Complete all requests with continuous batching; the engine appends to their tokens."""
    for request in requests:
        engine.submit(request)
    while engine.has_work:
        engine.step()


def sample(response: Request, step: int, reward: float) -> Sample:
    """A response as the learner sees it."""
    return Sample(
        group=response.id[0],
        prompt_ids=response.prompt_ids,
        completion_ids=response.tokens,
        logprobs=response.logprobs,
        versions=[step] * len(response.tokens),
        reward=reward,
        truncated=response.finish_reason() == "length",
    )


def rewards(config: Config) -> Callable[[int, Prompt, list[str], list[list[int]]], list[float]]:
    """The weighted sum of the configured reward functions, called in this process."""
    judges = [(each, Judge(each)) for each in config.reward.functions]
    runner = asyncio.Runner()

    def rewards_of(
        step: int, prompt: Prompt, texts: list[str], tokens: list[list[int]]
    ) -> list[float]:
        state = TrainerState(step, config.learner.max_steps)
        sums = [0.0] * len(texts)
        for function, judge in judges:
            size = len(texts) if function.per == "group" else 1
            for at in range(0, len(texts), size):
                part = slice(at, at + size)
                request = RewardRequest(
                    prompt.prompt, texts[part], tokens[part], prompt.columns, state
                )
                for i, value in enumerate(judge(request, runner), start=at):
                    sums[i] += function.weight * (value or 0.0)  # None: it does not apply
        return sums

    return rewards_of


def clipped_objective(
    batch: Sequence[Sample], row: PackedRow, advantage_N: np.ndarray, learner: LearnerConfig
) -> Callable[[Tensor, slice], Tensor]:
    """GRPO's loss of some of a row's tokens: PPO's clipped objective, over the batch's tokens."""
    low, high = 1 - learner.epsilon, 1 + (learner.epsilon_high or learner.epsilon)
    num_tokens = sum(len(sample.completion_ids) for sample in batch)
    members = list(row.members)
    advantage_R = torch.tensor(np.repeat(advantage_N[members], row.lengths), dtype=torch.float32)
    old_R = torch.tensor(np.concatenate([batch[i].logprobs for i in members]), dtype=torch.float32)

    def loss_of(logprob_C: Tensor, chunk: slice) -> Tensor:
        advantage_C = advantage_R[chunk].to(logprob_C.device)
        log_ratio_C = logprob_C - old_R[chunk].to(logprob_C.device)
        ratio_C = log_ratio_C.clamp(-MOST_LOG_RATIO, MOST_LOG_RATIO).exp()
        clipped_C = ratio_C.clamp(low, high)
        return -torch.minimum(ratio_C * advantage_C, clipped_C * advantage_C).sum() / num_tokens

    return loss_of


def main() -> None:
    """Train a recipe, the demo by default, and print each step."""
    rest, overrides = split_overrides(sys.argv[1:])
    config = read_config(rest[0] if rest else "demo", overrides)
    for number, step in enumerate(train(config), start=1):
        print(
            f"step {number:3}  reward {step.reward:.3f}  loss {step.loss:+.4f}  "
            f"gradient norm {step.grad_norm:.3f}",
            flush=True,
        )


if __name__ == "__main__":
    main()
