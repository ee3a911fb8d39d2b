"""Normalisations of the loss: what a response's tokens weigh in it, and what it is divided by.

Each is a pure function of one response, so that gradients can be accumulated before the batch is
complete. `learner.loss_type` names it, or a function of a user."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from functools import cache
from numbers import Real

from rhymeflow.config import LearnerConfig
from rhymeflow.errors import UserError
from rhymeflow.utils.user_modules import named_or_own
from rhymeflow.utils.user_values import described, shown

Normalisation = Callable[[int, int], tuple[float, float]]
"""Of a response's tokens in the loss, 0 if it is masked, and `rollout.max_completion_length`: the
factor of each of its tokens' losses, and what it adds to the divisor of the optimizer step."""


def by_response(length: int, _: int) -> tuple[float, float]:
    """Mean over a response's tokens, then over responses, masked ones included: GRPO (arXiv
    2402.03300, equation 3), as in TRL."""
    return 1 / max(length, 1), 1.0


def by_token(length: int, _: int) -> tuple[float, float]:
    """Mean over tokens: DAPO (arXiv 2503.14476, equation 8)."""
    return 1.0, float(length)


def by_constant(_: int, longest: int) -> tuple[float, float]:
    """The sum, divided by what does not depend on lengths: Dr. GRPO (arXiv 2503.20783)."""
    return 1.0, float(longest)


NORMALISATIONS: Mapping[str, Normalisation] = {
    "grpo": by_response,
    "bnpo": by_token,
    "dapo": by_token,
    "dr_grpo": by_constant,
}

OVER_BATCH = ("dapo",)
"""Those whose divisor is the mean over the batch's optimizer steps, and not the step's own."""


def weights(name: str, lengths: Sequence[int], longest: int) -> list[float]:
    """Return the factor, before `scales`, of the loss of each response's tokens."""
    normalise = normalisation_of(name)
    return [normalise(length, longest)[0] for length in lengths]


def scales(name: str, steps: Sequence[Sequence[int]], longest: int) -> list[float]:
    """Return the factor of each optimizer step's loss and gradient, of the lengths of the step's
    responses."""
    normalise = normalisation_of(name)
    divisors = [sum(normalise(length, longest)[1] for length in lengths) for lengths in steps]
    if name in OVER_BATCH:
        divisors = [sum(divisors) / len(divisors)] * len(divisors)
    for lengths, divisor in zip(steps, divisors, strict=True):
        if divisor == 0.0 and any(lengths):
            raise UserError(
                f"learner.loss_type: {name} adds nothing to the divisor for any response of an "
                f"optimizer step, of {min(lengths)} to {max(lengths)} tokens"
            )
    return [1 / divisor if divisor else 1.0 for divisor in divisors]


@cache
def normalisation_of(name: str) -> Normalisation:
    """Return `learner.loss_type`. Raises `UserError` if there is no such normalisation."""
    takes = "length, max_completion_length"
    normalise = named_or_own("learner.loss_type", name, NORMALISATIONS, takes)
    if name in NORMALISATIONS:
        return normalise

    def checked(length: int, longest: int) -> tuple[float, float]:
        where = f"learner.loss_type: {name}"
        try:
            found = normalise(length, longest)
        except Exception as error:
            raise UserError(f"{where} raised {described(error)}") from error
        if isinstance(found, tuple) and len(found) == 2 and all(map(_is_finite, found)):
            weight, part = found
            if part >= 0.0:
                return float(weight), float(part)
        raise UserError(
            f"{where} returned {shown(found)} for a response of {length} tokens; give a factor of "
            "its tokens' losses and what it adds to the divisor, which is not negative"
        )

    return checked


def _is_finite(value: object) -> bool:
    return isinstance(value, Real) and math.isfinite(value)


def check(config: LearnerConfig, longest: int) -> None:
    """Raise `UserError` if there is no such normalisation, or it gives made-up responses, the
    longest of so many tokens, nothing to learn from."""
    lengths = [longest, 0, 1]
    scales(config.loss_type, [lengths], longest)
    factors = weights(config.loss_type, lengths, longest)
    if not (factors[0] and factors[2]):
        raise UserError(
            f"learner.loss_type: {config.loss_type} gave responses of {longest}, 0 and 1 tokens "
            f"the factors {factors}; only that without tokens may have 0"
        )
