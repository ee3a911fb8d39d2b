"""What an attempt takes from the log, where the log ends at an odd place: one defect, one test."""

from contextlib import closing

from benchmarks.faults import wal
from rhymeflow.config import Config
from rhymeflow.core.coordinator import Coordinator
from rhymeflow.runtime import start
from rhymeflow.runtime.replay import recall
from rhymeflow.store.checkpoint_dirs import CheckpointPlace
from rhymeflow.store.reader import TrajectoryReader
from rhymeflow.store.writer import SqliteTrajectoryStore


def test_a_run_that_stored_nothing_begins_anew(tmp_path):
    """It was killed before its first commit."""
    config = Config(name="mine")
    start.write_config(config, tmp_path)
    SqliteTrajectoryStore(tmp_path / "events.db").close()
    past, found = recall(tmp_path, lambda config: config)
    assert found == config
    assert (past.attempts, past.seconds, past.num_drawn) == (0, 0.0, 0)
    assert isinstance(past.coordinator, Coordinator)


def test_a_log_is_a_store_from_its_first_moment_on(tmp_path):
    """Whatever of its `-wal` was not on the disk when the power went."""
    store = SqliteTrajectoryStore(tmp_path / "events.db")
    try:
        wal.cut(tmp_path / "events.db", 10**9)
        (tmp_path / "copy").mkdir()
        (tmp_path / "copy" / "events.db").write_bytes((tmp_path / "events.db").read_bytes())
    finally:
        store.close()
    with closing(TrajectoryReader(tmp_path / "copy" / "events.db")) as reader:
        assert reader.attempts() == []


def test_a_checkpoint_that_the_log_does_not_know_is_set_aside(tmp_path):
    """Else a learner that dies later is restored from it, when another version has its number."""
    for name in ("step-2", "step-4", "step-6", "step-8.unfinished", "ahead-of-the-log-step-4"):
        (tmp_path / name).mkdir()
        (tmp_path / name / "what").write_text(name)
    CheckpointPlace(tmp_path).set_aside_after(3)
    found = {path.name: (path / "what").read_text() for path in tmp_path.iterdir()}
    assert found == {
        "step-2": "step-2",
        "ahead-of-the-log-step-4": "step-4",
        "ahead-of-the-log-step-6": "step-6",
        "step-8.unfinished": "step-8.unfinished",
    }
    assert list(CheckpointPlace(tmp_path).up_to()) == [2]
