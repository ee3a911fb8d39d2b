"""Parameters that are not trained.

Holds true: what is frozen has no gradient, no master and no state of the optimizer, and stays as it
was loaded. Knows nothing of why.
"""

from __future__ import annotations

from collections.abc import Sequence
from fnmatch import fnmatchcase

from torch import nn

from rhymeflow.errors import UserError


def freeze(model: nn.Module, patterns: Sequence[str]) -> None:
    """Stop the parameters that a pattern matches from being trained, by any of their names.

    Raises:
        UserError: a pattern matches none, or no parameter is left.
    """
    named = list(model.named_parameters(remove_duplicate=False))
    for pattern in patterns:
        found = [parameter for name, parameter in named if fnmatchcase(name, pattern)]
        if not found:
            raise UserError(
                f"learner.frozen_parameters: {pattern!r} matches no parameter of the model, whose "
                f"names are as {named[0][0]!r} and {named[-1][0]!r}"
            )
        for parameter in found:
            parameter.requires_grad_(False)
    if patterns and not any(parameter.requires_grad for _, parameter in named):
        raise UserError("learner.frozen_parameters: every parameter is frozen, none is trained")


def num_trained(model: nn.Module) -> int:
    """Numbers in parameters that are not frozen, tied ones once."""
    return sum(each.numel() for each in model.parameters() if each.requires_grad)


__all__ = ["freeze", "num_trained"]
