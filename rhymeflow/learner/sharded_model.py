"""A model whose parameters are spread over ranks by FSDP2, each tensor by its rows.

A layer's parameters are gathered before it computes and let go after it; what is outside the layers
(embeddings, last norm, head) is gathered for the whole pass. That works through hooks of modules,
so all that computes with the model runs inside a call of `ShardedModel`: reading `head.weight`
elsewhere would give a shard.

Holds true: masters, gradients and moments are float32 shards; collectives are in the same order on
every rank as long as each makes the same calls; gradients are summed over ranks, not averaged, for
the losses of ranks are parts of one sum. Knows nothing of losses or batches.

Source: `torch.distributed.fsdp.fully_shard`; ZeRO-3 (arXiv 1910.02054, section 5.3).
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
from torch.distributed.tensor import DTensor
from transformers import PreTrainedModel
from transformers.modeling_layers import GradientCheckpointingLayer

from rhymeflow.errors import UserError
from rhymeflow.learner.fused import fuse
from rhymeflow.learner.logprobs import LossOf, TokenScorer
from rhymeflow.learner.packing import PackedRow
from rhymeflow.learner.ranks import Ranks
from rhymeflow.models import proof

T = TypeVar("T")


class _Inside(nn.Module):
    """Runs what it is given inside a forward pass, where parameters are gathered."""

    def __init__(self, model: PreTrainedModel) -> None:
        super().__init__()
        self.model = model

    def forward(self, work: Callable[[], T]) -> T:
        """Return what `work` returns; its tensors may carry gradient."""
        return work()


class ShardedModel:
    """`model`, of which every rank keeps its rows.

    `model` has its float32 parameters on every rank, or memory for them that was never touched: its
    rows are then given by `fill`. It is taken over.
    """

    def __init__(
        self, model: PreTrainedModel, ranks: Ranks, compute_dtype: torch.dtype, *, offload: bool
    ) -> None:
        self.model, self.ranks = model.eval(), ranks
        self.compute_dtype = compute_dtype
        self.layers = [
            module for module in model.modules() if isinstance(module, GradientCheckpointingLayer)
        ]
        if not self.layers:
            raise UserError(
                f"learner.num_ranks = {ranks.count}: a model of type "
                f"{model.config.model_type!r} has no layers that can be spread over ranks"
            )
        is_exact = compute_dtype == torch.float32
        precision = MixedPrecisionPolicy(
            param_dtype=None if is_exact else compute_dtype,
            reduce_dtype=None if is_exact else torch.float32,
        )
        # On CPUs there is nothing to bring away, and nothing to pin.
        away: OffloadPolicy = OffloadPolicy()
        if offload and ranks.device.type == "cuda":
            away = CPUOffloadPolicy()
        self._root = _Inside(model)
        for module in (*self.layers, self._root):
            fully_shard(module, mesh=ranks.mesh, mp_policy=precision, offload_policy=away)
        self.parameters: dict[str, DTensor] = dict(model.named_parameters())
        """The sharded float32 parameters by the model's names, tied ones once."""
        for module in self._root.modules():
            if isinstance(module, FSDPModule):
                module.set_gradient_divide_factor(1.0)
                module.set_force_sum_reduction_for_comms(True)  # gloo has no sum with a factor

    def __call__(self, work: Callable[[], T]) -> T:
        """Return what `work` returns, which computes with the model. Every rank has to call."""
        return self._root(work)

    def reshard(self) -> None:
        """Let go of what a pass without a backward pass has left gathered."""
        self._root.reshard()

    def blocks(self) -> list[list[str]]:
        """Names of parameters that are gathered at a time, in the model's order.

        Those of a layer; and each of the others by itself.
        """
        layer_of = {id(p): n for n, each in enumerate(self.layers) for p in each.parameters()}
        blocks: list[list[str]] = []
        previous = None
        for name, parameter in self.parameters.items():
            layer = layer_of.get(id(parameter))
            if layer is None or layer != previous:
                blocks.append([])
            blocks[-1].append(name)
            previous = layer
        return blocks

    def shard(self, name: str) -> Tensor:
        """This rank's rows of a parameter, in float32."""
        return self.parameters[name].detach().to_local()

    def fill(self, read: Callable[[str, slice], Tensor]) -> None:
        """Set this rank's rows: `read` returns those rows of a parameter by its name."""
        with torch.no_grad():
            for name, parameter in self.parameters.items():
                local = parameter.to_local()
                if local.numel():
                    local.copy_(read(name, self.ranks.rows(parameter.shape[0])))


class ShardedScorer:
    """A `step.Scorer` of a sharded model: its calls are collectives."""

    def __init__(self, sharded: ShardedModel, scorer: TokenScorer) -> None:
        self._sharded, self._scorer = sharded, scorer

    def score(self, row: PackedRow) -> tuple[Tensor, Tensor]:
        """See `TokenScorer.score`."""
        return self._without_gradient(lambda: self._scorer.score(row))

    def backward(self, row: PackedRow, loss_of: LossOf) -> tuple[Tensor, Tensor]:
        """See `TokenScorer.backward`."""
        loss, logprob_R, entropy_R = self._sharded(lambda: self._scorer.loss(row, loss_of))
        loss.backward()
        return logprob_R, entropy_R

    def prove(self) -> None:
        """Fuse the layers, and see `TokenScorer.prove`; before the first pass."""
        model = self._sharded.model
        own = self._without_gradient(lambda: proof.own(model, proof.sequences(model)))
        fuse(model)
        self._without_gradient(lambda: self._scorer.prove(own))

    def _without_gradient(self, work: Callable[[], T]) -> T:
        with torch.no_grad():
            result = self._sharded(work)
        self._sharded.reshard()  # else the next pass would take these for the weights of then
        return result


__all__ = ["ShardedModel", "ShardedScorer"]
