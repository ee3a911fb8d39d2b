"""Components of a reward: their names, and their weighted sum."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence

from rhymeflow.config import EnvironmentClass, RewardFunction
from rhymeflow.errors import UserError
from rhymeflow.utils.user_modules import names_pickle
from rhymeflow.utils.user_values import LARGEST


def component_names(functions: Iterable[RewardFunction]) -> tuple[str, ...]:
    """Return the name of each function's reward: its short name, numbered if two are equal."""
    names: list[str] = []
    for each in functions:
        spec = each.function
        if spec.startswith("recipe:") or "." not in spec:
            short = spec
        else:
            is_in_file = ".py:" in spec or names_pickle(spec)
            short = spec.rpartition(":" if is_in_file else ".")[2]
        number = 1 + sum(name.partition("#")[0] == short for name in names)
        names.append(short if number == 1 else f"{short}#{number}")
    return tuple(names)


class WeightedSum:
    """The weighted sum of the rewards of functions and environments."""

    def __init__(
        self, functions: Sequence[RewardFunction], environments: Sequence[EnvironmentClass] = ()
    ) -> None:
        names = [*component_names(functions), *(each.reward_name for each in environments)]
        weights = [each.weight for each in functions] + [each.weight for each in environments]
        if twice := sorted(name for name in set(names) if names.count(name) > 1):
            raise UserError(
                f"environment.classes: {twice[0]!r} is the name of a reward function too; give the "
                "environment another `name`"
            )
        self.weights = dict(zip(names, weights, strict=True))
        """Weights by name, in the order of the configuration."""

    def problem(self, name: str, rewards: Sequence[float | None]) -> str | None:
        """Return why the rewards are not usable, or None; `name` names the responses in it."""
        where = f"reward functions {', '.join(self.weights)}, {name}"
        if None in rewards:
            given = "; an agent's program returns its reward, or writes it to RHYMEFLOW_REWARD"
            given = given if "agent" in self.weights else ""
            return f"{where}: all returned None: none applies to this sample{given}"
        largest = max((each for each in rewards if each is not None), key=abs)
        if abs(largest) <= LARGEST:
            return None
        return f"{where}: the weighted sum is {largest:g}, the largest size is {LARGEST:g}"

    def ordered(self, components: Mapping[str, float]) -> dict[str, float]:
        """Return the components in the order of the configuration."""
        return {name: components[name] for name in self.weights if name in components}

    def __call__(self, components: Mapping[str, float]) -> float | None:
        """Return the weighted sum of the components; None if none of the rewards applies."""
        ordered = self.ordered(components)
        if not ordered and self.weights:
            return None
        return float(sum(self.weights[name] * value for name, value in ordered.items()))
