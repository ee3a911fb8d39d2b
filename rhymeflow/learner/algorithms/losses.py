"""The loss of each response token.

For each response token, with ratio r = pi / pi_prox and advantage A, the loss is

    w * surrogate(r, A)  +  beta * KL

pi is the policy being trained, pi_prox the policy that the surrogate keeps it close to, mu the
behaviour policy that sampled the token. Ratio and surrogate are in `surrogates.py`; PPO's is
-min(r * A, clip(r, 1 - epsilon, 1 + epsilon_high) * A). w is in `corrections.py`, of
u = pi_prox / mu. With `off_policy_correction: none` pi_prox is mu and w is 1; else pi_prox is the
learner's policy when the step began. With one optimizer step per batch pi_prox is pi without
gradient, so r is 1, nothing is clipped, and no second forward pass is needed.

A step's loss is a sum over tokens, each times a constant of its response, times a constant of the
step (`normalisations.py`). So it and its gradient do not depend on the split into micro-batches,
each of which has whole responses. Where a token's loss depends on others of its
response (`LearnerConfig.needs_whole_responses`), they are scored before, and `gradient` is by that
score.

With a teacher (`distillation`, mode `sampled_token`) A is that of the rewards plus a weight times
log pi_teacher - log pi_prox of the token (`taught`).

The KL term is by default r * k3, k3 = exp(d) - d - 1, d = log pi_ref - log pi (GRPO, arXiv
2402.03300, equation 4). The factor r makes the gradient that of KL(pi || pi_ref) (DeepSeek-V3.2,
arXiv 2512.02556; TRL's default). That gradient is -r * d times that of log pi, and is written
explicitly: autograd would compute it from terms of size exp(d), which cancel to 0 in float32 from
about d = 20.

Log-ratios are clamped to +-`MOST_LOG_RATIO`, so that one extreme token leaves loss and gradient
finite: past it a ratio carries no gradient, and the KL term has the gradient at the bound. verl has
the same bound; its other one, k3 <= 10, is not adopted, since it takes effect from d = 2.6.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace

import torch
from torch import Tensor

from rhymeflow.config import LearnerConfig
from rhymeflow.errors import UserError
from rhymeflow.learner.algorithms import corrections, normalisations
from rhymeflow.learner.algorithms.advantages import estimator_of, group_advantages
from rhymeflow.learner.algorithms.surrogates import (
    Responses,
    bounded,
    clip_range,
    ratio_of,
    surrogate_of,
    token_ratio,
)

PARTS_OF_RESPONSES = Responses(())
"""Of tokens that are not those of whole responses."""


@dataclass(frozen=True)
class TokenInputs:
    """Constants in the loss of R response tokens; tensors are float32 [R]."""

    advantage_R: Tensor
    weight_R: Tensor
    """Factor of the token's loss in the sum, of `normalisations.weights`."""
    behaviour_R: Tensor
    """log mu."""
    proximal_R: Tensor | None = None
    """log pi_prox; `None` if it is the policy itself, without gradient."""
    reference_R: Tensor | None = None
    """log pi_ref, if there is a reference model."""
    teacher_R: Tensor | None = None
    """log pi_teacher, if it has a part in the advantage."""
    chosen_R: Tensor | None = None
    """1 where the token has a part in the surrogate, else 0 (`top_entropy_quantile`)."""
    responses: Responses = PARTS_OF_RESPONSES
    """Whose the tokens are."""
    mean_weight: float = 1.0
    """What weights are divided by (`normalize_importance_weights`)."""

    def __getitem__(self, chunk: slice) -> TokenInputs:
        """Select tokens, of parts of responses."""
        parts = {k: x[chunk] for k, x in vars(self).items() if isinstance(x, Tensor)}
        return replace(self, **parts, responses=PARTS_OF_RESPONSES)  # type: ignore[arg-type]


def check_parts(config: LearnerConfig, longest: int) -> None:
    """Raise `UserError` if the configuration names a part that there is not, or one of a user does
    not give made-up responses, of up to `longest` tokens, what it should."""
    normalisations.check(config, longest)
    group_advantages([0.0, 1.0, 2.0, 2.0], [0, 0, 1, 1], "none", estimator_of(config.advantage))
    logprob_R = torch.tensor([-1.0, -2.0, -0.1, -0.5], requires_grad=True)
    behaviour_R, advantage_R = torch.full((4,), -0.9), torch.tensor([1.0, -1.0, -1.0, -1.0])
    ratio = ratio_of(config.ratio)
    ratio_R = ratio(logprob_R - behaviour_R, advantage_R, Responses((1, 3)), config)
    loss_R = surrogate_of(config.surrogate)(ratio_R, advantage_R, logprob_R, config)
    for field, value_R in (("ratio", ratio_R), ("surrogate", loss_R)):
        if not value_R.isfinite().all():
            where, found = f"learner.{field}: {getattr(config, field)}", value_R.tolist()
            raise UserError(f"{where} returned {found}, should be a finite number for each token")
    if not loss_R.requires_grad:
        where = f"learner.surrogate: {config.surrogate}"
        raise UserError(f"{where} returned losses without a gradient, so nothing would be learnt")


def token_losses(logprob_R: Tensor, inputs: TokenInputs, config: LearnerConfig) -> Tensor:
    """Return the unweighted loss of each token, [R]; gradient flows only through `logprob_R`."""
    inputs = taught(logprob_R, inputs, config)
    ratio_R = _ratio(logprob_R, inputs, config)
    loss_R = surrogate_of(config.surrogate)(ratio_R, inputs.advantage_R, logprob_R, config)
    if inputs.chosen_R is not None:
        loss_R = loss_R * inputs.chosen_R
    if config.corrects:
        loss_R = loss_R * correction(logprob_R, inputs, config)
    if config.kl_weight > 0.0:
        loss_R = loss_R + config.kl_weight * reference_kl(logprob_R, inputs, config)
    return loss_R


def taught(logprob_R: Tensor, inputs: TokenInputs, config: LearnerConfig) -> TokenInputs:
    """Return the inputs with the teacher's part in the advantages: log pi_teacher - log pi_prox,
    whose policy gradient is that of -KL(pi || pi_teacher)."""
    if inputs.teacher_R is None:
        return inputs
    lead_R = bounded(inputs.teacher_R - _proximal(logprob_R, inputs))
    advantage_R = inputs.advantage_R + config.distillation.weight * lead_R
    return replace(inputs, advantage_R=advantage_R, teacher_R=None)


def gradient(logprob_R: Tensor, inputs: TokenInputs, config: LearnerConfig) -> Tensor:
    """Return the gradient of the weighted losses' sum by the log-probabilities, [R]."""
    leaf_R = logprob_R.detach().requires_grad_()
    with torch.enable_grad():
        loss = (token_losses(leaf_R, inputs, config) * inputs.weight_R).sum()
    return torch.autograd.grad(loss, leaf_R)[0]


def correction(logprob_R: Tensor, inputs: TokenInputs, config: LearnerConfig) -> Tensor:
    """Return w of the module's docstring, [R], 0 where a token is masked."""
    log_u_R = _log_u(logprob_R, inputs)
    weight_R = corrections.off_policy_weight(log_u_R, config, inputs.responses)
    if config.normalize_importance_weights:
        weight_R = weight_R / inputs.mean_weight
    if config.off_policy_masks:
        weight_R = weight_R * corrections.kept(log_u_R, config, inputs.responses)
    if (threshold := config.off_policy_mask_threshold) is not None:
        weight_R = weight_R * corrections.kept_of_negative(
            logprob_R, inputs.behaviour_R, inputs.advantage_R, inputs.responses, threshold
        )
    return weight_R


KL: Mapping[str, tuple[Callable[[Tensor], Tensor], Callable[[Tensor], Tensor]]] = {
    "k1": (lambda d: -d, torch.ones_like),
    "k2": (lambda d: d.square() / 2.0, lambda d: -d),
    "k3": (lambda d: _k3(d), lambda d: -d.expm1()),
    "k1+": (lambda d: -d, lambda d: -d),
    "k3+": (lambda d: _k3(d), lambda d: -d),
}
"""Of d = log pi_ref - log pi: an estimate of KL(pi || pi_ref), and its gradient by log pi
(http://joschu.net/blog/kl-approx.html)."""


def reference_kl(logprob_R: Tensor, inputs: TokenInputs, config: LearnerConfig) -> Tensor:
    """Return each token's estimate of KL(pi || pi_ref), times r if it is corrected, [R]."""
    assert inputs.reference_R is not None, "no reference log-probabilities"
    policy_R, kind = logprob_R.detach(), config.kl_estimator
    d_R = bounded(inputs.reference_R - policy_R)
    value_R, slope_R = (each(d_R) for each in KL[kind])
    zero_R = logprob_R - policy_R  # only its gradient is not 0
    if not config.use_bias_correction_kl:
        return value_R + slope_R * zero_R
    log_ratio_R = policy_R - _old(policy_R, inputs, config)
    ratio_R = token_ratio(log_ratio_R, inputs.advantage_R, inputs.responses, config)
    # The sum for k3 is -d, but not in float32, where d is large.
    slope_R = -d_R if kind == "k3" else value_R + slope_R
    return ratio_R * value_R + ratio_R * slope_R * zero_R


WEIGHT_METRICS = ("off_policy/mean_weight", "off_policy/masked_share")
DIVERGENCE = "distillation/divergence"


def diagnosis_names(config: LearnerConfig) -> tuple[str, ...]:
    """Return the names of the metrics in `diagnose`."""
    clips = ("clip_ratio/low_mean", "clip_ratio/high_mean", "clip_ratio/region_mean")
    weights = WEIGHT_METRICS if config.corrects else ()
    values = ("value/loss", "value/clip_ratio") if config.has_critic else ()
    kl = ("kl",) if config.kl_weight > 0.0 else ()
    taught_by = (DIVERGENCE,) if config.distillation.is_used else ()
    return ("loss", "entropy", *clips, *weights, *values, *kl, *taught_by)


def diagnose(
    logprob_R: Tensor, entropy_R: Tensor, inputs: TokenInputs, config: LearnerConfig
) -> dict[str, Tensor]:
    """Return sums over the tokens by metric name, without gradient; `loss` is weighted, and lacks
    the divergence of whole distributions."""
    sums = {}
    if inputs.teacher_R is not None:
        sums[DIVERGENCE] = (logprob_R - inputs.teacher_R).sum()
    inputs = taught(logprob_R, inputs, config)
    is_low_R, is_high_R = clipped(logprob_R, inputs, config)
    loss_R = token_losses(logprob_R, inputs, config)
    if config.entropy_coef > 0.0:
        loss_R = loss_R - config.entropy_coef * entropy_R
    sums |= {
        "loss": (loss_R * inputs.weight_R).sum(),
        "entropy": entropy_R.sum(),
        "clip_ratio/low_mean": is_low_R.sum(),
        "clip_ratio/high_mean": is_high_R.sum(),
        "clip_ratio/region_mean": (is_low_R | is_high_R).sum(),
    }
    if config.corrects:
        weight_R = correction(logprob_R, inputs, config)
        sums |= dict(zip(WEIGHT_METRICS, (weight_R.sum(), (weight_R == 0.0).sum()), strict=True))
    if config.kl_weight > 0.0:
        sums["kl"] = reference_kl(logprob_R, inputs, config).sum()
    return sums


def clip_extremes(
    logprob_R: Tensor, inputs: TokenInputs, config: LearnerConfig
) -> dict[str, Tensor]:
    """Return, over responses, the least share of tokens clipped below and the greatest share
    clipped above, by metric name."""
    is_clipped = clipped(logprob_R, inputs, config)
    low_R, high_R = (inputs.responses.mean(each.float()) for each in is_clipped)
    return {"clip_ratio/low_min": low_R.min(), "clip_ratio/high_max": high_R.max()}


def clipped(logprob_R: Tensor, inputs: TokenInputs, config: LearnerConfig) -> tuple[Tensor, Tensor]:
    """Return whether each token is clipped below, and above, so that it carries no gradient. A
    weight (`weighted_log`) is clipped on both sides, whatever the advantage, and carries it."""
    inputs = taught(logprob_R, inputs, config)
    low, high = clip_range(config)
    if config.ratio == "clipped_sequence":  # each token's own, before their mean
        low, high, ratio_R = low - 1.0, high - 1.0, logprob_R - _old(logprob_R, inputs, config)
    else:
        ratio_R = _ratio(logprob_R, inputs, config)
    is_low_R, is_high_R = ratio_R < low, ratio_R > high
    if not config.clips:
        return torch.zeros_like(is_low_R), torch.zeros_like(is_high_R)
    if config.surrogate == "weighted_log":
        return is_low_R, is_high_R
    return is_low_R & (inputs.advantage_R < 0), is_high_R & (inputs.advantage_R > 0)


def capped(logprob_R: Tensor, inputs: TokenInputs, config: LearnerConfig) -> Tensor:
    """Return whether each token's u is past a bound of its weight, [R] bool."""
    if config.off_policy_correction in ("none", "proximal"):
        return torch.zeros_like(logprob_R, dtype=torch.bool)
    return corrections.is_outside(_log_u(logprob_R, inputs), config, inputs.responses)


def mismatch(logprob_R: Tensor, behaviour_R: Tensor) -> tuple[Tensor, Tensor]:
    """Return the sum of the k3 estimates of KL(mu || pi), and the greatest pi / mu."""
    log_u_R = logprob_R - behaviour_R
    return _k3(log_u_R).sum(), bounded(log_u_R.max()).exp()


def _log_u(logprob_R: Tensor, inputs: TokenInputs) -> Tensor:
    return _proximal(logprob_R, inputs) - inputs.behaviour_R


def _proximal(logprob_R: Tensor, inputs: TokenInputs) -> Tensor:
    return logprob_R.detach() if inputs.proximal_R is None else inputs.proximal_R


def _old(logprob_R: Tensor, inputs: TokenInputs, config: LearnerConfig) -> Tensor:
    is_plain = config.off_policy_correction == "none"
    return inputs.behaviour_R if is_plain else _proximal(logprob_R, inputs)


def _ratio(logprob_R: Tensor, inputs: TokenInputs, config: LearnerConfig) -> Tensor:
    log_ratio_R = logprob_R - _old(logprob_R, inputs, config)
    ratio = ratio_of(config.ratio)
    return ratio(log_ratio_R, inputs.advantage_R, inputs.responses, config)


def _k3(d_R: Tensor) -> Tensor:
    d_R = bounded(d_R)
    return d_R.exp() - d_R - 1.0
