"""The learner of one process, which holds the whole model.

Holds true: what `step.LearnerStep` does; a saved learner, restored, continues with the same
numbers. Knows nothing of the staleness protocol, processes or where batches come from: it trains on
what it is given.
"""

from __future__ import annotations

import copy
from pathlib import Path

import torch
from torch import Tensor
from transformers import PreTrainedModel, PreTrainedTokenizerBase

from rhymeflow.config import LearnerConfig, RolloutConfig
from rhymeflow.learner import checkpoint
from rhymeflow.learner.fused import fuse
from rhymeflow.learner.logprobs import TokenScorer
from rhymeflow.learner.optimizer import Optimizer
from rhymeflow.learner.recomputation import recompute_layers
from rhymeflow.learner.step import LearnerStep
from rhymeflow.models import proof


class Learner(LearnerStep):
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
        self.skipped = {}
        self._tokenizer = tokenizer
        self._config, self._rollout, self._device = learner, rollout, model.device
        self._optimizer = Optimizer(model, learner, compute_dtype)
        self._policy = proved(model, rollout, learner)
        self._reference: TokenScorer | None = None
        if learner.beta > 0.0:
            frozen = copy.deepcopy(model).requires_grad_(False)
            self._reference = TokenScorer.of(frozen, rollout, learner)
        if learner.gradient_checkpointing:
            recompute_layers(model)

    @property
    def num_parameters(self) -> int:
        """Tied ones once."""
        return sum(each.numel() for each in self.model.parameters())

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


def proved(model: PreTrainedModel, rollout: RolloutConfig, learner: LearnerConfig) -> TokenScorer:
    """The scorer of `model`, whose layers are fused, once it is proved against the model itself.

    Raises:
        UserError: it computes something else.
    """
    own = proof.own(model, proof.sequences(model))
    fuse(model)
    scorer = TokenScorer.of(model, rollout, learner)
    scorer.prove(own)
    return scorer


__all__ = ["Learner", "proved"]
