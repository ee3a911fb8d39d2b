"""A model that scores response tokens, whole on one rank or spread over many by FSDP2.

Spread over ranks, a layer's parameters are gathered before it computes and let go after it; those
outside the layers (embeddings, last norm, head) are gathered for the whole pass. FSDP does so in
hooks of modules, so all that computes with the model runs inside `Shards`: `head.weight` elsewhere
is a rank's rows. Source: ZeRO-3 (arXiv 1910.02054, section 5.3).
"""

from __future__ import annotations

from collections.abc import Callable
from typing import TypeVar

import torch
from torch import Tensor, nn
from torch.distributed.fsdp import (
    CPUOffloadPolicy,
    FSDPModule,
    MixedPrecisionPolicy,
    OffloadPolicy,
    fully_shard,
)
from transformers import PreTrainedModel

from rhymeflow.config import LearnerConfig, RolloutConfig
from rhymeflow.errors import UserError
from rhymeflow.learner.attention import FlexAttention, PackedAttention
from rhymeflow.learner.cpu_attention import CpuPackedAttention, serves
from rhymeflow.learner.logprobs import AttentionKind, LossOf, TokenScorer
from rhymeflow.learner.packing import PackedRow
from rhymeflow.learner.ranks import Ranks, layers_of
from rhymeflow.models import proof
from rhymeflow.models.attention import Shape

T = TypeVar("T")


class Policy:
    """Scores under `model`, whose parameters are spread if there are `shards`.

    What is computed is proved against the model itself.
    """

    def __init__(
        self,
        model: PreTrainedModel,
        rollout: RolloutConfig,
        learner: LearnerConfig,
        shards: Shards | None = None,
    ) -> None:
        self.model, self._shards = model.eval(), shards
        own = self._without_gradient(lambda: proof.own(model, proof.sequences(model)))
        attention, chunk = attention_kind(learner, model), learner.logits_chunk_size
        self._scorer = TokenScorer(model, rollout, chunk, attention)
        self._without_gradient(lambda: self._scorer.prove(own))

    def score(self, row: PackedRow) -> tuple[Tensor, Tensor]:
        """Log-probability and entropy of each response token."""
        return self._without_gradient(lambda: self._scorer.score(row))

    def backward(self, row: PackedRow, loss_of: LossOf) -> tuple[Tensor, Tensor]:
        """The same, and add the gradient of the row's loss to the model's parameters."""
        if self._shards is None:
            return self._scorer.backward(row, loss_of)
        loss, logprob_R, entropy_R = self._shards(lambda: self._scorer.loss(row, loss_of))
        loss.backward()
        return logprob_R, entropy_R

    def _without_gradient(self, work: Callable[[], T]) -> T:
        if self._shards is None:
            return work()
        with torch.no_grad():
            result = self._shards(work)
        self._shards.reshard()
        return result


def attention_kind(learner: LearnerConfig, model: PreTrainedModel) -> AttentionKind:
    """What `learner.attention` is on this model's device; all give the same but for rounding."""
    check_attention(learner, model.device)
    if learner.attention == "flex":
        return FlexAttention
    head_dim = Shape.of(model.config).head_dim
    is_compiled = serves(model.device, model.dtype, head_dim)
    return CpuPackedAttention if learner.attention == "auto" and is_compiled else PackedAttention


def check_attention(learner: LearnerConfig, device: torch.device) -> None:
    """Raise `UserError` if the learner's attention has no backward pass on this device."""
    if learner.attention == "flex" and device.type == "cpu":
        raise UserError(
            "learner.attention = 'flex' needs a GPU (PyTorch's FlexAttention has no backward pass "
            "on CPUs); leave it out, or use 'auto'"
        )


class Shards:
    """The parameters of `model`, of which every rank keeps its rows in float32.

    They have their values on every rank, or memory that was never touched: `read` then returns rows
    of one by its name. Gradients are summed over ranks, not averaged: the losses of ranks are parts
    of one sum. Every rank has to make the same calls.
    """

    def __init__(
        self,
        model: PreTrainedModel,
        ranks: Ranks,
        compute_dtype: torch.dtype,
        *,
        offload: bool,
        read: Callable[[str, slice], Tensor] | None,
    ) -> None:
        layers = layers_of(model)
        if not layers:
            raise UserError(
                f"learner.num_ranks = {ranks.count}: a model of type "
                f"{model.config.model_type!r} has no layers that can be spread over ranks"
            )
        is_exact = compute_dtype == torch.float32
        precision = MixedPrecisionPolicy(
            param_dtype=None if is_exact else compute_dtype,
            reduce_dtype=None if is_exact else torch.float32,
        )
        assert ranks.device is not None
        # On CPUs there is nothing to bring away, and nothing to pin.
        is_away = offload and ranks.device.type == "cuda"
        away = CPUOffloadPolicy() if is_away else OffloadPolicy()
        self._root = _Inside(model)
        for module in (*layers, self._root):
            fully_shard(module, mesh=ranks.mesh, mp_policy=precision, offload_policy=away)
        for module in self._root.modules():
            if isinstance(module, FSDPModule):
                module.set_gradient_divide_factor(1.0)
                module.set_force_sum_reduction_for_comms(True)  # gloo has no sum with a factor
        for name, parameter in model.named_parameters():
            if read is not None and (local := ranks.local(parameter)).numel():
                local.copy_(read(name, ranks.rows(parameter.shape[0])))

    def __call__(self, work: Callable[[], T]) -> T:
        """Return what `work` returns, which computes with the model."""
        result: T = self._root(work)
        return result

    def reshard(self) -> None:
        """Let go of what a pass without a backward pass has left gathered: the next pass would take
        it for the weights of then."""
        assert isinstance(self._root, FSDPModule)
        self._root.reshard()


class _Inside(nn.Module):
    def __init__(self, model: PreTrainedModel) -> None:
        super().__init__()
        self.model = model

    def forward(self, work: Callable[[], T]) -> T:
        """Return what `work` returns; its tensors may carry gradient."""
        return work()
