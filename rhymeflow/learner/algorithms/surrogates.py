"""Probability ratios, and surrogates: what is maximized, of a ratio and an advantage.

Each is a pure function of a row's tokens. A ratio is of log-ratios d = log pi - log pi_old; those
that mix the tokens of a response need whole responses. A surrogate returns each token's loss.
`learner.ratio` and `learner.surrogate` name them, or a function of a user."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from functools import cache
from typing import Any

import numpy as np
import torch
from torch import Tensor

from rhymeflow.config import LearnerConfig
from rhymeflow.errors import UserError
from rhymeflow.utils.user_modules import Rule, named_or_own
from rhymeflow.utils.user_values import described, shown

MOST_LOG_RATIO = 20.0  # greatest log-ratio, and negated the least; exp(20) is 5e8


class Responses:
    """Whose tokens are in a row: response after response, whole ones."""

    def __init__(self, lengths: Sequence[int]) -> None:
        self.lengths = lengths  # tokens of each response in order, none 0
        self._on_device: tuple[Tensor, Tensor] | None = None

    def sum(self, x_R: Tensor) -> Tensor:
        """Return for each token the sum over its response, [R]."""
        owner_R, _ = self._owner_and_length(x_R)
        return x_R.new_zeros(len(self.lengths)).index_add(0, owner_R, x_R)[owner_R]

    def mean(self, x_R: Tensor) -> Tensor:
        """Return for each token the mean over its response, [R]."""
        return self.sum(x_R) / self._owner_and_length(x_R)[1]

    def max(self, x_R: Tensor) -> Tensor:
        """Return for each token the maximum over its response, [R], without gradient."""
        owner_R, _ = self._owner_and_length(x_R)
        lowest_N = x_R.new_full((len(self.lengths),), -torch.inf)
        return lowest_N.scatter_reduce(0, owner_R, x_R.detach(), "amax")[owner_R]

    def _owner_and_length(self, x_R: Tensor) -> tuple[Tensor, Tensor]:
        if self._on_device is None:
            numbers = np.arange(len(self.lengths)), np.asarray(self.lengths)
            spread = (torch.from_numpy(np.repeat(each, self.lengths)) for each in numbers)
            owner_R, length_R = (each.to(x_R.device) for each in spread)
            self._on_device = owner_R, length_R
        return self._on_device


def bounded(log_ratio_R: Tensor) -> Tensor:
    """Clamp log-ratios to +-`MOST_LOG_RATIO`; past it they carry no gradient. NaN stays NaN, with
    its gradient, which a clamp alone would make 0: the step is to be skipped and said."""
    clamped_R = log_ratio_R.clamp(-MOST_LOG_RATIO, MOST_LOG_RATIO)
    return torch.where(log_ratio_R.isnan(), log_ratio_R, clamped_R)


def clip_range(config: LearnerConfig) -> tuple[float, float]:
    """Return the bounds that `epsilon` and `epsilon_high` give a ratio."""
    high = config.epsilon if config.epsilon_high is None else config.epsilon_high
    return 1.0 - config.epsilon, 1.0 + high


# -- Ratios ----------------------------------------------------------------------------------------

Ratio = Callable[[Tensor, Tensor, Responses, LearnerConfig], Tensor]
"""Of log-ratios [R], advantages [R], whose the tokens are, and the configuration: ratios [R]."""


def token_ratio(d_R: Tensor, _: Tensor, __: Responses, ___: LearnerConfig) -> Tensor:
    """Each token's own: PPO (arXiv 1707.06347, section 3)."""
    return bounded(d_R).exp()


def product_ratio(d_R: Tensor, _: Tensor, responses: Responses, __: LearnerConfig) -> Tensor:
    """The response's, as one action: RLOO (arXiv 2402.14740), with PPO's ratio."""
    return bounded(responses.sum(d_R)).exp()


def sequence_ratio(d_R: Tensor, _: Tensor, responses: Responses, __: LearnerConfig) -> Tensor:
    """The geometric mean over the response: GSPO (arXiv 2507.18071, section 4.1)."""
    return bounded(responses.mean(d_R)).exp()


def sequence_token_ratio(d_R: Tensor, _: Tensor, responses: Responses, __: LearnerConfig) -> Tensor:
    """The same in value, with each token's own gradient: GSPO-token (section 4.3)."""
    return bounded(responses.mean(d_R).detach() + d_R - d_R.detach()).exp()


def clipped_sequence_ratio(
    d_R: Tensor, advantage_R: Tensor, responses: Responses, config: LearnerConfig
) -> Tensor:
    """The geometric mean of ratios that are clipped each, in log space and on the side of the
    advantage: GMPO (arXiv 2507.20673)."""
    sign_R = torch.sign(advantage_R)
    low, high = clip_range(config)
    clipped_R = d_R.clamp(low - 1.0, high - 1.0)
    return bounded(responses.mean(sign_R * torch.min(sign_R * d_R, sign_R * clipped_R))).exp()


RATIOS: Mapping[str, Ratio] = {
    "token": token_ratio,
    "product": product_ratio,
    "sequence": sequence_ratio,
    "sequence_token": sequence_token_ratio,
    "clipped_sequence": clipped_sequence_ratio,
}


# -- Surrogates ------------------------------------------------------------------------------------

Surrogate = Callable[[Tensor, Tensor, Tensor, LearnerConfig], Tensor]
"""Of ratios, advantages and log-probabilities, [R] each, and the configuration: losses [R]."""


def clip(ratio_R: Tensor, advantage_R: Tensor, _: Tensor, config: LearnerConfig) -> Tensor:
    """-min(r A, clip(r) A): PPO (arXiv 1707.06347, equation 7), with other bounds above and below
    (DAPO, arXiv 2503.14476, section 3.1). `delta` bounds the first r (INTELLECT-2, arXiv
    2505.07291), `dual_clip` the loss at negative A (arXiv 1912.09729)."""
    low, high = clip_range(config)
    free_R = ratio_R if config.delta is None else ratio_R.clamp(max=config.delta)
    loss_R = -torch.min(free_R * advantage_R, ratio_R.clamp(low, high) * advantage_R)
    if config.dual_clip is None:
        return loss_R
    most_R = -config.dual_clip * advantage_R
    return torch.where(advantage_R < 0.0, torch.min(loss_R, most_R), loss_R)


def weighted_log(
    ratio_R: Tensor, advantage_R: Tensor, logprob_R: Tensor, config: LearnerConfig
) -> Tensor:
    """-sg(clip(r)) A log pi, which leaves every token a gradient: CISPO (arXiv 2506.13585,
    equation 4)."""
    return -ratio_R.detach().clamp(*clip_range(config)) * advantage_R * logprob_R


def sigmoid(ratio_R: Tensor, advantage_R: Tensor, _: Tensor, config: LearnerConfig) -> Tensor:
    """-4/t sigmoid(t (r - 1)) A, a smooth clip: SAPO (arXiv 2511.20347)."""
    positive, negative = config.sapo_temperature_pos, config.sapo_temperature_neg
    t_R = torch.where(advantage_R > 0.0, positive, negative).to(ratio_R.dtype)
    return -torch.sigmoid(t_R * (ratio_R - 1.0)) * 4.0 / t_R * advantage_R


def linear(ratio_R: Tensor, advantage_R: Tensor, _: Tensor, __: LearnerConfig) -> Tensor:
    """-r A: what all others are near r = 1 (arXiv 1707.06347, equation 6)."""
    return -ratio_R * advantage_R


SURROGATES: Mapping[str, Surrogate] = {
    "clip": clip,
    "weighted_log": weighted_log,
    "sigmoid": sigmoid,
    "linear": linear,
}


@cache
def ratio_of(name: str) -> Ratio:
    """Return `learner.ratio`. Raises `UserError` if there is no such ratio."""
    return _rule("ratio", name, RATIOS, "log_ratios, advantages, responses, config")


@cache
def surrogate_of(name: str) -> Surrogate:
    """Return `learner.surrogate`. Raises `UserError` if there is no such surrogate."""
    return _rule("surrogate", name, SURROGATES, "ratios, advantages, logprobs, config")


def _rule(field: str, name: str, known: Mapping[str, Rule], takes: str) -> Rule:
    """Return the rule of a name; what a user's returns is checked at each call."""
    rule = named_or_own(f"learner.{field}", name, known, takes)
    if name in known:
        return rule

    def call(of_R: Tensor, *others: Any) -> Tensor:
        where = f"learner.{field}: {name}"
        try:
            value_R = rule(of_R, *others)
        except Exception as error:
            raise UserError(f"{where} raised {described(error)}") from error
        if isinstance(value_R, Tensor) and value_R.shape == of_R.shape:
            return value_R
        size = f"size {[*value_R.shape]}" if isinstance(value_R, Tensor) else shown(value_R)
        raise UserError(f"{where} returned {size}, should be a tensor of size {[*of_R.shape]}")

    return call  # type: ignore[return-value]
