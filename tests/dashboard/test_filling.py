"""How batches filled: against questions to the store alone, over simulated runs."""

from __future__ import annotations

from contextlib import closing
from pathlib import Path

import pytest

from rhymeflow.config.load import read_config
from rhymeflow.dashboard import side_log, time_view
from rhymeflow.dashboard.run import Run
from rhymeflow.sim.simulate import simulate
from rhymeflow.store.reader import TrajectoryReader

FIELDS = {
    "learner.max_steps": "12",
    "learner.groups_per_batch": "4",
    "rollout.num_instances": "2",
    "schedule.max_staleness": "2",
    "schedule.extra_groups": "1",
    "schedule.extra_generations": "2",
    "simulation.skip_steps": "1",
}
# Of each group: when it was first routed, when its eighth reward came, when it was trained on.
DIRECT = """
SELECT g.ending_version, g.group_id,
    (SELECT MIN(time) FROM routes r WHERE r.group_id = g.group_id),
    (SELECT time FROM events WHERE kind = 'TrajectoryRewarded'
        AND json_extract(body, '$.trajectory[0]') = g.group_id ORDER BY seq LIMIT 1 OFFSET 7),
    (SELECT e.time FROM commands c JOIN events e ON e.seq = c.event
        WHERE c.kind = 'Train' AND json_extract(c.body, '$.version') = g.ending_version)
FROM groups g WHERE ending = 'consumed' ORDER BY 1, 2"""


@pytest.fixture(params=[20_000, 7])
def run(tmp_path: Path, request, monkeypatch: pytest.MonkeyPatch) -> Run:
    """With all of the log at once, and in many small parts."""
    monkeypatch.setattr(side_log, "EVENTS_AT_ONCE", request.param)
    simulate(read_config("demo", FIELDS), output=tmp_path / "run")
    found = Run(tmp_path / "run", "run")
    found.side.refresh()
    return found


def test_what_filled_when(run: Run) -> None:
    with closing(TrajectoryReader(run.store)) as reader:
        expected = reader.query(DIRECT)
    assert len(expected) == 12 * 4
    with run.reader() as reader:
        assert reader.query("SELECT * FROM side.filling ORDER BY version, group_id") == expected
        assert side_log.groups(reader).open() == [], "every group has ended"


def test_batches_of_a_time(run: Run) -> None:
    whole = time_view.found(run)
    assert [each["version"] for each in whole["batches"]] == list(range(4, 12)), "the newest"
    with run.reader() as reader:
        rows = reader.query("SELECT began, complete, trained FROM side.filling WHERE version = 1")
    trained = rows[0][2]
    start, end = min(row[0] for row in rows), trained + 0.01
    batches = {each["version"]: each for each in time_view.found(run, start, end)["batches"]}
    assert 1 in batches
    assert 11 not in batches
    found = batches[1]
    assert (found["size"], found["trained"]) == (4, trained)
    assert (found["begun"][-1], found["complete"][-1]) == (4, 4)
    assert found["begun"] == sorted(found["begun"])
    assert all(a >= b for a, b in zip(found["begun"], found["complete"], strict=True))
    middle = len(found["begun"]) // 2
    time = start + (end - start) * middle / (time_view.POINTS - 1)
    assert found["complete"][middle] == sum(row[1] <= time for row in rows)
