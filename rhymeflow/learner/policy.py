"""Builds the scorer of a policy or reference, whose model is on one rank or sharded by FSDP2.

When sharded, a layer's parameters are gathered before it computes and freed after it; those outside
the layers (embeddings, last norm, head) are gathered for the whole pass. FSDP does this in module
hooks, so all that computes with the model must run inside `Shards`: outside, `head.weight` has only
a rank's rows. Source: ZeRO-3 (arXiv 1910.02054, section 5.3)."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

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
from rhymeflow.learner.logprobs import AttentionKind, TokenScorer, call_directly
from rhymeflow.learner.ranks import Ranks, layers_of
from rhymeflow.models.attention import Shape
from rhymeflow.models.lora import versioned


def proved_scorer(
    model: PreTrainedModel,
    rollout: RolloutConfig,
    learner: LearnerConfig,
    shards: Shards | None = None,
) -> TokenScorer:
    """Return a scorer of `model`, which is inside `shards` if it is sharded. Raises `UserError` if
    its log-probabilities are not the model's own."""
    attention, chunk = attention_kind(learner, model), learner.logits_chunk_size
    forward = call_directly if shards is None else shards.run
    scorer = TokenScorer(model.eval(), rollout, chunk, attention, forward)
    scorer.prove()
    return scorer


def attention_kind(learner: LearnerConfig, model: PreTrainedModel) -> AttentionKind:
    """Return the attention of `learner.attention` on this model's device; all kinds compute the
    same up to rounding. Raises `UserError` as `check_attention` does."""
    check_attention(learner, model.device)
    if learner.attention == "flex":
        return FlexAttention
    if learner.attention == "sdpa":
        return PackedAttention
    if model.device.type == "cuda" and getattr(
        model.config.get_text_config(), "attn_logit_softcapping", None
    ):
        return FlexAttention  # SDPA has no cap, and without it all scores would be kept
    head_dim = Shape.of(model.config).head_dim
    return CpuPackedAttention if serves(model.device, model.dtype, head_dim) else PackedAttention


def check_attention(learner: LearnerConfig, device: torch.device) -> None:
    """Raise `UserError` if the learner's attention has no backward pass on this device."""
    if learner.attention == "flex" and device.type == "cpu":
        raise UserError(
            "learner.attention = 'flex' needs a GPU (PyTorch's FlexAttention has no backward pass "
            "on CPUs); leave it out, or use 'auto'"
        )


class Shards(nn.Module):
    """FSDP's root module: every rank keeps its rows of `model`'s parameters.

    They are in float32, what is under an adapter in `compute_dtype`. `read`, given if parameters
    have no values yet, returns rows of one by its name. Gradients are summed over ranks, not
    averaged: ranks' losses are parts of one sum. Methods are collectives."""

    reshard: Callable[[], None]  # FSDP's: frees gathered parameters

    def __init__(
        self,
        model: PreTrainedModel,
        ranks: Ranks,
        compute_dtype: torch.dtype,
        *,
        offload: bool,
        read: Callable[[str, slice], Tensor] | None,
    ) -> None:
        super().__init__()
        self.model = model
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
        trained = versioned(model)
        for name, each in model.named_parameters():
            each.data = each.data.to(torch.float32 if name in trained else compute_dtype)
        # On CPUs there is nothing to offload, and nothing to pin.
        offloads = offload and ranks.device.type == "cuda"
        policy = CPUOffloadPolicy() if offloads else OffloadPolicy()
        for module in (*layers, self):
            fully_shard(module, mesh=ranks.mesh, mp_policy=precision, offload_policy=policy)
        for module in self.modules():
            if isinstance(module, FSDPModule):
                module.set_gradient_divide_factor(1.0)
                module.set_force_sum_reduction_for_comms(True)  # gloo has no sum with a factor
        for name, parameter in model.named_parameters():
            if read is not None and (local := ranks.local(parameter)).numel():
                local.copy_(read(name, ranks.rows(parameter.shape[0])))

    def run(self, work: Callable[[], Any]) -> Any:
        """Call `work`, which computes with the model; return its result, with its gradient."""
        result = self(work)
        if not torch.is_grad_enabled():
            self.reshard()  # else the next pass would use outdated weights
        return result

    def forward(self, work: Callable[[], Any]) -> Any:
        """See `run`."""
        return work()
