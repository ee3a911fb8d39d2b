"""Corrections for tokens that another policy sampled: weights of their losses, and masks.

Both are constants, of log u = log pi_prox - log mu, [R]; the learner's policy before the batch's
first optimizer step over the one that sampled. A mask leaves a token's loss out, but not the token
out of the normalisation. `LearnerConfig` says what each option does.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping

import torch
from torch import Tensor

from rhymeflow.config import LearnerConfig
from rhymeflow.learner.algorithms.surrogates import Responses, bounded

Bounds = tuple[float | None, float]
"""Least and greatest u."""

_LEVELS: Mapping[str, Callable[[Tensor, Responses], Tensor]] = {
    "token": lambda log_u_R, _: log_u_R,
    "sequence": lambda log_u_R, responses: responses.sum(log_u_R),
    "geometric_mean": lambda log_u_R, responses: responses.mean(log_u_R),
}


def _mask_outside(u_R: Tensor, bounds: Bounds) -> Tensor:
    least, most = bounds
    is_within_R = u_R <= most
    return torch.where(is_within_R if least is None else is_within_R & (u_R >= least), u_R, 0.0)


_WEIGHTS: Mapping[str, Callable[[Tensor, Bounds], Tensor]] = {
    "none": lambda u_R, _: torch.ones_like(u_R),
    "proximal": lambda u_R, _: torch.ones_like(u_R),
    "tis": lambda u_R, bounds: u_R.clamp(*bounds),
    "decoupled": _mask_outside,
}
"""TIS: arXiv 1802.01561, section 4.1 (V-trace's rho). Decoupled: arXiv 2110.00641, with a bound as
in AReaL's code (arXiv 2505.24298); at level `sequence` masked importance sampling; with two bounds
IcePop (arXiv 2510.18855)."""


def off_policy_weight(
    log_u_R: Tensor, config: LearnerConfig, responses: Responses | None = None
) -> Tensor:
    """Return the weight of each token by `learner.off_policy_correction`, [R]; `responses` is given
    if u is not the token's."""
    weight = _WEIGHTS[config.off_policy_correction]
    bounds = config.importance_sampling_floor, config.importance_sampling_cap
    return weight(_u(log_u_R, config, responses), bounds)


def is_outside(log_u_R: Tensor, config: LearnerConfig, responses: Responses | None) -> Tensor:
    """Return whether u is past a bound, so that `off_policy_weight` is not u, [R] bool."""
    u_R, least = _u(log_u_R, config, responses), config.importance_sampling_floor
    is_above_R = u_R > config.importance_sampling_cap
    return is_above_R if least is None else is_above_R | (u_R < least)


def _u(log_u_R: Tensor, config: LearnerConfig, responses: Responses | None) -> Tensor:
    level = _LEVELS[config.off_policy_level]
    return bounded(level(log_u_R, responses)).exp()  # type: ignore[arg-type]


# -- Masks -----------------------------------------------------------------------------------------

_ESTIMATORS: Mapping[str, Callable[[Tensor], Tensor]] = {
    "k1": lambda log_u_R: -log_u_R,
    "k2": lambda log_u_R: log_u_R.square() / 2.0,
    "k3": lambda log_u_R: bounded(log_u_R).exp() - 1.0 - bounded(log_u_R),
}
"""Of KL(mu || pi_prox), of one token: http://joschu.net/blog/kl-approx.html."""

_OVER: Mapping[str, Callable[[Tensor, Responses], Tensor]] = {
    "token": lambda k_R, _: k_R,
    "seq_sum": lambda k_R, responses: responses.sum(k_R),
    "seq_mean": lambda k_R, responses: responses.mean(k_R),
    "seq_max": lambda k_R, responses: responses.max(k_R),
}


def kept(log_u_R: Tensor, config: LearnerConfig, responses: Responses | None = None) -> Tensor:
    """Return whether each token stays by `learner.off_policy_masks`, [R] bool."""
    kept_R = torch.ones_like(log_u_R, dtype=torch.bool)
    for name, bound in config.off_policy_masks.items():
        kept_R &= _kept(name, bound, log_u_R, responses)
    return kept_R


def _kept(
    name: str,
    bound: float | tuple[float, float],
    log_u_R: Tensor,
    responses: Responses | None,
) -> Tensor:
    least, most = bound if isinstance(bound, tuple) else (1.0 / bound, bound)
    over, _, kind = name.rpartition("_")
    if kind == "veto":
        return responses.max(-log_u_R).neg().exp() >= most  # type: ignore[union-attr]
    k_R = _OVER[over](_ESTIMATORS[kind](log_u_R), responses)  # type: ignore[arg-type]
    if kind == "k1":
        ratio_R = bounded(k_R).exp()
        return (ratio_R >= least) & (ratio_R <= most)
    return k_R <= most


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


def mixes_tokens(config: LearnerConfig) -> bool:
    """Whether a weight or a mask is of a whole response."""
    return (
        config.off_policy_level != "token"
        or config.off_policy_mask_threshold is not None
        or any(not name.startswith("token") for name in config.off_policy_masks)
    )
