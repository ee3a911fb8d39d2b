"""The table of schedules, against the table in the documentation and in the configuration."""

from __future__ import annotations

from typing import get_args

from rhymeflow.config import ScheduleConfig
from rhymeflow.core.plan import Admission, OnPull
from rhymeflow.core.strategies.schedules import MIGRATION, ROUTING, SCHEDULES, SYNC


def test_every_schedule_of_the_configuration_is_there() -> None:
    assert list(SCHEDULES) == list(get_args(ScheduleConfig.model_fields["name"].annotation))


def test_bundles_are_made_of_named_rules() -> None:
    for bundle in SCHEDULES.values():
        assert bundle.admission in get_args(Admission)
        assert bundle.on_pull in get_args(OnPull)
        assert bundle.routing in ROUTING.values()
        assert bundle.sync in SYNC.values()
        assert bundle.migration in MIGRATION.values()


def test_rules_bear_their_names() -> None:
    for table in (ROUTING, SYNC, MIGRATION):
        assert all(name == rule.__name__ for name, rule in table.items())
