"""What a learner reads of the log: whether a response may be masked, and what was skipped."""

from __future__ import annotations

from contextlib import closing

import pytest

from rhymeflow.config import Config
from rhymeflow.core.events import VersionPublished
from rhymeflow.store.reader import TrajectoryReader, TrajectoryRecord
from rhymeflow.store.writer import SqliteTrajectoryStore
from rhymeflow.workers.restore import in_a_row, samples


@pytest.mark.parametrize(
    ("reason", "truncated"),
    [("stop", False), ("max_turns", False), ("length", True), ("finished_early", True)],
)
def test_truncated_is_what_the_policy_did_not_end(reason: str, truncated: bool) -> None:
    record = TrajectoryRecord(0, 0, [1], [2], [-1.0], [0], 1.0, reason, {}, [False])
    assert [each.truncated for each in samples([record], Config())] == [truncated]


def test_skipped_steps_in_a_row_are_counted_in_each_attempt_anew(tmp_path):
    with closing(SqliteTrajectoryStore(tmp_path / "events.db")) as store:
        for skipped, expected in (([], 0), ([0], 1), ([0, 1], 2), ([], 0), ([1], 1)):
            version = store._last_seq + 1
            store.record(0.0, [VersionPublished(version, "", tuple(skipped))])
            store.commit()
            with closing(TrajectoryReader(store.path)) as reader:
                assert in_a_row(reader) == expected
        store.begin_attempt(Config().model_dump_json(), now=0.0, started="later")
        store.commit()
        with closing(TrajectoryReader(store.path)) as reader:
            assert in_a_row(reader) == 0
