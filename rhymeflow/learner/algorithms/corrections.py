"""Corrections for tokens that another policy sampled: weights of their losses, and masks.

Both are constants, of log u = log pi_prox - log mu, [R]; the learner's policy before the batch's
first optimizer step over the one that sampled. A mask leaves a token's loss out, but not the token
out of the normalisation. `LearnerConfig` says what each option does."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping

import torch
from torch import Tensor

from rhymeflow.config import LearnerConfig
from rhymeflow.learner.algorithms.surrogates import Responses, bounded

Bounds = tuple[float, float]  # least and greatest u

_OVER: Mapping[str, Callable[[Tensor, Responses], Tensor]] = {
    "token": lambda x_R, _: x_R,
    "seq_sum": lambda x_R, responses: responses.sum(x_R),
    "seq_mean": lambda x_R, responses: responses.mean(x_R),
    "seq_max": lambda x_R, responses: responses.max(x_R),
}
_LEVELS = {"token": "token", "sequence": "seq_sum", "geometric_mean": "seq_mean"}


def _is_outside(u_R: Tensor, bounds: Bounds) -> Tensor:
    return (u_R < bounds[0]) | (u_R > bounds[1])


_WEIGHTS: Mapping[str, Callable[[Tensor, Bounds], Tensor]] = {
    "none": lambda u_R, _: torch.ones_like(u_R),
    "proximal": lambda u_R, _: torch.ones_like(u_R),
    "tis": lambda u_R, bounds: u_R.clamp(*bounds),
    "decoupled": lambda u_R, bounds: u_R.masked_fill(_is_outside(u_R, bounds), 0.0),
}
"""TIS: arXiv 1802.01561, section 4.1 (V-trace's rho). Decoupled: arXiv 2110.00641, with a bound as
in AReaL's code (arXiv 2505.24298); at level `sequence` masked importance sampling; with two bounds
IcePop (arXiv 2510.18855)."""


def off_policy_weight(
    log_u_R: Tensor, config: LearnerConfig, responses: Responses | None = None
) -> Tensor:
    """Return the weight of each token by `learner.off_policy_correction`, [R]; `responses` is given
    if u is not the token's."""
    u_R, bounds = _u_and_bounds(log_u_R, config, responses)
    return _WEIGHTS[config.off_policy_correction](u_R, bounds)


def is_outside(log_u_R: Tensor, config: LearnerConfig, responses: Responses | None) -> Tensor:
    """Return whether u is past a bound, so that `off_policy_weight` is not u, [R] bool."""
    return _is_outside(*_u_and_bounds(log_u_R, config, responses))


def _u_and_bounds(
    log_u_R: Tensor, config: LearnerConfig, responses: Responses | None
) -> tuple[Tensor, Bounds]:
    over, least = _OVER[_LEVELS[config.off_policy_level]], config.importance_sampling_floor or 0.0
    u_R = bounded(over(log_u_R, responses)).exp()  # type: ignore[arg-type]
    return u_R, (least, config.importance_sampling_cap)


# -- Masks -----------------------------------------------------------------------------------------

_ESTIMATORS: Mapping[str, Callable[[Tensor], Tensor]] = {
    "k1": lambda log_u_R: -log_u_R,
    "k2": lambda log_u_R: log_u_R.square() / 2.0,
    "k3": lambda log_u_R: bounded(log_u_R).exp() - 1.0 - bounded(log_u_R),
}
"""Of KL(mu || pi_prox), of one token: http://joschu.net/blog/kl-approx.html."""


def kept(log_u_R: Tensor, config: LearnerConfig, responses: Responses | None = None) -> Tensor:
    """Return whether each token stays by `learner.off_policy_masks`, [R] bool."""
    kept_R = torch.ones_like(log_u_R, dtype=torch.bool)
    for name, bound in config.off_policy_masks.items():
        kept_R &= _kept(name, bound, log_u_R, responses)
    return kept_R


def _kept(name: str, bound: float, log_u_R: Tensor, responses: Responses | None) -> Tensor:
    over, _, kind = name.rpartition("_")
    if kind == "veto":
        return responses.max(-log_u_R) <= -math.log(bound)  # type: ignore[union-attr]
    k_R = _OVER[over](_ESTIMATORS[kind](log_u_R), responses)  # type: ignore[arg-type]
    return k_R.abs() <= abs(math.log(bound)) if kind == "k1" else k_R <= bound


def kept_of_negative(
    logprob_R: Tensor,
    behaviour_R: Tensor,
    advantage_R: Tensor,
    responses: Responses,
    threshold: float,
) -> Tensor:
    """Return whether each token stays by `learner.off_policy_mask_threshold`, [R] bool: off-policy
    sequence masking (DeepSeek-V3.2, arXiv 2512.02556, section 3.1)."""
    distance_R = responses.mean(behaviour_R - logprob_R.detach())
    return (advantage_R >= 0.0) | (distance_R <= threshold)
