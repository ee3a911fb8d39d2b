"""The history process itself: it fills the index, and another takes its place when it is lost."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

from rhymeflow.core.types import TrajectoryId
from rhymeflow.histospec.index import Index
from rhymeflow.runtime.base import WorkerLost
from rhymeflow.runtime.histories import history_index
from rhymeflow.runtime.history_index import HistoryIndex
from rhymeflow.runtime.local import LocalRuntime
from rhymeflow.runtime.supervisor import Supervisor
from rhymeflow.store.writer import SqliteTrajectoryStore
from rhymeflow.workers.messages import HistoryReady, UseDrafter
from tests.runtime.tiny import tiny_config
from tests.store.stores import put


def test_the_process_loads_no_torch():
    code = "import rhymeflow.workers.entry, rhymeflow.workers.history, sys; print(*sys.modules)"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert not {"torch", "transformers"} & set(done.stdout.split())


class Side:
    """A run of which there is nothing but its store and its history."""

    def __init__(self, directory: Path, history: str | None = None, **sections):
        drafting = {"window": "cost", "history_run": history}
        self.config = tiny_config(directory, drafting=drafting, **sections)
        self.run_dir = directory / "run"
        self.run_dir.mkdir()
        self.store = SqliteTrajectoryStore(self.run_dir / "events.db")
        self.runtime = LocalRuntime(self.config, self.run_dir, self.run_dir / "logs")
        self.supervisor = Supervisor(self.config, self.runtime)
        self.supervisor.history = self.supervisor._start_another("history")
        self.index = Index(max_tokens=100_000, max_responses=1000, shared=True)
        self.warnings: list[str] = []
        self.history = HistoryIndex(self.index, self.supervisor, self.warnings.append)
        self.now = 0.0

    def add(self, count: int) -> None:
        for group in range(count):
            put(self.store, TrajectoryId(group, 0), 0, [group] * 5)
        self.store.commit()

    def turn(self) -> None:
        for item in self.supervisor.watch(self.supervisor.wait(0.02), self.now):
            if isinstance(item, WorkerLost):
                self.history.lose(item)
            else:
                self.history.hear(item.worker, item.message)

    def until(self, condition) -> None:
        deadline = time.monotonic() + 120
        while not condition():
            assert time.monotonic() < deadline
            self.turn()

    def until_written(self, count: int) -> None:
        self.until(lambda: self.index.num_responses == count)

    def close(self) -> None:
        self.runtime.close()
        self.index.close()
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


def test_another_takes_its_place_and_knows_what_it_knew_as_often_as_may_be(opened):
    """First it hangs, then its successor dies."""
    side = opened(run={"instance_restarts": 1})
    side.add(30)
    side.history.start()
    side.until_written(30)
    tokens = side.index.num_tokens
    first = side.supervisor.history
    os.kill(first.pid, signal.SIGSTOP)
    for _ in range(10):
        side.turn()  # what it had said before
    side.now += side.config.run.worker_timeout + 1
    side.until(lambda: side.supervisor.history is not first)
    with pytest.raises(ProcessLookupError):
        os.kill(first.pid, 0)
    side.add(40)  # 30 of them were there
    side.until_written(40)
    assert side.index.num_tokens == tokens * 40 // 30, "each is there once"
    os.kill(side.supervisor.history.pid, signal.SIGKILL)
    side.until(lambda: side.supervisor.history is None)
    hangs, died = side.warnings
    assert "hangs" in hangs
    assert "the run goes on" in hangs
    assert "history.1 died (killed by SIGKILL)" in died
    assert "run.instance_restarts" in died
    assert "\n" not in hangs + died
    assert side.index.num_responses == 40, "what was written is still there"
    side.turn()


def test_a_defect_costs_drafts_and_not_the_run(opened):
    side = opened(run={"instance_restarts": 0})
    side.store._connection.execute("DROP TABLE segments")
    side.history.start()
    side.until(lambda: side.supervisor.history is None)
    (warning,) = side.warnings
    assert "history failed: sqlite3.OperationalError: no such table: segments" in warning
    assert "\n" not in warning


def test_it_begins_with_an_earlier_run(opened, tmp_path):
    earlier = tmp_path / "earlier"
    earlier.mkdir()
    side = opened(history=str(earlier))
    store = SqliteTrajectoryStore(earlier / "events.db")
    store.begin_attempt(side.config.model_dump_json(), now=0.0, started="before")
    for group in range(7):
        put(store, TrajectoryId(group, 0), 0, [group] * 5)
    store.commit()
    store.close()
    side.history.start()
    side.until_written(7)
    side.add(2)
    side.until_written(9)


def test_a_run_that_does_not_draft_has_no_index(tmp_path):
    config = tiny_config(tmp_path)
    with history_index(config, tmp_path) as index:
        assert index is None
    with LocalRuntime(config, tmp_path, tmp_path / "logs") as runtime:
        history = HistoryIndex(None, Supervisor(config, runtime), print)
        history.start()
        assert history.metrics() == {}


class Instance:
    def __init__(self, name):
        self.name, self.told = name, []

    def send(self, message):
        self.told.append(message)


def test_an_instance_is_told_once_and_not_before_there_is_something_to_draft_from(opened):
    side, first, second = opened(), Instance("rollout-0"), Instance("rollout-1")
    side.history.let_draft(first)
    assert first.told == []
    side.history.hear("history", HistoryReady(side.index.handle))
    for instance in (first, second, first):
        side.history.let_draft(instance)
    assert first.told == second.told == [UseDrafter(side.index.handle)]
