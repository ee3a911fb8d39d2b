"""Log-probabilities of response tokens under a model, without ever holding [tokens, vocabulary].

The body runs over the packed row, the head over `chunk_size` hidden states at a time. A loss is a
sum over tokens, so each chunk's is differentiated before the next chunk begins. Logits are float32,
by the engine's head (`models.lm_head`) and shaping (`models.logits`); their gradient is rounded to
the model's dtype, an error of 1 in 512 in single terms of long sums."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import dataclass, field, replace
from functools import cache, partial
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint
from transformers import PreTrainedModel
from transformers.modeling_layers import GradientCheckpointingLayer

from rhymeflow.config import RolloutConfig
from rhymeflow.learner.attention import PackedAttention
from rhymeflow.learner.packing import PackedRow, pack
from rhymeflow.learner.rectangles import Rectangles
from rhymeflow.learner.sample import Sample
from rhymeflow.models import attention as attentions
from rhymeflow.models import proof, state
from rhymeflow.models.attention import Attention, attending, body_of
from rhymeflow.models.lm_head import LMHead
from rhymeflow.models.logits import shaped

AttentionKind = Callable[[Sequence[np.ndarray], int, torch.device], Attention]
"""Builds attention from sequences (indices into a row), the row's length and the device."""

LossOf = Callable[[Tensor, slice], Tensor]
"""Returns the summed loss of a slice of a row's response tokens from their log-probabilities."""

Forward = Callable[[Callable[[], Any]], Any]
"""Calls a function that computes with the model, and returns its result."""

Logits = Callable[[slice], Tensor]
"""Returns new float32 logits [C, V] of a slice of a row's response tokens."""

GradientOf = Callable[[slice, Tensor], Tensor]
"""Returns the gradient of a further loss by a slice's shaped logits [C, V], or by the first of them
(fewer columns)."""


def call_directly(work: Callable[[], Any]) -> Any:
    """Call `work`, for a model that is whole on one rank."""
    return work()


@dataclass(frozen=True)
class TokenScorer:
    """Computes response tokens' log-probabilities under `model`, as the engine samples them."""

    model: PreTrainedModel
    rollout: RolloutConfig
    chunk_size: int
    attention: AttentionKind = PackedAttention
    forward: Forward = call_directly
    charged: Counter[str] = field(default_factory=Counter)
    """Tokens of all passes so far, by the name of their cost (`core.cost`), with gradient and
    without: of a row each prompt once, and each response in full."""

    def __post_init__(self) -> None:
        state.reset_at_boundaries(self.model)

    @torch.no_grad()
    def score(self, row: PackedRow) -> tuple[Tensor, Tensor]:
        """Return log-probability and entropy of each response token, float32 [R] each, in nats."""
        return self.forward(lambda: self._score(row))

    def backward(
        self,
        row: PackedRow,
        loss_of: LossOf,
        bonus_R: Tensor | None = None,
        gradient_of: GradientOf | None = None,
    ) -> tuple[Tensor, Tensor]:
        """Do what `score` does, and add the gradient of the row's loss to the parameters.

        `loss_of` is called once per chunk, in order, with log-probabilities that carry gradient.
        From the loss each token's entropy times `bonus_R` is subtracted; the one whose gradient is
        `gradient_of` is added."""
        outputs = self.forward(lambda: self._head_backward(row, loss_of, bonus_R, gradient_of))
        hidden_RD, gradient_RD, logprob_R, entropy_R = outputs
        hidden_RD.backward(gradient_RD)
        return logprob_R, entropy_R

    def _score(self, row: PackedRow) -> tuple[Tensor, Tensor]:
        targets_R = self._tensor(row.targets_R)
        hidden_RD, lm_head = self.hidden(row), LMHead(self.model, many_rows=True)
        scores = [
            self._head(lm_head, hidden_RD[chunk], targets_R[chunk]) for chunk in self._chunks(row)
        ]
        return _cat(scores)

    def _head_backward(
        self,
        row: PackedRow,
        loss_of: LossOf,
        bonus_R: Tensor | None,
        gradient_of: GradientOf | None,
    ) -> tuple[Tensor, Tensor, Tensor, Tensor]:
        """Return the body's output [R, D], the loss's gradient by it, and the scores. Gradients of
        a bfloat16 head are added up over chunks in float32 and rounded once."""
        targets_R = self._tensor(row.targets_R)
        # Also for a frozen body: FSDP ends a pass when the gradient reaches the pass's output.
        hidden_RD, lm_head = self.hidden(row).requires_grad_(), LMHead(self.model, many_rows=True)
        scores, gradients, float_sums = [], [], dict[nn.Parameter, Tensor]()
        for chunk in self._chunks(row):
            leaf_CD = hidden_RD[chunk].detach().requires_grad_()
            further = None if gradient_of is None else partial(gradient_of, chunk)
            logprob_C, entropy_C = self._head(lm_head, leaf_CD, targets_R[chunk], further)
            loss = loss_of(logprob_C, chunk)
            if bonus_R is not None:
                loss = loss - (bonus_R[chunk] * entropy_C).sum()
            loss.backward()
            assert leaf_CD.grad is not None
            gradients.append(leaf_CD.grad)
            scores.append((logprob_C.detach(), entropy_C.detach()))
            for each in self.model.get_output_embeddings().parameters():
                if each.grad is not None and each.dtype.itemsize < 4:
                    if each in float_sums:
                        float_sums[each].add_(each.grad)
                    else:
                        float_sums[each] = each.grad.float()
                    each.grad = None
        for each, total in float_sums.items():
            each.grad = total.to(each.dtype)
        return hidden_RD, torch.cat(gradients), *_cat(scores)

    @torch.no_grad()
    def prove(self) -> None:
        """Raise `UserError` unless the scores are the model's own; see `models/proof.py`."""
        self.forward(self._prove)

    def _prove(self) -> None:
        sequences = proof.sequences(self.model)
        expected = proof.own_logprobs(self.model, sequences)
        # Without temperature, top-k and top-p.
        plain = replace(self, rollout=RolloutConfig(), forward=call_directly, charged=Counter())
        samples = []
        for ids, num_prompt in sequences:
            prompt, response = ids[:num_prompt], ids[num_prompt:]
            # What was sampled, and what it earned, does not matter to scores.
            zeros = [0] * len(response)
            samples.append(Sample(0, prompt, response, [0.0] * len(zeros), zeros, 0.0, False))
        (row,) = pack(samples, range(len(samples)), 1 << 20)  # all in one row, to share prefixes
        proof.check(self.model, plain.score(row)[0], expected, "the learner")

    def hidden(self, row: PackedRow) -> Tensor:
        """Return the body's output where a response token is predicted, [R, D]; within
        `forward`."""
        if row.members:
            cost = "train_token" if torch.is_grad_enabled() else "measure_token"
            self.charged[cost] += row.num_whole
        sequences = row.sequences, len(row.tokens_T), self.model.device
        with _packed(self.attention(*sequences), cache(partial(Rectangles, *sequences))):
            hidden_1TD = body_of(self.model)(
                input_ids=self._tensor(row.tokens_T)[None],
                position_ids=self._tensor(row.positions_T)[None],
                use_cache=False,
            ).last_hidden_state
        return hidden_1TD.squeeze(0).index_select(0, self._tensor(row.predictors_R))

    def _head(
        self, lm_head: LMHead, hidden_CD: Tensor, targets_C: Tensor, further: Any = None
    ) -> tuple[Tensor, Tensor]:
        head = self.model.get_output_embeddings()
        return _HeadLogprobs.apply(  # type: ignore[no-untyped-call]
            hidden_CD, head.weight, head.bias, lm_head, targets_C, self.rollout, further
        )

    def _chunks(self, row: PackedRow) -> Iterator[slice]:
        for start in range(0, len(row.targets_R), self.chunk_size):
            yield slice(start, min(start + self.chunk_size, len(row.targets_R)))

    def _tensor(self, array: Any) -> Tensor:
        return torch.from_numpy(array).to(self.model.device)


class _HeadLogprobs(torch.autograd.Function):
    """Head, shaping, log-softmax and selection in one, with an explicit gradient.

    d logprob[target] / d products = (onehot - softmax) / temperature * `LMHead.slope`; left-out
    tokens have softmax 0. That of the entropy H is -softmax * (log softmax + H) in place of the
    difference. The gradient overwrites the logits. `further` returns that of a further loss."""

    @staticmethod
    def forward(
        ctx: Any,
        hidden_CD: Tensor,
        weight_VD: Tensor,
        bias_V: Tensor | None,
        lm_head: LMHead,
        targets_C: Tensor,
        rollout: RolloutConfig,
        further: Callable[[Tensor], Tensor] | None,
    ) -> tuple[Tensor, Tensor]:
        logits_CV = lm_head.logits(hidden_CD)
        slope = lm_head.slope(logits_CV)
        x_CV = shaped(
            logits_CV,
            temperature=rollout.temperature,
            top_k=rollout.top_k,
            top_p=rollout.top_p,
            keep_R=targets_C,
        )
        logprob_C, entropy_C, log_sum_C = log_softmax_scores(x_CV, targets_C)
        ctx.save_for_backward(hidden_CD, weight_VD, log_sum_C, targets_C, entropy_C)
        ctx.x_CV, ctx.further_CV = x_CV, None if further is None else further(x_CV)
        ctx.scale = 1.0 if rollout.temperature == 0.0 else 1.0 / rollout.temperature
        ctx.slope_CV = slope if isinstance(slope, Tensor) else None
        if ctx.slope_CV is None:
            ctx.scale *= slope
        ctx.has_bias = bias_V is not None
        ctx.set_materialize_grads(False)  # most losses have no entropy
        return logprob_C, entropy_C

    @staticmethod
    def backward(ctx: Any, grad_C: Tensor, bonus_C: Tensor | None) -> tuple[Tensor | None, ...]:
        hidden_CD, weight_VD, log_sum_C, targets_C, entropy_C = ctx.saved_tensors
        more_CV = None
        if bonus_C is not None:
            more_CV = entropy_gradient(ctx.x_CV, log_sum_C, entropy_C, bonus_C * ctx.scale)
        grad_CV = into_gradient(ctx.x_CV, log_sum_C, targets_C, grad_C * ctx.scale)
        if more_CV is not None:
            grad_CV += more_CV
        if ctx.further_CV is not None:
            grad_CV[:, : ctx.further_CV.shape[1]] += ctx.further_CV.mul_(ctx.scale)
        if ctx.slope_CV is not None:
            grad_CV *= ctx.slope_CV
        del ctx.x_CV, ctx.slope_CV, ctx.further_CV
        grad_bias_V = grad_CV.sum(0).to(weight_VD.dtype) if ctx.has_bias else None
        grad_CV = grad_CV.to(weight_VD.dtype)
        grad_weight_VD = grad_CV.T @ hidden_CD if ctx.needs_input_grad[1] else None
        return grad_CV @ weight_VD, grad_weight_VD, grad_bias_V, None, None, None, None


def _cat(scores: list[tuple[Tensor, Tensor]]) -> tuple[Tensor, Tensor]:
    logprobs, entropies = zip(*scores, strict=True)
    return torch.cat(logprobs), torch.cat(entropies)


# -- Softmax of rows of logits; -inf is a token of probability 0 -----------------------------------

_PART = 1 << 18
"""Logits per thread that a CPU takes at a time, so that they stay in its cache between passes."""


def log_softmax_scores(x_CV: Tensor, targets_C: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """Return the log-probability of each row's target, entropy and logsumexp, [C] each, in nats."""
    parts = zip(_parts(x_CV), _parts(targets_C, x_CV), strict=True)
    results = [_scores_of_part(x, targets) for x, targets in parts]
    logprob_C, entropy_C, log_sum_C = (torch.cat(each) for each in zip(*results, strict=True))
    return logprob_C, entropy_C, log_sum_C


def _scores_of_part(x_CV: Tensor, targets_C: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    log_p_CV = x_CV.log_softmax(1)
    logprob_C = log_p_CV.gather(1, targets_C[:, None])[:, 0]
    log_sum_C = x_CV.gather(1, targets_C[:, None])[:, 0] - logprob_C
    p_CV = log_p_CV.exp()
    log_p_CV.clamp_(min=torch.finfo(log_p_CV.dtype).min)  # 0 times -inf would be NaN
    return logprob_C, -p_CV.mul_(log_p_CV).sum(1), log_sum_C


def entropy_gradient(x_CV: Tensor, log_sum_C: Tensor, entropy_C: Tensor, grad_C: Tensor) -> Tensor:
    """Return the gradient of the logits, given that of the entropies."""
    log_p_CV = (x_CV - log_sum_C[:, None]).clamp_(min=torch.finfo(x_CV.dtype).min)
    p_CV = log_p_CV.exp()
    return log_p_CV.add_(entropy_C[:, None]).mul_(p_CV).mul_(-grad_C[:, None])


def into_gradient(x_CV: Tensor, log_sum_C: Tensor, targets_C: Tensor, grad_C: Tensor) -> Tensor:
    """Overwrite the logits with their gradient, given that of the log-probabilities:
    d logprob[target] / d x = onehot - softmax."""
    arrays = (_parts(each, x_CV) for each in (x_CV, log_sum_C, targets_C, grad_C))
    for x, log_sum, targets, grad in zip(*arrays, strict=True):
        x.sub_(log_sum[:, None]).exp_().mul_(-grad[:, None])
        x.scatter_add_(1, targets[:, None], grad[:, None])
    return x_CV


def _parts(array: Tensor, x_CV: Tensor | None = None) -> tuple[Tensor, ...]:
    x_CV = array if x_CV is None else x_CV
    if x_CV.device.type != "cpu":
        return (array,)
    threads = torch.get_num_threads()
    return array.split(max(threads, threads * _PART // x_CV.shape[1]))


# -- Gradient checkpointing ------------------------------------------------------------------------
# The backward pass recomputes a layer after the block `attending(...)` of the forward pass has
# ended, on CUDA even in another thread; so `_contexts` captures what is in force.


def recompute_layers(model: PreTrainedModel) -> None:
    """Checkpoint each layer's input and recompute the rest; the model stays in eval mode."""
    for module in model.modules():
        if isinstance(module, GradientCheckpointingLayer):
            module.gradient_checkpointing = True
            recompute = partial(checkpoint, use_reentrant=False, context_fn=_contexts)
            module._gradient_checkpointing_func = recompute  # type: ignore[assignment]
            # transformers checkpoints only in training mode. Only the layer's own flag is set, so
            # its dropout stays off and log-probabilities stay the engine's.
            module.training = True


def _contexts() -> tuple[AbstractContextManager[None], AbstractContextManager[None]]:
    return nullcontext(), _packed(attentions.current.get(), state.current.get())


@contextmanager
def _packed(attention: Attention, batches: Callable[[], state.Batches] | None) -> Iterator[None]:
    """Attend, and reset states, within the sequences of a packed row."""
    with attending(attention), state.resetting(batches):
        yield
