"""The numbers of a batch, compared with numpy by hand."""

from __future__ import annotations

import numpy as np
import pytest

from rhymeflow.learner.metrics import batch_metrics
from rhymeflow.learner.sample import Sample


def sample(reward: float, **components: float) -> Sample:
    return Sample(0, [1], [2, 3], [0.0, 0.0], [0, 0], reward, False, components)


def test_each_reward_function_has_its_mean_and_deviation_over_what_it_applied_to() -> None:
    metrics = batch_metrics(
        [
            sample(1.5, right=1.0, short=0.5),
            sample(0.25, short=0.25),
            sample(0.0, right=0.0),
            sample(1.0, right=1.0, only=3.0),
        ]
    )
    expected = {
        "rewards/right/mean": np.mean([1.0, 0.0, 1.0]),
        "rewards/right/std": np.std([1.0, 0.0, 1.0], ddof=1),
        "rewards/short/mean": 0.375,
        "rewards/short/std": np.std([0.5, 0.25], ddof=1),
        "rewards/only/mean": 3.0,
        "rewards/only/std": 0.0,
        "reward": np.mean([1.5, 0.25, 0.0, 1.0]),
        "reward_std": np.std([1.5, 0.25, 0.0, 1.0], ddof=1),
    }
    assert {name: metrics[name] for name in expected} == pytest.approx(expected)
    assert {name for name in metrics if "reward" in name} == set(expected)


def test_lengths_of_responses_that_ended_by_themselves() -> None:
    """0 where none did, as in TRL."""

    def of(length: int, truncated: bool) -> Sample:
        some = [0] * length
        return Sample(0, [1], some, [0.0] * length, some, 0.0, truncated)

    batch = [of(3, False), of(9, True), of(6, False)]
    for members, expected in ((batch, [4.5, 3, 6]), (batch[1:2], [0, 0, 0])):
        metrics = batch_metrics(members)
        names = [f"completions/{each}_terminated_length" for each in ("mean", "min", "max")]
        assert [metrics[name] for name in names] == expected
