"""The table of schedules, against the table in the documentation and in the configuration."""

from dataclasses import replace
from typing import get_args

from rhymeflow.config import ScheduleConfig
from rhymeflow.core.commands import Interrupt
from rhymeflow.core.histopipe import strategies
from rhymeflow.core.lengths import LengthPredictor
from rhymeflow.core.strategies.schedules import SCHEDULES
from tests.core.interleaving import COST, Interleaving, a_plan, a_schedule
from tests.core.strategies.fleets import SETTINGS


def test_every_schedule_of_the_configuration_is_there():
    assert list(SCHEDULES) == list(get_args(ScheduleConfig.model_fields["name"].annotation))


def test_outliers_move_in_whole_runs(monkeypatch):
    """With a history that expects less than there is, and so large groups that all that runs is
    the last tenth: all that goes on is an outlier, once."""
    monkeypatch.setattr(strategies, "OUTLIER_RATIO", 1.01)
    monkeypatch.setattr(LengthPredictor, "explained_variance", property(lambda self: 0.5))
    monkeypatch.setattr(
        LengthPredictor,
        "expected",
        lambda self, group, generated=0: generated + 1.0 if generated else 1.0,
    )
    plan = a_plan(num_batches=6, extra_groups=2, filter_zero_variance=True, on_stuck="retry")
    rules = a_schedule("histopipe", settings=replace(SETTINGS, cost=COST, group_size=100))
    faults, number = {"failures": 0.1, "duplicates": 0.1, "crashes": 2}, 0
    for seed in range(12):
        runtime = Interleaving(plan, rules, capacities=(2, 3, 1), seed=seed, **faults).run()
        assert runtime.coordinator.state.layout.num_steps >= 6
        taken = [t for c in runtime.commands if isinstance(c, Interrupt) for t in c.trajectories]
        assert len(set(taken)) == len(taken), "once each"
        number += len(taken)
    assert number > 50
