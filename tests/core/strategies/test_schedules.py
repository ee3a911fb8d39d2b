"""The table of schedules, against the table in the documentation and in the configuration."""

from __future__ import annotations

import random
from typing import get_args

import pytest

from rhymeflow.config import ScheduleConfig
from rhymeflow.core.plan import Admission, OnPull
from rhymeflow.core.strategies.migration import rebalance
from rhymeflow.core.strategies.schedules import HURRYING, MIGRATION, ROUTING, SCHEDULES, SYNC
from tests.helpers import FakeBody, a_plan, a_schedule


def test_every_schedule_of_the_configuration_is_there() -> None:
    assert list(SCHEDULES) == list(get_args(ScheduleConfig.model_fields["name"].annotation))


def test_bundles_are_made_of_named_rules() -> None:
    for bundle in SCHEDULES.values():
        assert bundle.admission in get_args(Admission)
        assert bundle.on_pull in get_args(OnPull)
        assert bundle.routing in ROUTING.values()
        assert bundle.sync in SYNC.values()
        assert bundle.migration in MIGRATION.values()
        assert bundle.hurrying in HURRYING.values()


def test_rules_bear_their_names() -> None:
    for table in (ROUTING, SYNC, MIGRATION, HURRYING):
        assert all(name == rule.__name__ for name, rule in table.items())


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
        body = FakeBody(plan, mix, capacities=(2, 3), choose=pick, crashes=2, seed=seed).run()
        assert len(body.batches) == 5
