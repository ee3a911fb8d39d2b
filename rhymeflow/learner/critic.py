"""PPO's critic: a second model, trained beside the policy, that estimates what a token's state is
worth.

It has the policy's architecture and first weights, and in place of the head one output, which
begins at 0. A token's value is that of the tokens before it. It is trained on the policy's
micro-batches, by the same optimizer steps, and all of its weights are.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn
from transformers import PreTrainedModel

from rhymeflow.config import LearnerConfig, RolloutConfig
from rhymeflow.learner.algorithms.gae import Estimates, estimates, token_rewards, value_losses
from rhymeflow.learner.logprobs import TokenScorer, call_directly, recompute_layers
from rhymeflow.learner.minibatch import MicroBatch
from rhymeflow.learner.optimizer import Optimizer, learning_rate
from rhymeflow.learner.packing import PackedRow
from rhymeflow.learner.policy import Shards, attention_kind
from rhymeflow.learner.ranks import Ranks
from rhymeflow.learner.sample import Sample, owners
from rhymeflow.learner.scoring import Scoring


class Critic:
    """Estimates the values of a batch's tokens, and learns them.

    It owns `model`, whose head it replaces; `read` is as in `Learner`, and its passes are counted
    in `charged`. With several ranks methods are collectives.
    """

    def __init__(
        self,
        model: PreTrainedModel,
        learner: LearnerConfig,
        rollout: RolloutConfig,
        compute_dtype: torch.dtype,
        ranks: Ranks,
        read: Callable[[str, slice], Tensor] | None,
        charged: Counter[str],
    ) -> None:
        name = _give_value_head(model)

        def rows(parameter: str, chosen: slice) -> Tensor:
            assert read is not None
            return torch.zeros(1) if parameter == name else read(parameter, chosen)

        forward, filled = call_directly, None if read is None else rows
        if ranks.count > 1:
            offload = learner.offload_optimizer
            forward = Shards(model, ranks, compute_dtype, offload=offload, read=filled).run
        self.num_parameters = sum(each.numel() for each in model.parameters())
        self.optimizer = Optimizer(model, learner, compute_dtype, ranks)
        attention, chunk = attention_kind(learner, model), learner.logits_chunk_size
        self._scorer = TokenScorer(model.eval(), rollout, chunk, attention, forward, charged)
        self._batch = Estimates([], [], [])
        self._norms: list[float] = []
        if learner.gradient_checkpointing:
            recompute_layers(model)

    def advantages(
        self,
        batch: Sequence[Sample],
        reward_N: np.ndarray,
        penalties: Sequence[np.ndarray] | None,
        scoring: Scoring,
        config: LearnerConfig,
    ) -> list[np.ndarray]:
        """Estimate the values of the batch that is trained on next; return the advantages of each
        sample's tokens in the loss, of their `token_rewards`. `reward_N`: of responses."""
        with torch.no_grad():
            values = scoring.per_token(batch, config, self._values)
        owner_S = owners(batch)
        rewards = token_rewards(reward_N, penalties, values, owner_S)
        self._batch, self._norms = estimates(rewards, values, config, owner_S), []
        return self._batch.advantages

    def add_gradient(self, micro: MicroBatch, config: LearnerConfig) -> dict[str, Tensor]:
        """Add a micro-batch's gradient to the parameters; return sums over tokens, by metric."""
        value_R = self._values(micro.row)
        old_R, return_R = (
            self._of(micro, each).to(value_R) for each in (self._batch.values, self._batch.returns)
        )
        loss_R, is_clipped_R = value_losses(value_R, old_R, return_R, config)
        (loss_R * micro.inputs.weight_R).sum().backward()
        return {"value/loss": loss_R.detach().sum(), "value/clip_ratio": is_clipped_R.sum()}

    def measure(self, scale: float) -> str:
        """Take up the gradient times `scale` for `step`; return why no step can be taken, or ""."""
        self._norms.append(self.optimizer.measure(scale))
        problem = self.optimizer.skipped
        return f"of the critic: {problem}" if problem else ""

    def step(self, version: int, config: LearnerConfig) -> None:
        """Apply the gradient of `measure`, in the training step of this number."""
        self.optimizer.apply(learning_rate(version, config, config.critic_learning_rate))

    def metrics(self) -> dict[str, float]:
        """Return what is known of the batch, beside the means over its tokens."""
        norm = sum(self._norms) / max(len(self._norms), 1)
        return {**self._batch.metrics(), "value/grad_norm": norm}

    def _values(self, row: PackedRow) -> Tensor:
        """Return the value of each token, float32 [R]."""

        def work() -> Tensor:
            head: Any = self._scorer.model.get_output_embeddings()
            hidden_RD = self._scorer.hidden(row).float()
            return nn.functional.linear(hidden_RD, head.weight.float())[:, 0]

        return self._scorer.forward(work)

    @staticmethod
    def _of(micro: MicroBatch, parts: Sequence[np.ndarray]) -> Tensor:
        if micro.is_empty:
            return torch.zeros(1)
        return torch.from_numpy(np.concatenate([parts[i] for i in micro.row.members]))


def _give_value_head(model: PreTrainedModel) -> str:
    """Give the model one output in place of the vocabulary's; return the name of its weight."""
    old: Any = model.get_output_embeddings()
    width, place = old.weight.shape[1], {"device": old.weight.device, "dtype": old.weight.dtype}
    head = nn.Linear(width, 1, bias=False, **place)
    nn.init.zeros_(head.weight)
    model.set_output_embeddings(head)
    assert model.get_output_embeddings() is head, f"{type(model).__name__} keeps its head"
    return next(name for name, each in model.named_parameters() if each is head.weight)
