"""The first instances join together; a batch is not routed to the one that was first."""

from __future__ import annotations

import math
from types import SimpleNamespace

import pytest

from rhymeflow.core.events import InstanceJoined
from rhymeflow.runtime import controller
from rhymeflow.runtime.controller import Controller

FIRST, SECOND, THIRD = (InstanceJoined(f"rollout-{n}", 0, 8, 1000, "") for n in range(3))


@pytest.fixture
def begun():
    """A controller of two instances that has begun at second 10 of the run."""
    made = Controller.__new__(Controller)
    made.reporter = SimpleNamespace(now=10.0, begin_training=lambda: None)
    made.supervisor = SimpleNamespace(instances={"rollout-0", "rollout-1"})
    made._snapshots, made._waiting, made._began, made._join_by = {}, {}, 10.0, math.inf
    return made


def joins(made, event, at):
    made.reporter.now = at
    return [*made._joins(event), *made._joined()]


def test_all_join_once_the_last_has_loaded(begun):
    assert joins(begun, FIRST, 12.0) == []
    assert joins(begun, SECOND, 13.0) == [FIRST, SECOND]
    assert set(begun._snapshots) == {"rollout-0", "rollout-1"}
    assert joins(begun, THIRD, 90.0) == [THIRD]


def test_who_takes_much_longer_than_the_first_joins_later(begun):
    assert joins(begun, FIRST, 30.0) == []  # after 20 seconds
    begun.reporter.now = 49.9
    assert [*begun._joined()] == []
    begun.reporter.now = 50.0
    assert [*begun._joined()] == [FIRST]
    assert joins(begun, SECOND, 60.0) == [SECOND]


def test_the_others_have_some_time_even_if_the_first_was_quick(begun):
    assert joins(begun, FIRST, 10.1) == []
    begun.reporter.now = 10.1 + controller.JOIN_SECONDS - 0.1
    assert [*begun._joined()] == []


def test_nobody_waits_for_one_that_is_gone(begun):
    assert joins(begun, FIRST, 12.0) == []
    begun.supervisor.instances.remove("rollout-1")
    assert [*begun._joined()] == [FIRST]


def test_one_that_is_lost_while_it_waits_has_never_joined(begun):
    begun.in_flight = SimpleNamespace(seal_all=lambda name: [])
    begun.evaluations = begun.reporter.throughput = SimpleNamespace(leave=lambda name: None)
    begun._pulling = set()
    assert joins(begun, FIRST, 12.0) == []
    assert [*begun._instance_left("rollout-0", "died")] == []
    assert joins(begun, SECOND, 13.0) == []
    assert joins(begun, THIRD, 14.0) == [SECOND, THIRD]
