"""What disks do to a run: it ends with one line, keeps what it can, and can be resumed."""

import json
import os
import random
import shutil
from contextlib import closing

import pytest

from rhymeflow.errors import StorageError, UserError
from rhymeflow.runtime import disk_space
from rhymeflow.runtime.disk_space import DiskSpace
from rhymeflow.store.damage import check_log
from rhymeflow.store.reader import TrajectoryReader
from rhymeflow.store.writer import SqliteTrajectoryStore
from rhymeflow.utils.disk import one_line
from tests.fake_run import check
from tests.fake_run.run import FakeRun, configuration
from tests.fake_run.world import World
from tests.runtime.logs import each_turn
from tests.runtime.test_resume import resume


def fill(controller):
    """No page more than there are: SQLite says what it says on a full disk."""
    connection = controller.store._connection
    (pages,) = connection.execute("PRAGMA page_count").fetchone()
    connection.execute(f"PRAGMA max_page_count = {pages}")


def delete_log(controller):
    for path in controller.store.path.parent.glob("events.db*"):
        path.unlink()


def delete_all(controller):
    shutil.rmtree(controller.store.path.parent)


def cut(controller):
    controller.store._connection.execute("PRAGMA wal_checkpoint(FULL)")
    controller.store.commit()
    os.truncate(controller.store.path, 8192)


FAULTS = {
    fill: r"{log}: .*the disk is full; free.*rhymeflow resume {run}",
    delete_log: r"{log}.* was deleted while.*rhymeflow resume {run}",
    delete_all: r"{run}: was deleted while ",
    cut: r"{log}: was cut from [\d,]+ to 8,192 bytes",
}


@pytest.mark.parametrize("fault", FAULTS, ids=lambda fault: fault.__name__)
def test_a_run_that_cannot_write_its_log_ends_in_one_line(tmp_path, fault):
    """With a checkpoint, from which it is resumed, if there is still a place for one."""
    config = configuration(random.Random(8), "bounded").changed(
        learner={"max_steps": 6, "groups_per_batch": 1}, run={"save_steps": 0}
    )
    fake = FakeRun(World(0), tmp_path, config)
    said, done = FAULTS[fault].format(log=fake.path / "events.db", run=fake.path), []

    def once(controller):
        if not done and controller.training.published >= 2:
            done.append(True)
            fault(controller)

    with (
        pytest.raises(StorageError, match=f"^{said}") as raised,
        one_line(fake.path),
        closing(fake.store()) as store,
        each_turn(once, first=True),
    ):
        fake.attempt(store)
    assert "\n" not in str(raised.value)
    if fault in (fill, delete_log):
        assert json.loads((fake.path / "summary.json").read_text())["steps"] >= 1
        assert list((fake.path / "checkpoints").glob("step-*"))
        fake.carry_through()
        check.ended(fake.path, config, fake.seen)


def test_room_is_looked_at_before_the_start(tmp_path, monkeypatch):
    monkeypatch.setattr(disk_space, "free_bytes", lambda path: 5 * 10**9)
    DiskSpace(tmp_path, 10**9).check(2, 0)
    with pytest.raises(
        UserError, match=r"5\.00 GB free.*needs 6\.07 GB: 3 checkpoints of 2\.00 GB"
    ):
        DiskSpace(tmp_path, 2 * 10**9).check(2, 0)
    DiskSpace(tmp_path, 2 * 10**9).check(2, 2)  # they are there already


def test_room_is_looked_at_once_a_minute_and_what_is_missing_said_once(tmp_path, monkeypatch):
    free = [10**10]
    monkeypatch.setattr(disk_space, "free_bytes", lambda path: free[0])
    space = DiskSpace(tmp_path, 10**9)
    assert space.warning(0.0) is None
    free[0] = 10**9
    assert space.warning(59.0) is None, "not looked at"
    assert "1.00 GB free, less than two checkpoints" in space.warning(61.0)
    assert space.warning(130.0) is None, "it was said"
    free[0] = 10**10
    assert space.warning(200.0) is None
    free[0] = 0
    assert space.warning(300.0)


def test_after_a_fault_nothing_more_is_written(tmp_path):
    """Else the log would have a hole."""
    store = SqliteTrajectoryStore(tmp_path / "events.db")
    store.put_group(0, row=0, epoch=0, prompt="p" * 10**6, prompt_tokens=[1], columns={})
    fill(type("Controller", (), {"store": store}))
    with pytest.raises(StorageError, match="the disk is full"):
        store.commit()
    store.put_group(1, row=1, epoch=0, prompt="p", prompt_tokens=[1], columns={})
    with pytest.raises(StorageError, match="the disk is full"):
        store.commit()
    store.close()
    reader = TrajectoryReader(tmp_path / "events.db")
    assert reader.query("SELECT * FROM groups") == []
    reader.close()


def test_a_damaged_log_is_refused_with_the_last_checkpoint(tmp_path):
    store = SqliteTrajectoryStore(tmp_path / "events.db")
    for group in range(200):
        store.put_group(group, row=0, epoch=0, prompt="p" * 1000, prompt_tokens=[1], columns={})
    store.commit()
    store.close()
    check_log(tmp_path)
    with (tmp_path / "events.db").open("r+b") as file:
        file.seek(20 * 4096)
        file.write(b"\xff" * 8 * 4096)
    with pytest.raises(UserError, match=r"events\.db: is damaged \(.*there is no checkpoint"):
        resume(tmp_path)
    for step in (2, 10):
        (tmp_path / "checkpoints" / f"step-{step}").mkdir(parents=True)
    with pytest.raises(UserError, match=r"--model\.name .*/checkpoints/step-10$"):
        resume(tmp_path)
