"""The first instances join together; a batch is not routed to the one that was first."""

import pytest

from rhymeflow.core.events import InstanceJoined
from rhymeflow.runtime.joining import LEAST_SECONDS, FirstInstances

FIRST, SECOND, THIRD = (InstanceJoined(f"rollout-{n}", 0, 8, 1000, "") for n in range(3))


@pytest.fixture
def instances():
    """Of an attempt that has begun at second 10 of the run."""
    return FirstInstances(10.0)


def joins(instances, event, now, expected=2):
    instances.join(event, now)
    return [*instances.joined(expected, now)]


def test_all_join_once_the_last_has_loaded(instances):
    assert joins(instances, FIRST, 12.0) == []
    assert joins(instances, SECOND, 13.0) == [FIRST, SECOND]
    assert joins(instances, THIRD, 90.0) == [THIRD], "in the place of one that was lost"
    assert [*instances.joined(2, 91.0)] == []


def test_who_takes_much_longer_than_the_first_joins_later(instances):
    assert joins(instances, FIRST, 30.0) == []  # after 20 seconds
    assert [*instances.joined(2, 49.9)] == []
    assert [*instances.joined(2, 50.0)] == [FIRST]
    assert joins(instances, SECOND, 60.0) == [SECOND]


def test_the_others_have_some_time_even_if_the_first_was_quick(instances):
    assert joins(instances, FIRST, 10.1) == []
    assert [*instances.joined(2, 10.0 + LEAST_SECONDS)] == []
    assert [*instances.joined(2, 10.2 + LEAST_SECONDS)] == [FIRST]


def test_nobody_waits_for_one_that_is_gone(instances):
    assert joins(instances, FIRST, 12.0) == []
    assert [*instances.joined(1, 12.1)] == [FIRST]


def test_one_that_is_lost_while_it_waits_has_never_joined(instances):
    assert joins(instances, FIRST, 12.0) == []
    instances.leave("rollout-0")
    assert joins(instances, SECOND, 13.0) == []
    assert joins(instances, THIRD, 14.0) == [SECOND, THIRD]
