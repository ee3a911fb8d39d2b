"""Each loss and correction against a formula written with loops over sequences and tokens."""

import math
import random
from dataclasses import dataclass

import pytest
import torch

from rhymeflow.learner.algorithms.losses import (
    MOST_LOG_RATIO,
    TokenInputs,
    clip_range,
    mismatch,
    off_policy_weight,
    step_scale,
    token_losses,
    token_weight,
)
from tests.learner.builders import learner_config

LOSS_TYPES = ["grpo", "bnpo", "dr_grpo", "dapo"]
CORRECTIONS = ["none", "tis", "decoupled"]
MAX_LENGTH = 12
MEAN_TOKENS = 17.0


@dataclass
class Sequence:
    """One response; log-probabilities by policy. No tokens: masked out of the loss."""

    advantage: float
    policy: list[torch.Tensor]
    behaviour: list[float]
    proximal: list[float]
    reference: list[float]


def _sequences(seed: int) -> list[Sequence]:
    """Ratios on both sides of both clips and of the cap, both signs of advantage."""
    rng = random.Random(seed)
    made = []
    for length in (3, 1, 0, 7, MAX_LENGTH):
        policy = [rng.uniform(-4, -0.5) for _ in range(length)]
        near = [x + rng.uniform(-0.5, 0.5) for x in policy]
        made.append(
            Sequence(
                advantage=rng.uniform(-2, 2),
                policy=[torch.tensor(x, dtype=torch.float64, requires_grad=True) for x in policy],
                behaviour=[x + rng.uniform(-1.5, 1.0) for x in near],
                proximal=near,
                reference=[x + rng.uniform(-1, 1) for x in policy],
            )
        )
    return made


def _slow_token(s: Sequence, t: int, correction: str, beta: float, low: float, high: float):
    logp, advantage = s.policy[t], s.advantage
    anchor = s.behaviour[t] if correction == "none" else s.proximal[t]
    ratio = torch.exp(logp - anchor)
    clipped = ratio
    if ratio < 1 - low:
        clipped = torch.tensor(1 - low, dtype=torch.float64)
    if ratio > 1 + high:
        clipped = torch.tensor(1 + high, dtype=torch.float64)
    objective = (
        ratio * advantage if ratio * advantage < clipped * advantage else clipped * advantage
    )
    u = math.exp(s.proximal[t] - s.behaviour[t])
    if correction == "tis":
        objective = objective * (u if u < 2.0 else 2.0)
    if correction == "decoupled":
        objective = objective * (u if u <= 2.0 else 0.0)
    d = s.reference[t] - logp
    return -objective + beta * ratio * (torch.exp(d) - d - 1)


def _slow_loss(sequences: list[Sequence], loss_type: str, correction: str, beta: float):
    total = torch.tensor(0.0, dtype=torch.float64)
    tokens = sum(len(s.policy) for s in sequences)
    for s in sequences:
        inner = torch.tensor(0.0, dtype=torch.float64)
        for t in range(len(s.policy)):
            inner = inner + _slow_token(s, t, correction, beta, 0.2, 0.28)
        if loss_type == "grpo":
            inner = inner / max(len(s.policy), 1) / len(sequences)
        elif loss_type == "bnpo":
            inner = inner / tokens
        elif loss_type == "dapo":
            inner = inner / MEAN_TOKENS
        else:
            inner = inner / (len(sequences) * MAX_LENGTH)
        total = total + inner
    return total


def _inputs(sequences: list[Sequence], loss_type: str) -> TokenInputs:
    lengths = [len(s.policy) for s in sequences]
    scale = step_scale(
        loss_type, lengths, max_completion_length=MAX_LENGTH, mean_tokens=MEAN_TOKENS
    )
    weights = [token_weight(loss_type, length) * scale for length in lengths]

    def flat(per_token: list[list[float]]) -> torch.Tensor:
        return torch.tensor([x for xs in per_token for x in xs], dtype=torch.float64)

    return TokenInputs(
        advantage_R=flat([[s.advantage] * len(s.policy) for s in sequences]),
        weight_R=flat([[w] * len(s.policy) for s, w in zip(sequences, weights, strict=True)]),
        behaviour_R=flat([s.behaviour for s in sequences]),
        proximal_R=flat([s.proximal for s in sequences]),
        reference_R=flat([s.reference for s in sequences]),
    )


@pytest.mark.parametrize("beta", [0.0, 0.3])
@pytest.mark.parametrize("correction", CORRECTIONS)
@pytest.mark.parametrize("loss_type", LOSS_TYPES)
def test_equals_the_slow_formula(loss_type: str, correction: str, beta: float):
    config = learner_config(loss_type=loss_type, off_policy_correction=correction, beta=beta)
    for seed in range(5):
        sequences = _sequences(seed)
        leaves = [x for s in sequences for x in s.policy]
        slow = _slow_loss(sequences, loss_type, correction, beta)
        slow_gradient = torch.stack(torch.autograd.grad(slow, leaves))

        logprob = torch.stack([x.detach() for x in leaves]).requires_grad_()
        inputs = _inputs(sequences, loss_type)
        fast = (token_losses(logprob, inputs, config) * inputs.weight_R).sum()
        fast.backward()
        torch.testing.assert_close(fast, slow, rtol=1e-12, atol=1e-12)
        torch.testing.assert_close(logprob.grad, slow_gradient, rtol=1e-10, atol=1e-12)


def test_epsilon_high_none_is_epsilon():
    inputs = TokenInputs(*(torch.tensor(x) for x in ([1.0], [1.0], [0.0])))
    config = learner_config(epsilon=0.1, epsilon_high=None, off_policy_correction="none")
    loss = token_losses(torch.tensor([math.log(1.15)]), inputs, config)
    torch.testing.assert_close(loss, torch.tensor([-1.1]))


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
def test_the_kl_terms_gradient_is_exact_and_bounded(correction: str, log_ratio: float):
    config = learner_config(off_policy_correction=correction, beta=0.3)
    logprob, inputs = _one(log_ratio, 0.0, to="reference_R")
    token_losses(logprob, inputs, config).sum().backward()
    d = min(max(-log_ratio, -MOST_LOG_RATIO), MOST_LOG_RATIO)
    assert float(logprob.grad) == pytest.approx(-0.3 * d, rel=1e-6)


@pytest.mark.parametrize("advantage", [1.5, -1.5])
@pytest.mark.parametrize("log_ratio", EXTREMES)
@pytest.mark.parametrize("correction", CORRECTIONS)
def test_one_extreme_ratio_leaves_the_gradient_finite(
    correction: str, log_ratio: float, advantage: float
):
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
