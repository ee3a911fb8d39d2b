"""Log-probability and entropy of chosen tokens from rows of logits, and the gradient by the logits.

Logits of -inf are tokens of probability 0.
"""

from __future__ import annotations

import torch
from torch import Tensor

_PART = 1 << 18
"""Numbers of rows that a CPU takes at a time: they stay in its cache from one pass to the next."""


def scores(x_CV: Tensor, targets_C: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """Log-probability of each row's target, entropy, and log of the sum of exponentials, [C] each.

    In nats. `x_CV` is float32.
    """
    parts = zip(_parts(x_CV), _parts(targets_C, x_CV), strict=True)
    found = [_scores(x, targets) for x, targets in parts]
    logprob_C, entropy_C, log_sum_C = (torch.cat(each) for each in zip(*found, strict=True))
    return logprob_C, entropy_C, log_sum_C


def _scores(x_CV: Tensor, targets_C: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    log_p_CV = x_CV.log_softmax(1)
    logprob_C = log_p_CV.gather(1, targets_C[:, None])[:, 0]
    log_sum_C = x_CV.gather(1, targets_C[:, None])[:, 0] - logprob_C
    p_CV = log_p_CV.exp()
    log_p_CV.clamp_(min=torch.finfo(log_p_CV.dtype).min)  # 0 times -inf is no number
    return logprob_C, -torch.linalg.vecdot(p_CV, log_p_CV), log_sum_C


def into_gradient(x_CV: Tensor, log_sum_C: Tensor, targets_C: Tensor, grad_C: Tensor) -> Tensor:
    """Turn logits, in their place, into the loss's gradient by them, given that by the scores.

    d logprob[target] / d x = onehot - softmax.
    """
    arrays = (_parts(each, x_CV) for each in (x_CV, log_sum_C, targets_C, grad_C))
    for x, log_sum, targets, grad in zip(*arrays, strict=True):
        x.sub_(log_sum[:, None]).exp_().mul_(-grad[:, None])
        x.scatter_add_(1, targets[:, None], grad[:, None])
    return x_CV


def _parts(array: Tensor, x_CV: Tensor | None = None) -> tuple[Tensor, ...]:
    """The array's rows as they are computed together."""
    x_CV = array if x_CV is None else x_CV
    if x_CV.device.type != "cpu":
        return (array,)
    threads = torch.get_num_threads()
    return array.split(max(threads, threads * _PART // x_CV.shape[1]))


__all__ = ["into_gradient", "scores"]
