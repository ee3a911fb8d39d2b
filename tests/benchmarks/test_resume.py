"""The benchmark of long logs, on a short one."""

from __future__ import annotations

from benchmarks import resume
from benchmarks.logs.long import build_log
from rhymeflow.runtime import event_log
from rhymeflow.store.reader import TrajectoryReader


def test_a_log_is_resumed_up_to_its_first_command(tmp_path, monkeypatch):
    monkeypatch.setattr(event_log, "SNAPSHOT_EVENTS", 1500)
    build_log(tmp_path, 2000)
    reader = TrajectoryReader(tmp_path / "events.db")
    ((events,),) = reader.query("SELECT MAX(seq) FROM events")
    assert len(reader.snapshots()) == 1
    assert events > 2000
    reader.close()
    times = resume.resume(tmp_path)
    assert {"replay", "first command", *resume.BESIDE} <= times.keys()
