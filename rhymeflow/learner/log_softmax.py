"""Log-probability and entropy of chosen tokens from rows of logits, and the gradient by the logits.

On CPUs compiled, row by row: a row of a vocabulary lies in the processor's cache, so memory is read
once for the scores, and read and written once for the gradient, which takes the logits' place. In
torch each is several passes and another array.

Holds true: both ways give the same numbers up to float rounding; logits of -inf are tokens of
probability 0. Knows nothing of models or losses.
"""

from __future__ import annotations

from collections.abc import Callable

import numpy as np
import torch
from numba import njit
from torch import Tensor

from rhymeflow.utils import threads
from rhymeflow.utils.fast_exp import exp_of_negative

_COMPILED = {
    "cache": True,
    "nogil": True,
    "fastmath": {"contract", "nsz", "arcp", "reassoc"},
    "error_model": "numpy",
}
_BLOCK = 32
"""Rows of one call."""
_LANES = 32
_PART = 1024
"""Elements that are summed in float32; their sums in float64."""


def scores(x_CV: Tensor, targets_C: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """Log-probability of each row's target, entropy, and log of the sum of exponentials, [C] each.

    In nats. `x_CV` is float32.
    """
    if not _has_kernel(x_CV):
        largest_C1 = x_CV.amax(dim=1, keepdim=True)
        below_CV = x_CV - largest_C1
        weight_CV = below_CV.exp()
        total_C = weight_CV.sum(dim=1)
        below_CV = below_CV.masked_fill_(weight_CV == 0.0, 0.0)  # 0 times -inf is no number
        inner_C = torch.linalg.vecdot(weight_CV, below_CV)
        log_sum_C = largest_C1[:, 0] + total_C.log()
        target_C = x_CV.gather(1, targets_C[:, None])[:, 0] - largest_C1[:, 0]
        return target_C - total_C.log(), total_C.log() - inner_C / total_C, log_sum_C
    x, targets = x_CV.contiguous().numpy(), targets_C.numpy()
    found_C3 = np.empty((len(x), 3), np.float32)
    _run(lambda rows: _scores(x[rows], targets[rows], found_C3[rows]), len(x))
    logprob_C, entropy_C, log_sum_C = torch.from_numpy(found_C3).T.contiguous()
    return logprob_C, entropy_C, log_sum_C


def into_gradient(x_CV: Tensor, log_sum_C: Tensor, targets_C: Tensor, grad_C: Tensor) -> Tensor:
    """Turn logits, in their place, into the loss's gradient by them, given that by the scores.

    d logprob[target] / d x = onehot - softmax.
    """
    if not _has_kernel(x_CV):
        x_CV.sub_(log_sum_C[:, None]).exp_().mul_(-grad_C[:, None])
        return x_CV.scatter_add_(1, targets_C[:, None], grad_C[:, None])
    assert x_CV.is_contiguous()
    x, arrays = x_CV.numpy(), [each.contiguous().numpy() for each in (log_sum_C, targets_C, grad_C)]
    _run(lambda rows: _into_gradient(x[rows], *(each[rows] for each in arrays)), len(x))
    return x_CV


def _has_kernel(x: Tensor) -> bool:
    return x.device.type == "cpu"


def _run(work: Callable[[slice], None], count: int) -> None:
    blocks = [slice(first, first + _BLOCK) for first in range(0, count, _BLOCK)]
    threads.run(work, blocks, min(torch.get_num_threads(), len(blocks)))


@njit(**_COMPILED)
def _scores(x, targets, found):
    for c in range(len(x)):
        row = x[c]
        largest = _largest(row)
        total, inner = 0.0, 0.0
        for first in range(0, len(row), _PART):
            in_total, in_inner = _sums(row[first : first + _PART], largest)
            total += in_total
            inner += in_inner
        log_total = np.float32(np.log(total))
        found[c, 0] = row[targets[c]] - largest - log_total
        found[c, 1] = log_total - inner / total
        found[c, 2] = largest + log_total


@njit(**_COMPILED)
def _sums(row, largest):
    """Of exp(x - largest), and of that times x - largest."""
    total, inner = np.float32(0), np.float32(0)
    for v in range(len(row)):
        below = row[v] - largest
        weight = exp_of_negative(below)
        total += weight if row[v] == row[v] else row[v]  # what is no number is not passed over
        inner += weight * below if weight > np.float32(0) else np.float32(0)  # 0 times -inf
    return total, inner


@njit(**_COMPILED)
def _largest(row):
    """The largest element, by `_LANES` at a time; the order of comparing does not matter."""
    lanes = np.full(_LANES, -np.inf, np.float32)
    whole = len(row) // _LANES * _LANES
    for first in range(0, whole, _LANES):
        part = row[first:][:_LANES]
        for i in range(_LANES):
            lanes[i] = lanes[i] if lanes[i] > part[i] else part[i]
    largest = lanes[0]
    for i in range(1, _LANES):
        largest = largest if largest > lanes[i] else lanes[i]
    for v in range(whole, len(row)):
        largest = largest if largest > row[v] else row[v]
    return largest


@njit(**_COMPILED)
def _into_gradient(x, log_sums, targets, grad):
    for c in range(len(x)):
        row, log_sum, given = x[c], log_sums[c], grad[c]
        for v in range(len(row)):
            row[v] = -given * exp_of_negative(row[v] - log_sum)
        row[targets[c]] += given


__all__ = ["into_gradient", "scores"]
