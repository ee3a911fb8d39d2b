"""Section `weights`: how new weights get from the learner to the instances."""

from __future__ import annotations

from typing import Literal

from rhymeflow.config.section import Section


class WeightsConfig(Section):
    """How new weights get from the learner to the instances."""

    transport: Literal["shared_memory", "delta"] = "shared_memory"
    """`shared_memory`: an instance copies all weights of the version. `delta`: it copies what
    changed since the version that it has, where it changed little, and stands still for less time;
    the weights are the same to the last bit. Pays in bfloat16 at small learning rates
    (docs/weights.md)."""
