import math

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from trl.trainer.utils import nanstd

from rhymeflow.core.handlers import teaches
from rhymeflow.core.protocol.group import Member
from rhymeflow.learner.algorithms.advantages import (
    decoupled_advantages,
    group_advantages,
    reward_itself,
)

REWARDS = st.floats(-5, 5, allow_nan=False, width=32).map(lambda number: round(number, 6))


@given(
    rewards=st.lists(st.lists(REWARDS, min_size=4, max_size=4), min_size=1, max_size=5),
    scale=st.sampled_from(["group", "batch", "none"]),
    rng=st.randoms(use_true_random=False),
)
def test_equals_trl(rewards, scale, rng):
    """TRL's lines for `sum_then_normalize`, on its own `nanstd`; members in any order."""
    reward = torch.tensor(rewards, dtype=torch.float64)
    mean = torch.nanmean(reward, dim=1, keepdim=True)
    std = nanstd(reward).expand_as(reward) if scale == "batch" else nanstd(reward, 1, True)
    expected = reward - mean
    if scale != "none":
        expected = expected / (std + 1e-4)
    zero = torch.isclose(std, torch.zeros_like(std)).double().expand_as(reward).mean()

    flat, due = reward.flatten().tolist(), expected.flatten().numpy()
    order = rng.sample(range(len(flat)), len(flat))
    found = group_advantages([flat[i] for i in order], [i // 4 for i in order], scale)
    np.testing.assert_allclose(found.values, due[order], atol=1e-9)
    assert found.frac_zero_std == pytest.approx(float(zero))


@given(
    rewards=st.lists(
        st.lists(st.tuples(REWARDS, st.none() | REWARDS), min_size=4, max_size=4),
        min_size=1,
        max_size=5,
    ),
    weights=st.tuples(REWARDS, REWARDS),
)
def test_rewards_normalised_one_by_one_equal_trl(rewards, weights):
    """TRL's lines for `normalize_then_sum`, where the second reward does not always apply."""
    reward = torch.tensor(
        [[[math.nan if x is None else x for x in pair] for pair in group] for group in rewards],
        dtype=torch.float64,
    )
    mean, std = torch.nanmean(reward, dim=1, keepdim=True), nanstd(reward, 1, True)
    each = ((reward - mean) / (std + 1e-4)).flatten(0, 1)
    total = (each * torch.tensor(weights, dtype=torch.float64)).nansum(dim=1)
    deviation = nanstd(total)
    expected = (total - torch.nanmean(total)) / (deviation + 1e-4)

    components = [
        {name: x for name, x in zip("ab", pair, strict=True) if x is not None}
        for group in rewards
        for pair in group
    ]
    groups = [g for g in range(len(rewards)) for _ in range(4)]
    found = decoupled_advantages(components, dict(zip("ab", weights, strict=True)), groups)
    np.testing.assert_allclose(found.values, expected.numpy(), atol=1e-7)


def test_a_group_of_one_has_no_advantage():
    found = group_advantages([3.0, 1.0, 2.0], [0, 1, 1], "group")
    assert found.values[0] == 0.0
    assert found.values[1] != 0.0


def test_equal_rewards_without_a_baseline_are_divided_by_nothing():
    for scale in ("group", "batch"):
        found = group_advantages([2.0, 2.0], [0, 0], scale, reward_itself)
        assert found.values.tolist() == [2.0, 2.0]


@given(
    rewards=st.lists(
        st.tuples(*[st.sampled_from([0.0, 0.1, 0.2, 0.30000000000000004, 1.0])] * 2),
        min_size=2, max_size=4,
    ),
    weights=st.tuples(*[st.sampled_from([0.0, 1.0, 0.5, -1.0])] * 2),
)  # fmt: skip
def test_a_group_is_filtered_where_its_advantages_are_nothing(rewards, weights):
    """The coordinator's answer and the learner's are the same, whichever way rewards become one."""
    named = dict(zip("ab", weights, strict=True))
    components = [dict(zip("ab", each, strict=True)) for each in rewards]
    totals = [sum(w * x for w, x in zip(weights, each, strict=True)) for each in rewards]
    groups = [0] * len(rewards)

    summed = group_advantages(totals, groups, "group")
    one_by_one = decoupled_advantages(components, named, groups)
    for found, told in (
        (summed, None),
        (one_by_one, [{n: (named[n], x) for n, x in each.items()} for each in components]),
    ):
        members = [
            Member(reward=total, components=told and told[i]) for i, total in enumerate(totals)
        ]
        assert teaches(members) == bool(found.values.any()) == (found.frac_zero_std == 0.0)
