"""The loss of each response token.

For each response token, with ratio r = pi / pi_prox and advantage A, the loss is

    - w * min(r * A, clip(r, 1 - epsilon, 1 + epsilon_high) * A)  +  beta * r * k3

pi is the policy being trained, pi_prox the policy that the clip keeps it close to, mu the behaviour
policy that sampled the token, and w depends on u = pi_prox / mu by `off_policy_correction`:

    none       pi_prox is mu, w = 1: plain PPO clipping around the behaviour policy
    tis        pi_prox is the learner's policy when the step began, w = min(u, cap): token-level
               truncated importance sampling (TIS)
    decoupled  the same pi_prox, w = u where u <= cap and 0 elsewhere: decoupled PPO

No gradient runs through u. With one optimizer step per batch pi_prox is pi without gradient, so r
is 1, nothing is clipped, and no second forward pass is needed. A step's loss is a sum over tokens,
each times a constant of its sample (`token_weight`), times a constant of the step (`step_scale`),
so it and its gradient do not depend on the split into micro-batches.

Sources: clip-higher, DAPO (arXiv 2503.14476, section 3.1). Decoupled objective: Hilton et al.
(arXiv 2110.00641, section 2) with the paper's recomputed pi_prox of AReaL (arXiv 2505.24298,
section 5.2); neither has the cap, it is AReaL's released code that drops tokens past it. Cap 2.0
with truncation is StaleFlow's setting (arXiv 2601.12784). k3: the estimator exp(d) - d - 1 of the
KL divergence, d = log pi_ref - log pi (GRPO, arXiv 2402.03300, equation 4); the factor r, whose
gradient counts even where its value is 1, makes the gradient that of KL(pi || pi_ref)
(DeepSeek-V3.2, arXiv 2512.02556; TRL's default). That gradient is -r * d times that of log pi, and
is written explicitly: autograd would compute it from terms of size exp(d), which cancel to 0 in
float32 from about d = 20.

Log-ratios are clamped to +-`MOST_LOG_RATIO`, so that one extreme token leaves loss and gradient
finite: past it a ratio carries no gradient, and the KL term has the gradient at the bound. verl has
the same bound; its other one, k3 <= 10, is not adopted, since it takes effect from d = 2.6.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal

import torch
from torch import Tensor

from rhymeflow.config import LearnerConfig

MOST_LOG_RATIO = 20.0
"""exp(20) is 5e8."""


@dataclass(frozen=True)
class TokenInputs:
    """Constants in the loss of R response tokens; float32 [R] each."""

    advantage_R: Tensor
    weight_R: Tensor
    """Factor of the token's loss in the sum, from `token_weight`."""
    behaviour_R: Tensor
    """log mu."""
    proximal_R: Tensor | None = None
    """log pi_prox; `None` if it is the policy itself, without gradient."""
    reference_R: Tensor | None = None
    """log pi_ref, if there is a reference model."""

    def __getitem__(self, chunk: slice) -> TokenInputs:
        return TokenInputs(
            *(None if x is None else x[chunk] for x in vars(self).values())  # type: ignore[arg-type]
        )


LossType = Literal["grpo", "bnpo", "dr_grpo", "dapo"]


def token_weight(loss_type: LossType, length: int) -> float:
    """Return the factor, before `step_scale`, of each of a sample's `length` tokens in the loss."""
    return 1 / max(length, 1) if loss_type == "grpo" else 1.0


def step_scale(
    loss_type: LossType, lengths: Sequence[int], *, max_completion_length: int, mean_tokens: float
) -> float:
    """Return the factor of an optimizer step's loss and gradient.

    `lengths` has the tokens in the loss of each of the step's samples (0 for a masked one, which
    still counts as a sample, as in TRL). `mean_tokens`, `dapo`'s denominator, is the batch's tokens
    divided by its number of optimizer steps; with one step it equals `bnpo`'s denominator.
    """
    denominators = {
        "grpo": len(lengths),
        "bnpo": max(sum(lengths), 1),
        "dapo": max(mean_tokens, 1),
        "dr_grpo": len(lengths) * max_completion_length,
    }
    return 1 / denominators[loss_type]


def token_losses(logprob_R: Tensor, inputs: TokenInputs, config: LearnerConfig) -> Tensor:
    """Return the unweighted loss of each token, [R]; gradient flows only through `logprob_R`."""
    low, high = clip_range(config)
    ratio_R = _ratio(logprob_R, inputs, config)
    advantage_R = inputs.advantage_R
    loss_R = -torch.min(ratio_R * advantage_R, ratio_R.clamp(low, high) * advantage_R)
    if config.off_policy_correction != "none":
        log_u_R = _proximal(logprob_R, inputs) - inputs.behaviour_R
        loss_R = loss_R * off_policy_weight(log_u_R, config)
    if config.beta > 0.0:
        loss_R = loss_R + config.beta * reference_kl(logprob_R, inputs, config)
    return loss_R


def clip_range(config: LearnerConfig) -> tuple[float, float]:
    """Return the least and the greatest ratio that still carry gradient."""
    high = config.epsilon if config.epsilon_high is None else config.epsilon_high
    return 1.0 - config.epsilon, 1.0 + high


def off_policy_weight(log_u_R: Tensor, config: LearnerConfig) -> Tensor:
    """Return w of the module's docstring, [R], given log(pi_prox / mu)."""
    u_R = _bounded(log_u_R).exp()
    cap = config.importance_sampling_cap
    if config.off_policy_correction == "decoupled":
        return torch.where(u_R <= cap, u_R, 0.0)
    return u_R.clamp(max=cap)


def reference_kl(logprob_R: Tensor, inputs: TokenInputs, config: LearnerConfig) -> Tensor:
    """Return r * k3, each token's estimate of KL(pi || pi_ref), [R], never negative."""
    assert inputs.reference_R is not None, "no reference log-probabilities"
    policy_R = logprob_R.detach()
    d_R = _bounded(inputs.reference_R - policy_R)
    ratio_R = _ratio(policy_R, inputs, config)
    return ratio_R * _k3(d_R) - ratio_R * d_R * (logprob_R - policy_R)  # the last factor is 0


def diagnosis_names(config: LearnerConfig) -> tuple[str, ...]:
    """Return the names of the metrics in `diagnose`."""
    clips = ("clip_ratio/low_mean", "clip_ratio/high_mean", "clip_ratio/region_mean")
    return ("loss", "entropy", *clips, *(("kl",) if config.beta > 0.0 else ()))


def diagnose(
    logprob_R: Tensor, entropy_R: Tensor, inputs: TokenInputs, config: LearnerConfig
) -> dict[str, Tensor]:
    """Return sums over the tokens by metric name, without gradient; `loss` is weighted."""
    is_low_R, is_high_R = clipped(logprob_R, inputs, config)
    sums = {
        "loss": (token_losses(logprob_R, inputs, config) * inputs.weight_R).sum(),
        "entropy": entropy_R.sum(),
        "clip_ratio/low_mean": is_low_R.sum(),
        "clip_ratio/high_mean": is_high_R.sum(),
        "clip_ratio/region_mean": (is_low_R | is_high_R).sum(),
    }
    if config.beta > 0.0:
        sums["kl"] = reference_kl(logprob_R, inputs, config).sum()
    return sums


def clip_extremes(
    logprob_R: Tensor, inputs: TokenInputs, config: LearnerConfig, lengths: Sequence[int]
) -> dict[str, Tensor]:
    """Return, over responses, the least share of tokens clipped below and the greatest share
    clipped above, by metric name. `lengths`, none 0, are those of the responses in order."""
    length_N = torch.tensor(lengths, device=logprob_R.device)
    owner_R = torch.repeat_interleave(length_N)
    low_N, high_N = (
        torch.zeros(len(lengths), device=logprob_R.device).index_add_(0, owner_R, each.float())
        / length_N
        for each in clipped(logprob_R, inputs, config)
    )
    return {"clip_ratio/low_min": low_N.min(), "clip_ratio/high_max": high_N.max()}


def clipped(logprob_R: Tensor, inputs: TokenInputs, config: LearnerConfig) -> tuple[Tensor, Tensor]:
    """Return whether each token is clipped below, and above, so that it carries no gradient."""
    low, high = clip_range(config)
    ratio_R, advantage_R = _ratio(logprob_R, inputs, config), inputs.advantage_R
    return (ratio_R < low) & (advantage_R < 0), (ratio_R > high) & (advantage_R > 0)


def capped(logprob_R: Tensor, inputs: TokenInputs, config: LearnerConfig) -> Tensor:
    """Return whether each token's u is past `importance_sampling_cap`, [R] bool."""
    if config.off_policy_correction == "none":
        return torch.zeros_like(logprob_R, dtype=torch.bool)
    log_u_R = _proximal(logprob_R, inputs) - inputs.behaviour_R
    return _bounded(log_u_R).exp() > config.importance_sampling_cap


def mismatch(logprob_R: Tensor, behaviour_R: Tensor) -> tuple[Tensor, Tensor]:
    """Return the sum of the k3 estimates of KL(mu || pi), and the greatest pi / mu."""
    log_u_R = logprob_R - behaviour_R
    return _k3(log_u_R).sum(), _bounded(log_u_R.max()).exp()


def _proximal(logprob_R: Tensor, inputs: TokenInputs) -> Tensor:
    return logprob_R.detach() if inputs.proximal_R is None else inputs.proximal_R


def _ratio(logprob_R: Tensor, inputs: TokenInputs, config: LearnerConfig) -> Tensor:
    is_plain = config.off_policy_correction == "none"
    old_R = inputs.behaviour_R if is_plain else _proximal(logprob_R, inputs)
    return _bounded(logprob_R - old_R).exp()


def _k3(d_R: Tensor) -> Tensor:
    d_R = _bounded(d_R)
    return d_R.exp() - d_R - 1.0


def _bounded(log_ratio_R: Tensor) -> Tensor:
    return log_ratio_R.clamp(-MOST_LOG_RATIO, MOST_LOG_RATIO)
