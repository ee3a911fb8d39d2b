"""Lengths have the mean and the meaning asked for, and depend on nothing but their names."""

import statistics

import numpy as np
import pytest

from rhymeflow.config import Config
from rhymeflow.config.load import build_config
from rhymeflow.errors import UserError
from rhymeflow.sim.workload import MOST_TURNS, Synthetic


def a_config(**workload: object) -> Config:
    fields = {f"simulation.workload.{name}": value for name, value in workload.items()}
    given = {"rollout.max_completion_length": 20_000, **fields}
    return build_config(given, where="test")


def table(workload: Synthetic, prompts: int, members: int, epoch: int = 0) -> np.ndarray:
    return np.array(
        [[workload.response(p, epoch, m).length for m in range(members)] for p in range(prompts)],
        float,
    )


@pytest.mark.parametrize("share", [0.0, 0.65, 1.0])
def test_the_prompt_explains_its_share_of_the_variance(share):
    lengths = table(Synthetic(a_config(mean_length=4000.0, prompt_variance_share=share)), 4000, 8)
    within = lengths.var(axis=1, ddof=1).mean()
    assert 1 - within / lengths.var() == pytest.approx(share, abs=0.04)
    assert lengths.mean() == pytest.approx(4000, rel=0.04)
    assert lengths.min() >= 1
    assert lengths.max() <= 20_000


def test_sigma_is_of_the_logarithm():
    logs = np.log(table(Synthetic(a_config(mean_length=500.0, sigma=0.5)), 3000, 4)).ravel()
    assert logs.std() == pytest.approx(0.5, rel=0.03)


def test_levels_drift_over_epochs_but_keep_their_distribution():
    workload = Synthetic(a_config(mean_length=2000.0, epoch_correlation=0.9))
    levels = [[workload._level(p, e) for p in range(4000)] for e in (0, 1, 4)]
    assert np.corrcoef(levels[0], levels[1])[0, 1] == pytest.approx(0.9, abs=0.02)
    assert np.corrcoef(levels[0], levels[2])[0, 1] == pytest.approx(0.9**4, abs=0.03)
    assert statistics.pstdev(levels[2]) == pytest.approx(1.0, abs=0.04)


def test_a_length_depends_on_its_name_and_the_seed_only():
    one, two = Synthetic(a_config()), Synthetic(a_config())
    backwards = [one.response(3, 1, m).length for m in reversed(range(16))]
    assert [two.response(3, 1, m).length for m in range(16)] == backwards[::-1]
    assert len({one.response(3, e, 0).length for e in range(8)}) > 1
    other = Synthetic(build_config({"run.seed": 1}, base=a_config(), where="test"))
    assert [other.response(3, 1, m).length for m in range(16)] != backwards[::-1]
    assert one.response(3, 1, 5).length == 1270, "a change here changes every recorded result"


def test_decided_prompts_have_one_reward():
    workload = Synthetic(a_config())
    rewards = [{workload.response(p, 0, m).reward for m in range(64)} for p in range(2000)]
    assert np.mean([len(r) == 1 for r in rewards]) == pytest.approx(0.2 + 2 * 0.8 / 65, abs=0.03)
    assert set().union(*rewards) == {0.0, 1.0}


@pytest.mark.parametrize("mean", [20_000.0, 1.0])
def test_a_mean_that_cannot_be(mean):
    with pytest.raises(UserError, match=r"simulation\.workload\.mean_length"):
        Synthetic(a_config(mean_length=mean))


def test_turns_are_as_many_as_is_said_and_share_the_length():
    made = Synthetic(a_config(mean_turns=3, observation_tokens=7, environment_seconds=2.0))
    specs = [made.response(row, 0, 0) for row in range(4000)]
    every = [spec.observations for spec in specs]
    assert statistics.fmean(1 + len(each) for each in every) == pytest.approx(3, rel=0.05)
    assert max(1 + len(each) for each in every) <= MOST_TURNS * 3
    assert statistics.fmean(a.seconds for each in every for a in each) == pytest.approx(2, rel=0.05)
    ends = [[a.after for a in each] for each in every]
    assert all(0 < end < one.length for one, e in zip(specs, ends, strict=True) for end in e)
    assert all(each == sorted(set(each)) for each in ends)
    assert [made.response(row, 0, 0) for row in range(4000)] == specs
    assert [made.response(row, 1, 0) for row in range(4000)] != specs
