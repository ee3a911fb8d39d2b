"""Sampling noise by counter: a pure function of (seed, prompt, epoch, sample, position, token).

A token is sampled by the Gumbel-max trick: argmax over v of x_v + g_v, where g_v is Gumbel noise,
so P(v) = softmax(x)_v (Gumbel 1954; Maddison, Tarlow and Minka, "A* Sampling", 2014, section 2). We
keep E_v = exp(-g_v), which is Exponential(1), and take argmax of x_v - log E_v. The winner has a
small E, where floats are dense: the least E is 2^-53, and steps near it are 2^-52.

**Why blocks.** Noise for 32 rows of 49,152 tokens costs more than the rest of sampling, and only a
handful of tokens can win. So the noise is drawn in blocks of B = 64 neighbouring vocabulary
indices: first the block's least value m ~ Exponential(1) / B and its place j, uniform; then for
every other token of the block E_v = m + Exponential(1). That is the same distribution as B
independent Exponential(1): their minimum is exponential with rate B and falls on each place with
equal probability, and since exponentials are memoryless, the excess of the others over it is again
Exponential(1) and independent. No token of a block can score more than max(x in block) - log m, so
a block whose bound is below the best x_j - log m of any block cannot hold the winner. Usually two
or three blocks of a row are left, and only their tokens are hashed. The work per row is V / 64
hashes, one pass to find each block's greatest logit, and little else.

A token's noise depends neither on other draws nor on the batch, the device or the model's dtype.
The hash is integer arithmetic, so its bits are the same everywhere; the logarithms are float64 and
may differ between devices in the last bit. `draw` returns exactly the argmax of x minus the log of
`exponentials`; the logit of a left-out token is -inf.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import torch
from torch import Tensor

from rhymeflow.engine.base import NoiseKey

BLOCK = 64
"""Vocabulary indices that share one minimum. Part of the noise's definition: changing it changes
every sample."""

_WORD = (1 << 64) - 1
_STEP = 0x9E3779B97F4A7C15  # 2^64 / golden ratio: the increment of splitmix64
_ROUNDS = ((30, 0xBF58476D1CE4E5B9), (27, 0x94D049BB133111EB))  # splitmix64's finaliser
_LAST_SHIFT = 31
_BLOCK_WORDS = 1 << 32
"""Counter of block 0; tokens count from 0, so the two never meet."""


def stream(seed: int, key: NoiseKey) -> int:
    """Return the 64-bit noise stream of one response."""
    word = _mix_int(seed + _STEP)
    for part in key:
        word = _mix_int(word ^ _mix_int(part + _STEP))
    return word


def row_keys(
    streams: Sequence[int] | np.ndarray, positions: Sequence[int], device: torch.device
) -> Tensor:
    """Return int64 keys [R] of rows that sample the token at `position` of their response."""
    word_R = np.array(streams, dtype=np.uint64)
    word_R += (np.array(positions, dtype=np.uint64) + np.uint64(1)) * np.uint64(_STEP)
    for shift, factor in _ROUNDS:
        word_R = (word_R ^ (word_R >> np.uint64(shift))) * np.uint64(factor)
    word_R ^= word_R >> np.uint64(_LAST_SHIFT)
    return torch.from_numpy(word_R.view(np.int64)).to(device)


def exponentials(keys_R: Tensor, vocabulary: int) -> Tensor:
    """Return the noise E of every token, float64 [R, V]: the definition that `draw` follows."""
    token_V = torch.arange(vocabulary, device=keys_R.device)
    block_V = token_V // BLOCK
    least_RB, where_RB = _block_minima(keys_R, -(-vocabulary // BLOCK))
    return _token_noise(keys_R[:, None], token_V[None], least_RB[:, block_V], where_RB[:, block_V])


def draw(x_RV: Tensor, keys_R: Tensor) -> Tensor:
    """Return argmax over v of x - log E, int64 [R]; equal scores go to the smaller index.

    `x_RV` is float32, with at least one finite value in every row.
    """
    rows, vocabulary = x_RV.shape
    minus_inf = -torch.inf
    bound_RB, reached_R, least_RB, where_RB = _bounds(x_RV, keys_R)
    # The slack covers a logarithm that is not monotone in its last bit.
    row_C, block_C = torch.nonzero(
        (bound_RB >= reached_R[:, None] - 1e-9) & (bound_RB > minus_inf), as_tuple=True
    )
    token_CK = block_C[:, None] * BLOCK + torch.arange(BLOCK, device=x_RV.device)
    noise_CK = _token_noise(
        keys_R[row_C, None],
        token_CK,
        least_RB[row_C, block_C][:, None],
        where_RB[row_C, block_C][:, None],
    )
    x_CK = x_RV[row_C[:, None], token_CK.clamp(max=vocabulary - 1)].double()
    score_CK = (x_CK - noise_CK.log()).masked_fill(token_CK >= vocabulary, minus_inf)
    score_C, place_C = score_CK.max(1)
    best_R = score_C.new_full((rows,), minus_inf).scatter_reduce(0, row_C, score_C, "amax")
    winner_C = torch.where(
        score_C == best_R[row_C], block_C * BLOCK + place_C, torch.full_like(row_C, vocabulary)
    )
    return torch.full_like(keys_R, vocabulary).scatter_reduce(0, row_C, winner_C, "amin")


def _bounds(x_RV: Tensor, keys_R: Tensor) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Return the greatest possible score in each block [R, B]; the best score among the tokens that
    have their block's least noise [R], which the winner reaches; and what `_block_minima` does."""
    vocabulary = x_RV.shape[1]
    whole = vocabulary // BLOCK * BLOCK
    greatest_RB = x_RV[:, :whole].unflatten(1, (-1, BLOCK)).amax(2) if whole else x_RV[:, :0]
    if whole < vocabulary:
        greatest_RB = torch.cat([greatest_RB, x_RV[:, whole:].amax(1, keepdim=True)], 1)
    least_RB, where_RB = _block_minima(keys_R, greatest_RB.shape[1])
    log_RB = least_RB.log()
    token_RB = where_RB + torch.arange(greatest_RB.shape[1], device=x_RV.device) * BLOCK
    x_RB = x_RV.gather(1, token_RB.clamp(max=vocabulary - 1)).double()
    reached_R = (x_RB - log_RB).masked_fill_(token_RB >= vocabulary, -torch.inf).amax(1)
    return greatest_RB.double() - log_RB, reached_R, least_RB, where_RB


def _block_minima(keys_R: Tensor, num_blocks: int) -> tuple[Tensor, Tensor]:
    """Return each block's least noise, float64 [R, B], and its place in the block, int64 [R, B]."""
    counter_B = torch.arange(_BLOCK_WORDS, _BLOCK_WORDS + num_blocks, device=keys_R.device)
    word_RB = _words(keys_R[:, None], counter_B[None])
    return _exponential(word_RB) / BLOCK, word_RB & (BLOCK - 1)


def _token_noise(keys: Tensor, token: Tensor, least: Tensor, where: Tensor) -> Tensor:
    excess = _exponential(_words(keys, token))
    return torch.where(token & (BLOCK - 1) == where, least, least + excess)


def _exponential(word: Tensor) -> Tensor:
    """Exponential(1) of a word's upper 52 bits: -log(1 - u), u in {0.5, 1.5, ...} / 2^52."""
    upper = _shift(word, 12)
    return -torch.log1p((upper.double() + 0.5) * -(2.0**-52))


def _words(keys: Tensor, counter: Tensor) -> Tensor:
    """Hash of key and counter, int64."""
    word = keys + (counter + 1) * _signed(_STEP)
    for shift, factor in _ROUNDS:
        word = (word ^ _shift(word, shift)) * _signed(factor)
    return word ^ _shift(word, _LAST_SHIFT)


def _shift(word: Tensor, bits: int) -> Tensor:
    """Shift right as if unsigned."""
    return (word >> bits) & (_WORD >> bits)


def _mix_int(word: int) -> int:
    word &= _WORD
    for shift, factor in _ROUNDS:
        word = (word ^ (word >> shift)) * factor & _WORD
    return word ^ (word >> _LAST_SHIFT)


def _signed(word: int) -> int:
    """The 64-bit word as torch's int64 holds it."""
    return word - (1 << 64) if word >> 63 else word
