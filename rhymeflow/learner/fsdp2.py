"""The learner of many ranks: each holds its rows of the model and computes its share of a batch.

Every rank reads the same batch and makes the same calls; rank 0's metrics are those of the whole.

Holds true: losses and weights are those of `single.Learner`, up to the order of sums; no rank holds
more of the model than its rows and a layer (the embeddings count as one) while it trains, gathers
or saves. Knows nothing of the staleness protocol or of where batches come from.

Context parallelism (one sequence over several ranks) is not there: the longest response must fit on
one rank.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from pathlib import Path

import numpy as np
import torch
from torch import Tensor
from transformers import PreTrainedModel, PreTrainedTokenizerBase

from rhymeflow.config import LearnerConfig, RolloutConfig
from rhymeflow.learner import sharded_checkpoint
from rhymeflow.learner.gathering import Gathering
from rhymeflow.learner.logprobs import TokenScorer
from rhymeflow.learner.metrics import Totals
from rhymeflow.learner.minibatch import MicroBatch, split
from rhymeflow.learner.optimizer import freeze
from rhymeflow.learner.ranks import Ranks
from rhymeflow.learner.recomputation import recompute_layers
from rhymeflow.learner.sample import Sample
from rhymeflow.learner.sharded_checkpoint import ShardedSnapshot
from rhymeflow.learner.sharded_model import ShardedModel, ShardedScorer
from rhymeflow.learner.sharded_optimizer import ShardedOptimizer
from rhymeflow.learner.step import LearnerStep
from rhymeflow.learner.token_details import TokenDetails


class ShardedLearner(LearnerStep):
    """One rank's part of a learner; see `single.Learner`.

    `load` returns the model with float32 parameters, each time another one: the policy, and the
    reference where there is one. All its methods are collectives.
    """

    def __init__(
        self,
        load: Callable[[], PreTrainedModel],
        tokenizer: PreTrainedTokenizerBase | None,
        learner: LearnerConfig,
        rollout: RolloutConfig,
        compute_dtype: torch.dtype,
        ranks: Ranks,
        *,
        read: Callable[[str, slice], Tensor] | None = None,
    ) -> None:
        """`read`: rows of a parameter by its name, if what `load` returns has none yet."""
        self.version = 0
        self.num_tokens = 0
        self.skipped = {}
        self._tokenizer, self._ranks, self._device = tokenizer, ranks, ranks.device
        self._config, self._rollout, self.compute_dtype = learner, rollout, compute_dtype

        def sharded() -> ShardedModel:
            offload = learner.offload_optimizer
            model = load()
            freeze(model, learner.frozen_parameters)
            found = ShardedModel(model, ranks, compute_dtype, offload=offload)
            if read is not None:
                found.fill(read)
            return found

        def scorer(of: ShardedModel) -> ShardedScorer:
            found = ShardedScorer(of, TokenScorer.of(of.model, rollout, learner))
            found.prove()
            return found

        self._sharded = sharded()
        self._policy = scorer(self._sharded)
        self._optimizer = ShardedOptimizer(self._sharded, learner)
        self._reference = scorer(sharded()) if learner.beta > 0.0 else None
        if learner.gradient_checkpointing:
            recompute_layers(self._sharded.model)

    @property
    def model(self) -> PreTrainedModel:
        """For its configuration; its parameters are shards."""
        return self._sharded.model

    @property
    def num_parameters(self) -> int:
        """Of the whole model, tied ones once."""
        return sum(each.numel() for each in self._sharded.parameters.values())

    def gathering(self) -> Gathering:
        """The policy's parameters in compute precision, to be gathered before the next `train`."""
        sharded = self._sharded
        shapes = {name: tuple(each.shape) for name, each in sharded.parameters.items()}
        return Gathering(shapes, sharded.blocks(), sharded.shard, self.compute_dtype, self._ranks)

    def snapshot(self) -> ShardedSnapshot:
        """A copy of this rank's rows of all that a checkpoint holds."""
        progress = {
            "version": self.version,
            "num_tokens": self.num_tokens,
            "optimizer_steps": self._optimizer.num_steps,
        }
        return sharded_checkpoint.snapshot(
            self._sharded, self._optimizer, self._tokenizer, progress, self._ranks
        )

    def save(self, directory: Path) -> None:
        """Write a checkpoint, complete or not at all; see `single.Learner.save`."""
        self.snapshot().write(directory)

    def restore(self, directory: Path) -> int:
        """Continue from what any number of ranks saved; return the version."""
        progress = sharded_checkpoint.load(directory, self._sharded, self._optimizer)
        self.version, self.num_tokens = progress["version"], progress["num_tokens"]
        return self.version

    def whole_details(self, details: TokenDetails) -> TokenDetails:
        """On rank 0, what all ranks found; elsewhere what was given."""
        parts = self._ranks.gathered(details)
        return TokenDetails.merged(parts) if parts else details

    def _split(self, batch: Sequence[Sample], advantage_N: np.ndarray) -> list[list[MicroBatch]]:
        ranks = self._ranks
        return split(
            batch,
            advantage_N,
            self._config,
            self._device,
            rank=ranks.rank,
            num_ranks=ranks.count,
        )

    def _whole(self, totals: Totals) -> Totals:
        parts = self._ranks.gathered(totals.collapsed())
        return Totals.merged(parts) if parts else totals


__all__ = ["ShardedLearner"]
