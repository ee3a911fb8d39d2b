"""What a transformer's layer does element by element, each in one pass, compiled for CPUs.

torch makes an array of every intermediate result: of a norm a dozen forward and backward, of which
three are needed. Arrays are one-dimensional, rows one after another, float32; of bfloat16, which
must be taken apart and rounded by hand, a loop is no vector's and slower than torch.

Holds true: a row's result depends on the row alone; a sum over rows is that of one call, in a fixed
order. Knows nothing of torch.
"""

from __future__ import annotations

import numpy as np
from numba import njit

from rhymeflow.utils.fast_exp import exp_of_negative

_COMPILED = {
    "cache": True,
    "nogil": True,
    "fastmath": {"contract", "nsz", "arcp", "reassoc"},
    # Python's division checks for 0, and so could not be a vector's.
    "error_model": "numpy",
}


@njit(**_COMPILED)
def rms_norm(x, weight, epsilon, first, last, out, scale):
    """Rows `first` to `last` of `out` [T, D]: weight * x * scale.

    `scale` [T] is set to 1 / sqrt(mean(x^2) + epsilon) of each row.
    """
    dim = len(weight)
    for t in range(first, last):
        row, into = x[t * dim :][:dim], out[t * dim :][:dim]
        total = np.float32(0)
        for d in range(dim):
            total += row[d] * row[d]
        share = np.float32(1) / np.sqrt(total / np.float32(dim) + epsilon)
        scale[t] = share
        for d in range(dim):
            into[d] = weight[d] * (row[d] * share)


@njit(**_COMPILED)
def rms_norm_gradient(x, weight, scale, grad, first, last, grad_x, grad_weight):
    """Rows of `grad_x`; `grad_weight` [D] is set to the sum over these rows."""
    dim = len(weight)
    grad_weight[:] = np.float32(0)
    for t in range(first, last):
        row, given, into = x[t * dim :][:dim], grad[t * dim :][:dim], grad_x[t * dim :][:dim]
        share = scale[t]
        total = np.float32(0)
        for d in range(dim):
            product = given[d] * row[d]
            total += product * weight[d]
            grad_weight[d] += product * share
        inner = total * share * share / np.float32(dim)
        for d in range(dim):
            into[d] = share * (given[d] * weight[d] - row[d] * inner)


@njit(inline="always")
def _sigmoid(x):
    small = exp_of_negative(-abs(x))
    share = np.float32(1) / (np.float32(1) + small)
    return share if x >= np.float32(0) else small * share


@njit(**_COMPILED)
def swiglu(gate, up, first, last, out):
    """Elements `first` to `last` of `out`: silu(gate) * up."""
    gate, up, out = gate[first:last], up[first:last], out[first:last]
    for i in range(len(gate)):
        out[i] = gate[i] * _sigmoid(gate[i]) * up[i]


@njit(**_COMPILED)
def swiglu_gradient(gate, up, grad, first, last, grad_gate, grad_up):
    """Elements of both gradients."""
    gate, up, grad = gate[first:last], up[first:last], grad[first:last]
    grad_gate, grad_up = grad_gate[first:last], grad_up[first:last]
    for i in range(len(gate)):
        share = _sigmoid(gate[i])
        silu = gate[i] * share
        grad_up[i] = grad[i] * silu
        grad_gate[i] = grad[i] * up[i] * (share + silu * (np.float32(1) - share))


@njit(**_COMPILED)
def rotate(x, cos, sin, dim, first, last, sign, out):
    """Rows of `out` [T, H, D]: x * cos + sign * turned(x) * sin, with `cos` and `sin` [T, D].

    turned(x) is the second half of each vector, negated, and then its first half. As both halves of
    `cos` and of `sin` are equal, sign -1 is the transpose, and the gradient's.
    """
    half, width = dim // 2, len(x) // (len(cos) // dim)
    for t in range(first, last):
        cosine, sine = cos[t * dim :][:half], sin[t * dim :][:half]
        for at in range(t * width, (t + 1) * width, dim):
            low, high = x[at:][:half], x[at + half :][:half]
            low_out, high_out = out[at:][:half], out[at + half :][:half]
            for d in range(half):
                a, b, turned = low[d], high[d], sign * sine[d]
                low_out[d] = a * cosine[d] - b * turned
                high_out[d] = b * cosine[d] + a * turned


__all__ = ["rms_norm", "rms_norm_gradient", "rotate", "swiglu", "swiglu_gradient"]
