"""What a token's loss and its gradient are; whole steps are compared with TRL's (`test_trl.py`)."""

import math

import pytest
import torch

from rhymeflow.learner.algorithms.corrections import off_policy_weight
from rhymeflow.learner.algorithms.losses import TokenInputs, mismatch, token_losses
from rhymeflow.learner.algorithms.surrogates import MOST_LOG_RATIO, clip_range
from tests.learner.builders import learner_config

CORRECTIONS = ["none", "tis", "decoupled"]


def test_mismatch_is_zero_for_one_policy_and_right_for_another():
    same = torch.tensor([-1.0, -2.0])
    kl, ratio = mismatch(same, same)
    assert (float(kl), float(ratio)) == (0.0, 1.0)
    kl, ratio = mismatch(torch.tensor([-1.0, -2.0]), torch.tensor([-2.0, -1.0]))
    assert float(kl) == pytest.approx((math.e - 2) + (1 / math.e + 1 - 1))
    assert float(ratio) == pytest.approx(math.e)


EXTREMES = [-90.0, -60.0, -30.0, -21.0, -19.0, -3.0, 0.0, 3.0, 19.0, 21.0, 30.0, 60.0, 90.0]
"""Log-ratios: of the policy to the reference, or to whatever sampled."""


def _one(log_ratio: float, advantage: float, *, to: str) -> tuple[torch.Tensor, TokenInputs]:
    """A float32 token whose log-ratio to one of the other policies is given, else 0."""
    logprob = torch.tensor([min(log_ratio, 0.0) - 1.0]).requires_grad_()
    known = {x: logprob.detach().clone() for x in ("behaviour_R", "proximal_R", "reference_R")}
    known[to] = known[to] - log_ratio
    return logprob, TokenInputs(torch.tensor([advantage]), torch.ones(1), **known)


@pytest.mark.parametrize("log_ratio", EXTREMES)
@pytest.mark.parametrize("correction", CORRECTIONS)
def test_the_kl_terms_gradient_is_exact_and_bounded(correction, log_ratio):
    config = learner_config(off_policy_correction=correction, beta=0.3)
    logprob, inputs = _one(log_ratio, 0.0, to="reference_R")
    token_losses(logprob, inputs, config).sum().backward()
    d = min(max(-log_ratio, -MOST_LOG_RATIO), MOST_LOG_RATIO)
    assert float(logprob.grad) == pytest.approx(-0.3 * d, rel=1e-6)


@pytest.mark.parametrize("advantage", [1.5, -1.5])
@pytest.mark.parametrize("log_ratio", EXTREMES)
@pytest.mark.parametrize("correction", CORRECTIONS)
def test_one_extreme_ratio_leaves_the_gradient_finite(correction, log_ratio, advantage):
    """As float64 says of the formula, to the bound; past it there is none."""
    config = learner_config(off_policy_correction=correction)
    low, high = clip_range(config)
    for to in ("behaviour_R", "proximal_R"):
        logprob, inputs = _one(log_ratio, advantage, to=to)
        loss = token_losses(logprob, inputs, config).sum()
        loss.backward()
        assert math.isfinite(loss)
        is_ratio = to == ("behaviour_R" if correction == "none" else "proximal_R")
        ratio = math.exp(log_ratio) if is_ratio else 1.0
        log_u = inputs.proximal_R - inputs.behaviour_R
        weight = 1.0 if correction == "none" else float(off_policy_weight(log_u, config))
        carries = abs(math.log(ratio)) < MOST_LOG_RATIO and (
            ratio <= high if advantage > 0 else ratio >= low
        )
        exact = -weight * ratio * advantage if carries else 0.0
        assert float(logprob.grad) == pytest.approx(exact, rel=2e-6)
        assert all(map(math.isfinite, mismatch(logprob.detach(), inputs.behaviour_R)))
