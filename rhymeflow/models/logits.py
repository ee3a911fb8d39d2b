"""The distribution that engine and learner sample from, given the model's logits.

In this order: logits are cast to float32, and divided by the temperature (unless it is 0, greedy);
`top_k` keeps the k likeliest tokens; `top_p` keeps the fewest of those, renormalised, that together
reach it. A token as likely as the last one kept is also kept, so the result does not depend on the
order of the vocabulary."""

from __future__ import annotations

import torch
from torch import Tensor


def shaped(
    logits_RV: Tensor, *, temperature: float, top_k: int, top_p: float, keep_R: Tensor | None = None
) -> Tensor:
    """Return float32 logits [R, V] of the distribution sampled from, -inf for left-out tokens.

    `top_k` 0 and `top_p` 1 are off. `keep_R` has one token per row that is never left out: the
    behaviour policy, with slightly other weights, may have sampled a token that would be left out,
    and its log-probability must be finite. The input is not changed."""
    x_RV = logits_RV.float()
    if temperature not in (0.0, 1.0):
        x_RV = x_RV / temperature
    if top_k == 0 and top_p == 1.0:
        return x_RV
    left_out_RV = x_RV < _least_kept(x_RV, top_k, top_p)
    if keep_R is not None:
        left_out_RV.scatter_(1, keep_R[:, None], False)
    return x_RV.masked_fill(left_out_RV, -torch.inf)


def _least_kept(x_RV: Tensor, top_k: int, top_p: float) -> Tensor:
    """Return the smallest logit of each row that is kept, [R, 1]."""
    if top_k:
        likeliest_RK = x_RV.topk(min(top_k, x_RV.shape[1]), dim=1).values
    else:
        likeliest_RK = x_RV.sort(dim=1, descending=True).values
    if top_p == 1.0:
        return likeliest_RK[:, -1:]
    p_RK = likeliest_RK.softmax(dim=1)
    before_RK = p_RK.cumsum(dim=1) - p_RK
    before_RK[:, 0] = 0.0
    return likeliest_RK.masked_fill(before_RK >= top_p, torch.inf).amin(dim=1, keepdim=True)
