"""Each function's share of a reward: its name, and how the shares make the reward.

Knows nothing of how functions are called.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence

from rhymeflow.config import RewardFunction

LARGEST = 1e15
"""Size of a reward at most. The learner computes in float32, which ends at 3e38: sums of squares of
such rewards stay finite, of larger ones they become infinite, and the loss nothing."""


def component_names(functions: Iterable[RewardFunction]) -> tuple[str, ...]:
    """Name each function's share of the reward: its short name, numbered where two are equal."""
    names: list[str] = []
    for each in functions:
        spec = each.function
        if spec.startswith("recipe:") or "." not in spec:
            short = spec
        else:
            short = spec.rpartition(":")[2] if ".py:" in spec else spec.rpartition(".")[2]
        number = 1 + sum(name.partition("#")[0] == short for name in names)
        names.append(short if number == 1 else f"{short}#{number}")
    return tuple(names)


class WeightedSum:
    """The reward as the weighted sum of its components."""

    def __init__(self, functions: Sequence[RewardFunction]) -> None:
        self._weights = dict(
            zip(component_names(functions), (each.weight for each in functions), strict=True)
        )

    @property
    def names(self) -> tuple[str, ...]:
        """The components' names, in the order of the configuration."""
        return tuple(self._weights)

    def ordered(self, components: Mapping[str, float]) -> dict[str, float]:
        """The components that there are, in the order of the configuration."""
        return {name: components[name] for name in self._weights if name in components}

    def __call__(self, components: Mapping[str, float]) -> float | None:
        """Sum the components that there are; None if no function applied."""
        found = self.ordered(components)
        if not found:
            return None
        return sum(self._weights[name] * value for name, value in found.items())
