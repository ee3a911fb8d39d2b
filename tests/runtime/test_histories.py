"""Histories: each node with instances has one, a process that fills an index; it is replaced."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from pathlib import Path
from types import SimpleNamespace

import pytest

from rhymeflow.config import Config
from rhymeflow.core.types import TrajectoryId
from rhymeflow.errors import UserError
from rhymeflow.histospec.handle import IndexHandle
from rhymeflow.histospec.index import Index
from rhymeflow.runtime.base import Received, WorkerLost
from rhymeflow.runtime.histories import Histories
from rhymeflow.runtime.local import LocalRuntime
from rhymeflow.runtime.supervisor import Supervisor
from rhymeflow.store.writer import SqliteTrajectoryStore
from rhymeflow.utils import shared_memory
from rhymeflow.workers.messages import Failed, HistoryGrew, HistoryReady, UseDrafter
from tests.runtime.test_supervisor import Cluster, supervised
from tests.runtime.tiny import tiny_config
from tests.store.stores import put

# -- the controller's side, with workers that are none --------------------------------------------


@pytest.fixture
def side():
    cluster = Cluster({"rollout-0": "a", "rollout-1": "a", "rollout-2": "b"})
    supervisor = supervised(cluster, num_instances=3)
    warnings, freed = list[str](), list[str]()
    histories = Histories(supervisor._config, supervisor, warn=warnings.append, free=freed.append)
    return SimpleNamespace(
        cluster=cluster, supervisor=supervisor, histories=histories, warnings=warnings, freed=freed
    )


def handle(name: str) -> IndexHandle:
    return IndexHandle(name, 1, 1, 1)


def test_each_node_has_one_and_its_instances_draft_from_it(side):
    instances = side.supervisor.instances.values()
    for _ in range(2):
        side.histories.start()
    assert {n: w.node for n, w in side.cluster.workers.items() if "history" in n} == {
        "history": "a",
        "history.1": "b",
    }
    side.histories.hear("history.1", HistoryReady(handle("of b")))
    for _ in range(2):
        for instance in instances:
            side.histories.let_draft(instance)
    assert [instance.told for instance in instances] == [[], [], [UseDrafter(handle("of b"))]]
    side.histories.hear("history", HistoryGrew(5))
    side.histories.hear("history.1", HistoryGrew(7))
    assert side.histories.metrics() == {"draft/history_tokens": 7}


def test_one_that_is_lost_is_replaced_as_often_as_may_be(side):
    first = side.supervisor.instances["rollout-0"]
    side.histories.let_draft(first)
    side.histories.hear("history", HistoryReady(handle("old")))
    side.histories.let_draft(first)
    side.histories.lose(WorkerLost("history", "it died"))
    assert side.cluster.stopped == ["history"]
    assert side.freed == ["old"]
    assert side.cluster.workers["history.1"].node == "a"
    late = side.supervisor.instances["rollout-1"]
    side.histories.let_draft(late)
    assert late.told == [], "what the old one left is gone"
    side.histories.hear("history.1", HistoryReady(handle("new")))
    side.histories.let_draft(first)
    assert first.told == [UseDrafter(handle("old")), UseDrafter(handle("new"))]
    side.histories.lose(WorkerLost("history.1", "it died"))
    assert "history.2" not in side.cluster.workers
    assert "replaced as often as may be" in side.warnings[-1]


def test_that_of_a_node_without_instances_is_forgotten(side):
    last = side.supervisor.instances["rollout-2"]
    side.histories.let_draft(last)
    del side.supervisor.instances["rollout-2"]
    side.histories.lose(WorkerLost("history", "its node is gone"))
    assert "history.1" not in side.cluster.workers
    side.histories.let_draft(last)  # the node has instances again
    assert side.cluster.workers["history.1"].node == "b"


def test_a_run_that_does_not_draft_has_none(side):
    config = Config.model_validate({"runtime": "ray", "drafting": {"window": "off"}})
    histories = Histories(config, side.supervisor, warn=print, free=print)
    histories.start()
    assert histories.metrics() == {}
    assert "history" not in side.cluster.workers


def test_what_the_user_has_to_change_ends_the_run(side):
    side.histories.start()
    said = Failed("/dev/shm has no room for the history index", user_error=True)
    with pytest.raises(UserError, match="no room"):
        list(side.supervisor.watch([Received("history", said)], 0.0))


# -- the process itself ----------------------------------------------------------------------------


def test_the_process_loads_no_torch():
    code = "import rhymeflow.workers.entry, rhymeflow.workers.history, sys; print(*sys.modules)"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert not {"torch", "transformers"} & set(done.stdout.split())


class Run:
    """A run of which there is nothing but its store, its history, and an instance to be told."""

    def __init__(self, directory: Path, history: str | None = None, **sections):
        drafting = {"window": "cost", "history_run": history}
        self.config = tiny_config(directory, drafting=drafting, **sections)
        self.run_dir = directory / "run"
        self.run_dir.mkdir()
        self.store = SqliteTrajectoryStore(self.run_dir / "events.db")
        self.runtime = LocalRuntime(self.config, self.run_dir, self.run_dir / "logs")
        self.supervisor = Supervisor(self.config, self.runtime)
        self.told: list[UseDrafter] = []
        self.instance = SimpleNamespace(name="rollout-0", node="", send=self.told.append)
        self.supervisor.instances = {"rollout-0": self.instance}
        self.warnings: list[str] = []
        self.history = Histories(
            self.config, self.supervisor, warn=self.warnings.append, free=shared_memory.free_left
        )
        self.now = 0.0

    @property
    def worker(self):
        """The history process, if there is one."""
        return next((w for n, w in self.supervisor._workers.items() if "history" in n), None)

    @property
    def index(self) -> Index:
        """What the instance drafts from."""
        return Index.attach(self.told[-1].index)

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
                self.history.let_draft(self.instance)

    def until(self, condition) -> None:
        deadline = time.monotonic() + 120
        while not condition():
            assert time.monotonic() < deadline
            self.turn()

    def until_written(self, count: int) -> None:
        self.until(lambda: self.told and self.index.num_responses == count)

    def close(self) -> None:
        self.runtime.close()
        self.store.close()


@pytest.fixture
def begun(tmp_path):
    runs = []

    def begin(**sections) -> Run:
        runs.append(Run(tmp_path, **sections))
        return runs[-1]

    yield begin
    for run in runs:
        run.close()
        left = shared_memory.DIRECTORY.glob(shared_memory.prefix_for(run.run_dir, "") + "*")
        assert not list(left)


def test_another_takes_its_place_and_knows_what_it_knew_as_often_as_may_be(begun):
    """First it hangs, then its successor dies."""
    run = begun(run={"instance_restarts": 1})
    run.add(30)
    run.history.start()
    run.until_written(30)
    tokens, first = run.index.num_tokens, run.worker
    os.kill(first.pid, signal.SIGSTOP)
    for _ in range(10):
        run.turn()  # what it had said before
    run.now += run.config.run.worker_timeout + 1
    run.until(lambda: run.worker is not first)
    with pytest.raises(ProcessLookupError):
        os.kill(first.pid, 0)
    run.add(40)  # 30 of them were there
    run.until(lambda: len(run.told) == 2)
    run.until_written(40)
    index = run.index
    assert index.num_tokens == tokens * 40 // 30, "each is there once"
    os.kill(run.worker.pid, signal.SIGKILL)
    run.until(lambda: run.worker is None)
    hangs, died = run.warnings
    assert "hangs" in hangs
    assert "the run goes on" in hangs
    assert "history.1 died (killed by SIGKILL)" in died
    assert "run.instance_restarts" in died
    assert "\n" not in hangs + died
    assert index.num_responses == 40, "what was written is still there for who drafts from it"


def test_a_defect_costs_drafts_and_not_the_run(begun):
    run = begun(run={"instance_restarts": 0})
    run.store._connection.execute("DROP TABLE segments")
    run.history.start()
    run.until(lambda: run.worker is None)
    (warning,) = run.warnings
    assert "history failed: sqlite3.OperationalError: no such table: segments" in warning
    assert "\n" not in warning


def test_it_begins_with_an_earlier_run(begun, tmp_path):
    earlier = tmp_path / "earlier"
    earlier.mkdir()
    run = begun(history=str(earlier))
    store = SqliteTrajectoryStore(earlier / "events.db")
    store.begin_attempt(run.config.model_dump_json(), now=0.0, started="before")
    for group in range(7):
        put(store, TrajectoryId(group, 0), 0, [group] * 5)
    store.commit()
    store.close()
    run.history.start()
    run.until_written(7)
    run.add(2)
    run.until_written(9)
