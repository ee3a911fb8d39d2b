"""Whose drafts go first, and when instances are told."""

from __future__ import annotations

import random
from dataclasses import replace

import pytest

from rhymeflow.core.commands import Hurry
from rhymeflow.core.strategies.hurrying import gating, nobody
from rhymeflow.core.strategies.schedules import HURRYING
from rhymeflow.core.strategies.view import FleetView, Preference
from tests.core.strategies.fleets import fleet, instance
from tests.helpers import FakeBody, a_plan, a_schedule


def waited_for(*groups: int) -> FleetView:
    view = fleet([instance("a", running=3), instance("b", running=1)])
    return replace(view, gating=frozenset(groups))


def test_nobody_is_preferred_by_default() -> None:
    assert list(nobody(waited_for(0))) == []


def test_what_is_waited_for_is_preferred_where_there_is_something_else() -> None:
    view = waited_for()
    first, *_ = view.instances[0].assigned
    (alone,) = view.instances[1].assigned
    view = replace(view, gating=frozenset({first.group, alone.group}))
    chosen = {p.instance: p.trajectories for p in gating(view)}
    together = [t for t in view.instances[0].assigned if t.group in view.gating]
    if len(together) < 3:
        assert chosen == {"a": tuple(together)}
    else:
        assert chosen == {}


def test_nothing_is_preferred_while_the_learner_trains() -> None:
    assert list(gating(waited_for())) == []


def everyone(view: FleetView) -> list[Preference]:
    return [Preference(x.name, tuple(x.assigned)) for x in view.instances if x.assigned]


@pytest.mark.parametrize("rule", [*HURRYING.values(), everyone])
def test_runs_come_to_their_end_and_are_told_only_of_changes(rule) -> None:
    schedule = a_schedule("rhymeflow", hurrying=rule)
    schedule = replace(schedule, weights=replace(schedule.weights, urgency=3.0))
    for seed in range(6):
        pick = random.Random(seed).randrange
        plan = a_plan(num_batches=5, max_staleness=2)
        body = FakeBody(plan, schedule, capacities=(2, 3), choose=pick, crashes=1, seed=seed).run()
        assert len(body.batches) == 5


def test_without_urgency_nobody_is_told() -> None:
    schedule = a_schedule("rhymeflow", hurrying=everyone)
    body = FakeBody(a_plan(), schedule, capacities=(2, 3), choose=random.Random(0).randrange)
    told: list[Hurry] = []
    carry_out = body._carry_out

    def heard(there, command) -> None:
        told.extend([command] if isinstance(command, Hurry) else [])
        carry_out(there, command)

    body._carry_out = heard  # type: ignore[method-assign]
    body.run()
    assert told == []
