"""What a decoder layer does between its matrix products, each in one pass, compiled for CPUs.

Arrays are one-dimensional, rows one after another, all float32 or all the bits of bfloat16 as
uint16. Holds true: in bfloat16 a result is rounded where transformers' modules round it, so it
differs from theirs by the order of a sum and the last bit of an exponential; a row's result depends
on the row alone. Knows nothing of torch, weights or requests.
"""

from __future__ import annotations

import numpy as np
from numba import njit, types
from numba.extending import overload

from rhymeflow.utils.fast_exp import exp_of_negative

_COMPILED = {
    "cache": True,
    "nogil": True,
    "fastmath": {"contract", "nsz", "arcp", "reassoc"},
    # Python's division checks for 0, and so could not be a vector's.
    "error_model": "numpy",
}


def _get(array, i):
    """Element i as float32."""


def _round(array, value):
    """A float32 as `array` would hold it, as float32."""


def _put(array, i, value):
    """Set element i to a float32, rounded to the nearest, ties to even."""


@overload(_get, inline="always")
def _get_of(array, i):
    if isinstance(array.dtype, types.Float):
        return lambda array, i: array[i]
    return lambda array, i: np.uint32(np.uint32(array[i]) << np.uint32(16)).view(np.float32)


@njit(inline="always")
def _upper_bits(value):
    """The float32 rounded to bfloat16, as the 32 bits of a float32, the lower 16 to be dropped."""
    bits = np.float32(value).view(np.uint32)
    return np.uint32(bits + np.uint32(0x7FFF) + ((bits >> np.uint32(16)) & np.uint32(1)))


@overload(_round, inline="always")
def _round_of(array, value):
    if isinstance(array.dtype, types.Float):
        return lambda array, value: value
    return lambda array, value: np.uint32(_upper_bits(value) & np.uint32(0xFFFF0000)).view(
        np.float32
    )


@overload(_put, inline="always")
def _put_of(array, i, value):
    if isinstance(array.dtype, types.Float):

        def put(array, i, value):
            array[i] = value

        return put

    def put_bfloat16(array, i, value):
        array[i] = np.uint16(_upper_bits(value) >> np.uint32(16))

    return put_bfloat16


@njit(**_COMPILED)
def add_and_norm(hidden, delta, weight, epsilon, first, last, out):
    """Rows `first` to `last`: hidden += delta, and out = weight * hidden over its root mean square.

    `hidden`, `delta`, `out` [T * D], `weight` [D].
    """
    dim = len(weight)
    for t in range(first, last):
        row, more, into = hidden[t * dim :][:dim], delta[t * dim :][:dim], out[t * dim :][:dim]
        for d in range(dim):
            _put(row, d, _get(row, d) + _get(more, d))
        _norm(row, weight, epsilon, into)


@njit(**_COMPILED)
def norm_heads(qkv, weight, epsilon, first, last, width, begin, end):
    """Vectors of D in columns `begin` to `end` of rows [T, width] over their root mean squares.

    `weight` [D]; in place.
    """
    dim = len(weight)
    for t in range(first, last):
        for at in range(t * width + begin, t * width + end, dim):
            vector = qkv[at:][:dim]
            _norm(vector, weight, epsilon, vector)


@njit(inline="always")
def _norm(row, weight, epsilon, into):
    dim = len(weight)
    total = np.float32(0)
    for d in range(dim):
        value = _get(row, d)
        total += value * value
    share = np.float32(1) / np.sqrt(total / np.float32(dim) + epsilon)
    for d in range(dim):
        _put(into, d, _get(weight, d) * _round(into, _get(row, d) * share))


@njit(**_COMPILED)
def rotate_and_split(qkv, cos, sin, sizes, first, last, q, k, v):
    """Rows of `q` [T, H, D], always float32, of `k` and `v` [T, G, D], from [T, (H + 2 G) * D].

    Queries and keys are turned by their positions' angles: x * cos + turned(x) * sin, with `cos`
    and `sin` [T, D] whose halves are equal; turned(x) is the second half of each vector, negated,
    and then its first half. `sizes`: (H, G, D).
    """
    heads, kv_heads, dim = sizes
    width = (heads + 2 * kv_heads) * dim
    for t in range(first, last):
        cosine, sine = cos[t * dim :][:dim], sin[t * dim :][:dim]
        for head in range(heads):
            vector = qkv[t * width + head * dim :][:dim]
            _turn(vector, cosine, sine, q[(t * heads + head) * dim :][:dim])
        for head in range(kv_heads):
            place = (t * kv_heads + head) * dim
            vector = qkv[t * width + (heads + head) * dim :][:dim]
            _turn(vector, cosine, sine, k[place:][:dim])
            vector = qkv[t * width + (heads + kv_heads + head) * dim :][:dim]
            v[place:][:dim] = vector


@njit(inline="always")
def _turn(x, cosine, sine, out):
    half = len(x) // 2
    for d in range(half):
        a, b, c, s = _get(x, d), _get(x, half + d), _get(cosine, d), _get(sine, d)
        low = _round(x, _round(x, a * c) - _round(x, b * s))
        high = _round(x, _round(x, b * c) + _round(x, a * s))
        _put(out, d, low)
        _put(out, half + d, high)


@njit(**_COMPILED)
def swiglu(gate_up, size, first, last, out):
    """Rows of `out` [T, I]: silu(gate) * up, of rows [gate, up] of 2 I. `size`: I."""
    for t in range(first, last):
        gate, up = gate_up[2 * t * size :][:size], gate_up[(2 * t + 1) * size :][:size]
        into = out[t * size :][:size]
        for i in range(size):
            x = _get(gate, i)
            small = exp_of_negative(-abs(x))
            share = np.float32(1) / (np.float32(1) + small)
            silu = x * (share if x >= np.float32(0) else small * share)
            _put(into, i, _round(into, silu) * _get(up, i))


__all__ = ["add_and_norm", "norm_heads", "rotate_and_split", "swiglu"]
