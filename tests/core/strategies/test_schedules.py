"""The table of schedules, against the table in the documentation and in the configuration."""

from __future__ import annotations

from dataclasses import replace
from typing import Any, get_args

import pytest

from rhymeflow.config import ScheduleConfig
from rhymeflow.core.commands import Interrupt
from rhymeflow.core.histopipe import strategies
from rhymeflow.core.lengths import LengthPredictor
from rhymeflow.core.plan import OnPull
from rhymeflow.core.strategies.migration import rebalance
from rhymeflow.core.strategies.schedules import ROUTING, SCHEDULES, SYNC
from tests.core.interleaving import COST, Interleaving, a_plan, a_schedule
from tests.core.strategies.fleets import SETTINGS


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
        runtime = Interleaving(plan, mix, capacities=(2, 3), crashes=2, seed=seed).run()
        assert len(runtime.batches) == 5


# -- laid out --------------------------------------------------------------------------------------

PLANS: dict[str, dict[str, Any]] = {
    "plain": {},
    "retry": {"on_stuck": "retry", "groups_per_batch": 3},
    "in order": {"batch_order": "requested", "extra_groups": 1, "on_stuck": "truncate"},
    "all": {"extra_groups": 2, "filter_zero_variance": True, "on_stuck": "retry"},
}


def laid_out_run(plan: str, seed: int) -> Interleaving:
    """A run of `histopipe`. Of so large groups all that runs anywhere is the last tenth."""
    rules = a_schedule("histopipe", settings=replace(SETTINGS, cost=COST, group_size=100))
    return Interleaving(
        a_plan(num_batches=6, **PLANS[plan]), rules, capacities=(2, 3, 1),
        failures=0.1 if plan != "plain" else 0.0, duplicates=0.1, crashes=2, seed=seed,
    ).run()  # fmt: skip


@pytest.mark.parametrize("plan", PLANS)
def test_laid_out_runs_come_to_their_end(plan: str) -> None:
    """In any order, with crashes; laws and invariants are looked at on the way."""
    for seed in range(12):
        runtime = laid_out_run(plan, seed)
        assert len(runtime.batches) == 6
        known = runtime.coordinator.state.layout
        assert known.num_steps >= 6
        ended = {group for batch in runtime.batches for group in batch} | runtime.dropped
        assert not any(group in known for group in ended), "what has ended is forgotten"


def test_outliers_move_in_whole_runs(monkeypatch: pytest.MonkeyPatch) -> None:
    """With a history that expects less than there is: all that goes on is an outlier, once."""
    monkeypatch.setattr(strategies, "OUTLIER_RATIO", 1.01)
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
