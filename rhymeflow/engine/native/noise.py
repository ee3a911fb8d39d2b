"""Sampling noise by counter: a pure function of (seed, prompt, epoch, sample, position, token).

A token is sampled by the Gumbel-max trick: argmax over v of x_v + g_v, where g_v is Gumbel noise,
so P(v) = softmax(x)_v (Gumbel 1954; Maddison, Tarlow and Minka, "A* Sampling", 2014, section 2). We
keep E_v = exp(-g_v), which is Exponential(1), and take argmax of x_v - log E_v. The winner has a
small E, where floats are dense: the least E is 2^-53, and steps near it are 2^-52.

**Why blocks.** Noise for 32 rows of 49,152 tokens costs more than the rest of sampling, and only a
few tokens can win. So the noise is drawn in blocks of B = 64 neighbouring vocabulary indices: first
the block's least value m ~ Exponential(1) / B and its place j, uniform; then for every other token
of the block E_v = m + Exponential(1). That is the same distribution as B independent
Exponential(1): their minimum is exponential with rate B and falls on each place with equal
probability, and since exponentials are memoryless, the excess of the others over it is again
Exponential(1) and independent. Token v scores at most x_v - log m, and the token at place j scores
just that. So a token whose bound is below the best score of any block's token j cannot win, and its
excess is not hashed. The work per row is V / 64 hashes, one pass to find each block's greatest
logit, the bounds of the tokens in blocks whose greatest could win, and few other hashes.

**How many can win.** Sort a row's tokens by bound, the greatest first. Each is its block's token j
with probability 1 / 64 (more, if others of its block were not), whatever the logits are, and the
first that is one ends the list of those that can win. So there are at most 64 on average (16 for
SmolLM2 at temperature 1), and more than n in R rows only if n trials of probability 1 / 64 succeed
fewer than R times. With room for n = 128 R + 4096 their mean is 2 R + 64, and by Chernoff's bound
the room is too small with probability exp(-(R + 64)^2 / (4 R + 128)) < 2e-14. On a GPU `draw` has
that room instead of waiting for the true number, and says if it was not enough. (Tokens of a block
with equal logits, hence equal bounds, count together; then the number only varies less.)

A token's noise depends neither on other draws nor on the batch, the device or the model's dtype.
The hash is integer arithmetic, so its bits are the same everywhere; the logarithms are float64 and
may differ between devices in the last bit. `draw` returns exactly the argmax of x minus the log of
`exponentials`; the logit of a left-out token is -inf."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

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
_BLOCK_WORDS = 1 << 32  # counter of block 0; tokens count from 0, so the two never meet

SMALL = 512  # largest vocabulary of which every token's noise is computed: fewer operations on CPUs

ROOM_PER_ROW, ROOM = 128, 4096
"""Blocks, and tokens, that `draw` has room for without waiting: for each row, and for all rows."""

UNKNOWN = -1


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
    keys_R = torch.from_numpy(_mixed(word_R).view(np.int64))
    return keys_R.to(device, non_blocking=True)  # the logits may not be computed yet


def exponentials(keys_R: Tensor, vocabulary: int) -> Tensor:
    """Return the noise E of every token, float64 [R, V]: the definition that `draw` follows."""
    num_blocks = -(-vocabulary // BLOCK)
    token_BK = torch.arange(num_blocks * BLOCK, device=keys_R.device).view(-1, BLOCK)
    least_RB, where_RB = _block_minima(keys_R, num_blocks)
    noise_RBK = _token_noise(
        keys_R[:, None, None], token_BK, least_RB[:, :, None], where_RB[:, :, None]
    )
    return noise_RBK.flatten(1)[:, :vocabulary]


def draw(x_RV: Tensor, keys_R: Tensor, *, waits: bool = True) -> Tensor:
    """Return argmax over v of x - log E, int64 [R]; equal scores go to the smaller index.

    `x_RV` is float32, with at least one finite value in every row. Unless it `waits` for the device
    to say how many tokens can win, it has room for a fixed number of them, and returns `UNKNOWN`
    for every row if there are more."""
    rows, vocabulary = x_RV.shape
    if vocabulary <= SMALL:
        return (x_RV.double() - exponentials(keys_R, vocabulary).log()).argmax(1)
    room = None if waits else ROOM_PER_ROW * rows + ROOM
    bound_RB, needed_R, least_RB, where_RB = _bounds(x_RV, keys_R)
    row_C, block_C, num_blocks = _places(bound_RB >= needed_R[:, None], room)
    token_CK = (block_C * BLOCK)[:, None] + torch.arange(BLOCK, device=x_RV.device)
    least_C, where_C = least_RB[row_C, block_C], where_RB[row_C, block_C]
    x_CK = x_RV[row_C[:, None], token_CK.clamp(max=vocabulary - 1)].double()
    if vocabulary % BLOCK:
        x_CK.masked_fill_(token_CK >= vocabulary, -torch.inf)
    can_win_CK = x_CK - least_C.log()[:, None] >= needed_R[row_C, None]
    if not waits:  # places that are left have a block twice
        can_win_CK &= (torch.arange(len(block_C), device=x_RV.device) < num_blocks)[:, None]
    of_T, place_T, num_tokens = _places(can_win_CK, room)
    row_T, token_T = row_C[of_T], token_CK[of_T, place_T]
    noise_T = _token_noise(keys_R[row_T], token_T, least_C[of_T], where_C[of_T])
    score_T = x_CK[of_T, place_T] - noise_T.log()
    best_R = score_T.new_full((rows,), -torch.inf).scatter_reduce(0, row_T, score_T, "amax")
    winner_T = torch.where(score_T == best_R[row_T], token_T, vocabulary)
    winner_R = torch.full_like(keys_R, vocabulary).scatter_reduce(0, row_T, winner_T, "amin")
    if waits:
        return winner_R
    has_room = (num_blocks <= len(block_C)) & (num_tokens <= len(place_T))
    return torch.where(has_room, winner_R, UNKNOWN)


def _places(is_true: Tensor, room: int | None) -> tuple[Tensor, Tensor, Any]:
    """Return the rows and columns of the first `room` True values (None: of all, and wait), filled
    up with any others; and the number of True values, on the device unless it was waited for."""
    if room is None:
        row_C, column_C = torch.nonzero(is_true, as_tuple=True)
        return row_C, column_C, len(row_C)
    flat_N = is_true.flatten()
    room = min(room, len(flat_N))
    index_N, upto_N = torch.arange(len(flat_N), device=flat_N.device), flat_N.cumsum(0)
    slot_N = torch.where(flat_N & (upto_N <= room), upto_N - 1, room)  # the last one is dropped
    place_C = index_N.new_zeros(room + 1)
    place_C[:room] = index_N[:room]
    place_C = place_C.scatter_(0, slot_N, index_N)[:room]
    width = is_true.shape[1]
    return place_C // width, place_C % width, upto_N[-1]


def _bounds(x_RV: Tensor, keys_R: Tensor) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Return the greatest possible score in each block [R, B]; what a bound needs for its token to
    win [R]: the best score among the tokens that have their block's least noise; and what
    `_block_minima` does."""
    vocabulary = x_RV.shape[1]
    whole = vocabulary // BLOCK * BLOCK
    greatest_RB = x_RV[:, :whole].unflatten(1, (-1, BLOCK)).amax(2)
    if whole < vocabulary:
        greatest_RB = torch.cat([greatest_RB, x_RV[:, whole:].amax(1, keepdim=True)], 1)
    least_RB, where_RB = _block_minima(keys_R, greatest_RB.shape[1])
    log_RB = least_RB.log()
    token_RB = where_RB + torch.arange(greatest_RB.shape[1], device=x_RV.device) * BLOCK
    x_RB = x_RV.gather(1, token_RB.clamp(max=vocabulary - 1)).double()
    score_RB = x_RB - log_RB
    if whole < vocabulary:
        score_RB.masked_fill_(token_RB >= vocabulary, -torch.inf)
    # The slack covers a logarithm that is not monotone in its last bit. -inf never suffices.
    needed_R = (score_RB.amax(1) - 1e-9).clamp_(min=torch.finfo(torch.float64).min)
    return greatest_RB.double() - log_RB, needed_R, least_RB, where_RB


def _block_minima(keys_R: Tensor, num_blocks: int) -> tuple[Tensor, Tensor]:
    """Return each block's least noise, float64 [R, B], and its place in the block, int64 [R, B]."""
    counter_B = torch.arange(_BLOCK_WORDS, _BLOCK_WORDS + num_blocks, device=keys_R.device)
    word_RB = words(keys_R[:, None], counter_B[None])
    return _exponential(word_RB).div_(BLOCK), word_RB & (BLOCK - 1)


def _token_noise(keys: Tensor, token: Tensor, least: Tensor, where: Tensor) -> Tensor:
    excess = _exponential(words(keys, token))
    return torch.where(token & (BLOCK - 1) == where, least, least + excess)


def _exponential(word: Tensor) -> Tensor:
    """Exponential(1) of a word's upper 52 bits: -log(1 - u), u in {0.5, 1.5, ...} / 2^52."""
    upper = (word >> 12) & (_WORD >> 12)
    return upper.double().add_(0.5).mul_(-(2.0**-52)).log1p_().neg_()


def words(keys: Tensor, counter: Tensor) -> Tensor:
    """Return the hash of key and counter, int64. A row's key is that of its stream and position."""
    if keys.device.type == "cpu":  # NumPy shifts unsigned words, and starts an operation sooner
        key_word, count = keys.numpy().view(np.uint64), counter.numpy().view(np.uint64)
        word = _mixed((count + np.uint64(1)) * np.uint64(_STEP) + key_word)
        return torch.from_numpy(word.view(np.int64))
    return _mixed_on_device(keys + (counter + 1) * _signed(_STEP))


def _mixed_on_device(word: Tensor) -> Tensor:
    """`_mixed` of words in int64, which torch shifts with their sign."""
    for shift, factor in _ROUNDS:
        word = (word ^ ((word >> shift) & (_WORD >> shift))) * _signed(factor)
    return word ^ ((word >> _LAST_SHIFT) & (_WORD >> _LAST_SHIFT))


def _mixed(word: np.ndarray) -> np.ndarray:
    """Return splitmix64's finaliser, in place."""
    for shift, factor in _ROUNDS:
        word ^= word >> np.uint64(shift)
        word *= np.uint64(factor)
    word ^= word >> np.uint64(_LAST_SHIFT)
    return word


def _mix_int(word: int) -> int:
    word &= _WORD
    for shift, factor in _ROUNDS:
        word = (word ^ (word >> shift)) * factor & _WORD
    return word ^ (word >> _LAST_SHIFT)


def _signed(word: int) -> int:
    """The 64-bit word as torch's int64 holds it."""
    return word - (1 << 64) if word >> 63 else word
