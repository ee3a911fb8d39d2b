"""Divergences of a policy's distributions from a teacher's, with explicit gradients.

The generalised Jensen-Shannon divergence (GKD, arXiv 2306.13649, equation 1) of a policy p and a
teacher q, with m = (1 - beta) p + beta q, is

    beta KL(q || m) + (1 - beta) KL(p || m)

and at its ends KL(q || p) for beta 0, KL(p || q) for beta 1, as in TRL. Rows are taken a few at a
time, so that of all of them only the two models' logits stand, and the gradient in their place."""

from __future__ import annotations

import math

import torch
from torch import Tensor

from rhymeflow.config import DistillationConfig

_PART, _PART_OF_GPU = 1 << 18, 1 << 24
"""Logits that are taken at a time: on a CPU so many stay in its cache, on a GPU they fill it."""


def divergence(x_CV: Tensor, y_CV: Tensor, config: DistillationConfig) -> tuple[Tensor, Tensor]:
    """Return the divergence of each row of the policy's logits x from the teacher's y, [C], and its
    gradient by x, which overwrites y. If the models have other numbers of tokens, those that one of
    them lacks are left out: they pad its embeddings."""
    count = min(x_CV.shape[1], y_CV.shape[1])
    x_CV, y_CV = x_CV[:, :count], y_CV[:, :count]
    rows = max(1, (_PART_OF_GPU if x_CV.is_cuda else _PART) // count)
    found = []
    for x_PV, y_PV in zip(x_CV.split(rows), y_CV.split(rows), strict=True):
        if config.mode == "topk_logits" and config.topk < count:
            value_P, gradient_PV = _of_likeliest(x_PV, y_PV, config)
        else:
            value_P, gradient_PV = _of_all(x_PV, y_PV, config.jsd_beta)
        found.append(value_P)
        y_PV.copy_(gradient_PV)
    return torch.cat(found), y_CV


def _of_all(x_PV: Tensor, y_PV: Tensor, beta: float) -> tuple[Tensor, Tensor]:
    log_p_PV, log_q_PV = (_bounded(each.log_softmax(1)) for each in (x_PV, y_PV))
    value_P, slope_PV = _compared(log_p_PV, log_q_PV, beta)
    return value_P, slope_PV - log_p_PV.exp_() * slope_PV.sum(1, keepdim=True)


def _of_likeliest(x_PV: Tensor, y_PV: Tensor, config: DistillationConfig) -> tuple[Tensor, Tensor]:
    """Compare the probabilities of the teacher's likeliest tokens, and that of all others."""
    chosen_PK = y_PV.topk(config.topk, dim=1).indices
    sides = []
    for logits_PV in (x_PV, y_PV):
        log_all_PV = _bounded(logits_PV.log_softmax(1))
        log_PB, all_PV = log_all_PV.gather(1, chosen_PK), log_all_PV.exp_()
        if config.add_tail:
            # Summed, since 1 minus the others' sum would be a rounding error.
            rest_P1 = all_PV.scatter(1, chosen_PK, 0.0).sum(1, keepdim=True)
            least = torch.finfo(rest_P1.dtype).tiny
            log_PB = torch.cat([log_PB, rest_P1.clamp_(min=least).log_()], dim=1)
        sides.append((log_PB, all_PV))
    (log_p_PB, p_PV), (log_q_PB, _) = sides
    value_P, slope_PB = _compared(log_p_PB, log_q_PB, config.jsd_beta)
    pull_P1 = -slope_PB.sum(1, keepdim=True)
    chosen_gradient_PK = slope_PB[:, : config.topk] + p_PV.gather(1, chosen_PK) * pull_P1
    if config.add_tail:  # the rest moves together: each token by its share of the rest
        pull_P1 = pull_P1 + slope_PB[:, -1:] / log_p_PB[:, -1:].exp()
    return value_P, p_PV.mul_(pull_P1).scatter_(1, chosen_PK, chosen_gradient_PK)


def _compared(log_p_PB: Tensor, log_q_PB: Tensor, beta: float) -> tuple[Tensor, Tensor]:
    """Return the divergence of p from q, [P], and p times its derivative by p, [P, B], up to a
    multiple of p that a softmax does not see."""
    q_PB = log_q_PB.exp()
    if beta == 0.0:
        return (q_PB * (log_q_PB - log_p_PB)).sum(1), -q_PB
    log_m_PB = log_q_PB
    if beta < 1.0:
        parts = log_p_PB + math.log1p(-beta), log_q_PB + math.log(beta)
        log_m_PB = torch.logaddexp(*parts)
    slope_PB = log_p_PB.exp() * (log_p_PB - log_m_PB)
    value_P = slope_PB.sum(1)
    if beta == 1.0:
        return value_P, slope_PB
    teacher_P = (q_PB * (log_q_PB - log_m_PB)).sum(1)
    return beta * teacher_P + (1.0 - beta) * value_P, (1.0 - beta) * slope_PB


def _bounded(log_p: Tensor) -> Tensor:
    """Make -inf the least number: 0 times infinity would be NaN."""
    return log_p.clamp_(min=torch.finfo(log_p.dtype).min)
