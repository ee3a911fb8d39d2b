"""The table of schedules, against the table in the documentation and in the configuration."""

from __future__ import annotations

import random
from dataclasses import replace
from typing import Any, get_args

import pytest

from rhymeflow.config import ScheduleConfig
from rhymeflow.core.commands import Interrupt
from rhymeflow.core.lengths import LengthPredictor
from rhymeflow.core.plan import OnPull
from rhymeflow.core.strategies.migration import rebalance
from rhymeflow.core.strategies.schedules import ROUTING, SCHEDULES, SYNC
from tests.helpers import FakeRuntime, a_plan, a_schedule


def test_every_schedule_of_the_configuration_is_there() -> None:
    assert list(SCHEDULES) == list(get_args(ScheduleConfig.model_fields["name"].annotation))


@pytest.mark.parametrize("on_pull", get_args(OnPull))
@pytest.mark.parametrize("sync", SYNC)
@pytest.mark.parametrize("routing", ROUTING)
def test_any_mix_of_rules_comes_to_its_end(routing: str, sync: str, on_pull: str) -> None:
    """Whatever order things happen in, instances that leave included."""
    mix = a_schedule(
        routing=ROUTING[routing], sync=SYNC[sync], on_pull=on_pull, migration=rebalance
    )
    plan = a_plan(num_batches=5, max_staleness=2)
    for seed in range(4):
        pick = random.Random(seed).randrange
        runtime = FakeRuntime(plan, mix, capacities=(2, 3), choose=pick, crashes=2, seed=seed).run()
        assert len(runtime.batches) == 5


# -- laid out --------------------------------------------------------------------------------------

PLANS: dict[str, dict[str, Any]] = {
    "plain": {},
    "extra": {"extra_groups": 1, "extra_generations": 1},
    "filter": {"filter_zero_variance": True, "max_filtered": 4},
    "retry": {"on_stuck": "retry", "groups_per_batch": 3},
    "truncate": {"on_stuck": "truncate"},
    "in order": {"batch_order": "requested", "filter_zero_variance": True, "extra_groups": 1},
    "all": {"extra_groups": 2, "filter_zero_variance": True, "on_stuck": "retry"},
}


def laid_out_run(plan: str, seed: int) -> FakeRuntime:
    """A run of `histopipe`."""
    rules = a_schedule("histopipe")
    # Of so large groups all that runs anywhere is the last tenth.
    rules = replace(rules, settings=replace(rules.settings, outlier_ratio=1.01, group_size=100))
    pick = random.Random(seed).randrange
    return FakeRuntime(
        a_plan(num_batches=6, **PLANS[plan]), rules, capacities=(2, 3, 1), choose=pick,
        failures=0.1 if plan != "plain" else 0.0, duplicates=0.1, crashes=2, seed=seed,
    ).run()  # fmt: skip


@pytest.mark.parametrize("plan", PLANS)
def test_laid_out_runs_come_to_their_end(plan: str) -> None:
    """In any order, with crashes; the fake runtime and the invariants check the laws on the way."""
    for seed in range(12):
        runtime = laid_out_run(plan, seed)
        assert len(runtime.batches) == 6
        assert max(runtime.staleness) <= 1
        known = runtime.coordinator.state.layout
        assert known.num_steps >= 6
        ended = {group for batch in runtime.batches for group in batch} | set(runtime.dropped)
        assert not any(group in known for group in ended), "what has ended is forgotten"


def test_outliers_move_in_whole_runs(monkeypatch: pytest.MonkeyPatch) -> None:
    """With a history that expects less than there is: all that goes on is an outlier, once."""
    monkeypatch.setattr(LengthPredictor, "explained_variance", property(lambda self: 0.5))
    monkeypatch.setattr(
        LengthPredictor,
        "expected",
        lambda self, group, generated=0: generated + 1.0 if generated else 1.0,
    )
    number = 0
    for seed in range(12):
        runtime = laid_out_run("all", seed)
        taken = [t for c in runtime.commands if isinstance(c, Interrupt) for t in c.trajectories]
        assert len(set(taken)) == len(taken), "once each"
        number += len(taken)
    assert number > 50
