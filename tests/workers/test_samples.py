"""What the learner is told of a response: whether it is truncated, and so may be masked."""

from __future__ import annotations

import pytest

from rhymeflow.config import Config
from rhymeflow.store.reader import TrajectoryRecord
from rhymeflow.workers.restore import samples


@pytest.mark.parametrize(
    ("reason", "truncated"),
    [("stop", False), ("max_turns", False), ("length", True), ("finished_early", True)],
)
def test_truncated_is_what_the_policy_did_not_end(reason: str, truncated: bool) -> None:
    record = TrajectoryRecord(0, 0, [1], [2], [-1.0], [0], 1.0, reason, {}, [False])
    assert [each.truncated for each in samples([record], Config())] == [truncated]
