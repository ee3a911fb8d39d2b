"""The history process itself: it fills the index, and another takes its place when it is lost."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

from rhymeflow.config.load import dump_config
from rhymeflow.core.types import TrajectoryId
from rhymeflow.histospec.index import Index
from rhymeflow.runtime.history_index import HistoryIndex
from rhymeflow.runtime.workers import Workers
from rhymeflow.store.writer import SqliteTrajectoryStore
from tests.runtime.tiny import tiny_config
from tests.store.stores import put

PATIENCE = 1000.0


def test_the_process_loads_no_torch():
    code = "import rhymeflow.runtime.process, rhymeflow.workers.history, sys; print(*sys.modules)"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert not {"torch", "transformers"} & set(done.stdout.split())


class Side:
    """A run of which there is nothing but its store and its history."""

    def __init__(self, directory: Path, history: str | None = None, **sections):
        drafting = {"window": "cost", "history": history}
        self.config = tiny_config(directory, drafting=drafting, **sections)
        self.run_dir = directory / "run"
        self.run_dir.mkdir()
        self.store = SqliteTrajectoryStore(self.run_dir / "events.db")
        self.workers = Workers(self.config, self.run_dir)
        self.workers._start_history()
        self.warnings: list[str] = []
        self.history_index = HistoryIndex(self.config.drafting, self.workers, self.warnings.append)
        self.reading = Index.attach(self.history_index.handle)
        self.now = 0.0

    def add(self, count: int) -> None:
        for group in range(count):
            put(self.store, TrajectoryId(group, 0), 0, [group] * 5)
        self.store.commit()

    def until(self, condition) -> None:
        deadline = time.monotonic() + 120
        while not condition():
            assert time.monotonic() < deadline
            time.sleep(0.02)
            self.history_index.receive(self.now, PATIENCE)

    def until_written(self, count: int) -> None:
        self.until(lambda: self.reading.num_responses == count)

    def close(self) -> None:
        if self.workers.history is not None:
            self.workers.history.stop(patience=5.0)
        self.history_index.close()
        self.store.close()


@pytest.fixture
def opened(tmp_path):
    sides = []

    def open_side(**sections) -> Side:
        sides.append(Side(tmp_path, **sections))
        return sides[-1]

    yield open_side
    for side in sides:
        side.close()


@pytest.mark.parametrize("number", [signal.SIGKILL, signal.SIGSTOP], ids=["dies", "hangs"])
def test_another_takes_its_place_and_knows_what_it_knew(opened, number):
    side = opened(run={"instance_restarts": 1})
    side.add(30)
    side.history_index.start()
    side.until_written(30)
    tokens = side.reading.num_tokens
    first = side.workers.history
    os.kill(first.pid, number)
    if number == signal.SIGSTOP:
        side.until(lambda: not first.connection.poll())
        side.now += PATIENCE + 1
    side.until(lambda: side.workers.history is not first)
    with pytest.raises(ProcessLookupError):
        os.kill(first.pid, 0)
    side.add(40)  # 30 of them were there
    side.until_written(40)
    assert side.reading.num_tokens == tokens * 40 // 30, "each is there once"
    (warning,) = side.warnings
    assert "\n" not in warning
    assert ("hangs" if number == signal.SIGSTOP else "history died (killed by SIGKILL)") in warning
    assert "the run goes on" in warning


def test_no_more_are_replaced_than_may_be_and_that_is_said(opened):
    side = opened(run={"instance_restarts": 1})
    side.add(3)
    side.history_index.start()
    for _ in range(2):
        assert side.workers.history is not None
        side.until_written(3)
        lost = side.workers.history
        os.kill(lost.pid, signal.SIGKILL)
        side.until(lambda lost=lost: side.workers.history is not lost)
    assert side.workers.history is None
    assert len(side.warnings) == 2
    assert "history.1 died" in side.warnings[1]
    assert "run.instance_restarts" in side.warnings[1]
    assert side.reading.num_responses == 3, "what was written is still there"
    side.history_index.receive(side.now, PATIENCE)


def test_a_defect_costs_drafts_and_not_the_run(opened):
    side = opened(run={"instance_restarts": 0})
    side.store._connection.execute("DROP TABLE segments")
    side.history_index.start()
    side.until(lambda: side.workers.history is None)
    (warning,) = side.warnings
    assert "history failed: sqlite3.OperationalError: no such table: segments" in warning
    assert "\n" not in warning


def test_it_begins_with_an_earlier_run(opened, tmp_path):
    earlier = tmp_path / "earlier"
    earlier.mkdir()
    side = opened(history=str(earlier))
    (earlier / "config.yaml").write_text(dump_config(side.config))
    store = SqliteTrajectoryStore(earlier / "events.db")
    for group in range(7):
        put(store, TrajectoryId(group, 0), 0, [group] * 5)
    store.commit()
    store.close()
    side.history_index.start()
    side.until_written(7)
    side.add(2)
    side.until_written(9)


def test_a_run_that_does_not_draft_has_no_index(tmp_path):
    config = tiny_config(tmp_path)
    workers = Workers(config, tmp_path)
    history_index = HistoryIndex(config.drafting, workers, print)
    assert history_index.handle is None
    history_index.start()
    history_index.receive(0.0, PATIENCE)
    history_index.close()
