"""Algorithms by name: each is an advantage, a ratio, a surrogate and a normalisation of the loss.

`learner.algorithm` chooses one. It gives the fields of `LearnerConfig` in its row, which are its
published values, to those that a user does not set. Nothing else reads an algorithm's name."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

_GRPO = {
    "advantage": "group_mean", "scale_rewards": "group",
    "multi_objective_aggregation": "sum_then_normalize", "ratio": "token", "surrogate": "clip",
    "loss_type": "grpo", "epsilon": 0.2, "epsilon_high": 0.2,
}  # fmt: skip

PARTS = tuple(_GRPO)
"""The fields that an algorithm sets."""


def _with(**parts: Any) -> Mapping[str, Any]:
    return {**_GRPO, **parts}


ALGORITHMS: Mapping[str, Mapping[str, Any]] = {
    "grpo": _with(),
    "dr_grpo": _with(scale_rewards="none", loss_type="dr_grpo"),
    "dapo": _with(loss_type="dapo", epsilon_high=0.28),
    "bnpo": _with(loss_type="bnpo"),
    "gdpo": _with(multi_objective_aggregation="normalize_then_sum"),
    "rloo": _with(advantage="leave_one_out", scale_rewards="none", ratio="product"),
    "reinforce_plus_plus": _with(advantage="reward", scale_rewards="tokens", loss_type="bnpo"),
    "reinforce_plus_plus_baseline": _with(scale_rewards="tokens", loss_type="bnpo"),
    "gspo": _with(ratio="sequence", epsilon=3e-4, epsilon_high=4e-4),
    "gspo_token": _with(ratio="sequence_token", epsilon=3e-4, epsilon_high=4e-4),
    "cispo": _with(surrogate="weighted_log", loss_type="bnpo", epsilon=1.0, epsilon_high=4.0),
    "sapo": _with(surrogate="sigmoid"),
    "gmpo": _with(ratio="clipped_sequence", surrogate="linear", epsilon=0.4, epsilon_high=0.4),
    "ppo": _with(advantage="gae", scale_rewards="tokens", loss_type="bnpo"),
}
"""docs/algorithms.md has the papers."""
