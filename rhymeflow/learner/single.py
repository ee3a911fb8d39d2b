"""The learner: a batch of trajectories in, the next version of the policy out.

Holds true: `train` consumes one batch and makes one version, whatever `num_iterations` and
`num_minibatches` are; the loss is that of the whole optimizer step however it is cut into
micro-batches; a saved learner, restored, continues with the same numbers. Knows nothing of the
staleness protocol, processes or where batches come from: it trains on what it is given.
"""

from __future__ import annotations

import copy
import time
from collections.abc import Sequence
from pathlib import Path

import torch
from torch import Tensor
from transformers import PreTrainedModel, PreTrainedTokenizerBase

from rhymeflow.config import LearnerConfig, RolloutConfig
from rhymeflow.learner import checkpoint
from rhymeflow.learner.algorithms.advantages import group_advantages
from rhymeflow.learner.algorithms.losses import (
    diagnose,
    diagnosis_names,
    mismatch,
    token_losses,
)
from rhymeflow.learner.logprobs import TokenScorer
from rhymeflow.learner.metrics import Totals, batch_metrics
from rhymeflow.learner.minibatch import MicroBatch, split
from rhymeflow.learner.optimizer import Optimizer, learning_rate
from rhymeflow.learner.recomputation import recompute_layers
from rhymeflow.learner.sample import Sample
from rhymeflow.learner.token_details import TokenDetails


class Learner:
    """Trains `model` by `learner`'s objective on responses sampled as `rollout` says.

    `model` attends through `models.attention`; give it in float32 where the weights exist in
    float32, so that the masters are exact. It is taken over: its parameters are brought to
    `compute_dtype` and change with every step. `tokenizer`, if given, goes into checkpoints.
    """

    def __init__(
        self,
        model: PreTrainedModel,
        tokenizer: PreTrainedTokenizerBase | None,
        learner: LearnerConfig,
        rollout: RolloutConfig,
        compute_dtype: torch.dtype,
    ) -> None:
        self.model = model.eval()
        self.version = 0
        self.num_tokens = 0
        self._tokenizer = tokenizer
        self._config, self._rollout = learner, rollout
        self._optimizer = Optimizer(model, learner, compute_dtype)
        self._policy = TokenScorer(model, rollout, learner.logits_chunk_size)
        self._policy.check_head()
        self._reference: TokenScorer | None = None
        if learner.beta > 0.0:
            frozen = copy.deepcopy(model).requires_grad_(False)
            self._reference = TokenScorer(frozen, rollout, learner.logits_chunk_size)
        if learner.gradient_checkpointing:
            recompute_layers(model)

    def reconfigure(self, learner: LearnerConfig) -> None:
        """Train by another configuration from now on.

        Its `beta` and `gradient_checkpointing` stay what the learner was made with.
        """
        self._config = learner
        self._optimizer.reconfigure(learner)

    def train(
        self, batch: Sequence[Sample], step: int, details: TokenDetails | None = None
    ) -> dict[str, float]:
        """Consume one batch as version `step`, making version `step + 1`; return the metrics.

        `details`, if given, is of this batch and is filled in.

        Raises `UserError` if a gradient is not finite; the version's weights are kept then.
        """
        started = time.perf_counter()
        config = self._config
        advantages = group_advantages(
            [sample.reward for sample in batch],
            [sample.group for sample in batch],
            config.scale_rewards,
        )
        minibatches = split(batch, advantages.values, config, self._rollout, self.model.device)
        totals = Totals(diagnosis_names(config))
        self._score_fixed_policies(minibatches)
        rate = learning_rate(step, config)
        for iteration in range(config.num_iterations):
            for minibatch in minibatches:
                for micro in minibatch:
                    self._accumulate(micro, totals, details, is_first_pass=iteration == 0)
                totals.add_step(self._optimizer.step(rate))
        self.version = step + 1
        self.num_tokens += sum(len(s.prompt_ids) + len(s.completion_ids) for s in batch)
        return {
            **totals.means(),
            **batch_metrics(batch),
            "frac_reward_zero_std": advantages.frac_zero_std,
            "learning_rate": rate,
            "num_tokens": float(self.num_tokens),
            "step_time": time.perf_counter() - started,
        }

    def weights(self) -> dict[str, Tensor]:
        """The policy's parameters in compute precision by name, tied ones once.

        They are the live tensors: copy them before the next `train`.
        """
        return {name: p.detach() for name, p in self.model.named_parameters()}

    def snapshot(self) -> checkpoint.Snapshot:
        """A copy of all that a checkpoint holds: a Hugging Face model and what `restore` needs."""
        state = {
            "optimizer": self._optimizer.state_dict(),
            "version": self.version,
            "num_tokens": self.num_tokens,
        }
        return checkpoint.snapshot(self.model, self._tokenizer, state)

    def save(self, directory: Path) -> None:
        """Write a checkpoint.

        The directory appears in one rename, complete; one that is there is replaced.
        """
        self.snapshot().write(directory)

    def restore(self, directory: Path) -> int:
        """Continue from what `save` wrote; return the version.

        The reference model, if there is one, stays what the learner was made with.
        """
        state = checkpoint.load(directory, self.model.device)
        self._optimizer.load_state_dict(state["optimizer"])
        self.version, self.num_tokens = state["version"], state["num_tokens"]
        return self.version

    def _score_fixed_policies(self, minibatches: list[list[MicroBatch]]) -> None:
        """Log-probabilities of the proximal policy, where it is not the policy itself, and of the
        reference, where there is one.
        """
        config = self._config
        is_one_step = config.num_iterations == 1 and len(minibatches) == 1
        needs_proximal = config.off_policy_correction != "none" and not is_one_step
        for minibatch in minibatches:
            for micro in minibatch:
                if needs_proximal:
                    proximal_R, _ = self._policy.score(micro.row)
                    micro.inputs = micro.inputs.with_(proximal_R=proximal_R)
                if self._reference is not None:
                    reference_R, _ = self._reference.score(micro.row)
                    micro.inputs = micro.inputs.with_(reference_R=reference_R)

    def _accumulate(
        self,
        micro: MicroBatch,
        totals: Totals,
        details: TokenDetails | None,
        *,
        is_first_pass: bool,
    ) -> None:
        """Add one micro-batch's gradient to the step's, and its numbers to the totals."""
        config, inputs = self._config, micro.inputs

        def loss_of(logprob_C: Tensor, chunk: slice) -> Tensor:
            some = inputs[chunk]
            return (token_losses(logprob_C, some, config) * some.weight_R).sum()

        if micro.needs_grad:
            logprob_R, entropy_R = self._policy.backward(micro.row, loss_of)
        else:
            logprob_R, entropy_R = self._policy.score(micro.row)
        num_tokens = len(micro.row.targets_R)
        totals.add(diagnose(logprob_R, entropy_R, inputs, config), num_tokens)
        if is_first_pass:
            current_R = logprob_R if inputs.proximal_R is None else inputs.proximal_R
            totals.add_mismatch(*mismatch(current_R, inputs.behaviour_R), num_tokens)
            if details is not None:
                details.add_logprobs(micro.row, current_R)
        if details is not None:
            details.add_flags(micro, logprob_R)


__all__ = ["Learner"]
