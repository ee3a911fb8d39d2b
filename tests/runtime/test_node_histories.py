"""A history on each node that has instances, and more instances where there is room."""

from __future__ import annotations

from types import SimpleNamespace

import pytest

from rhymeflow.config import Config
from rhymeflow.histospec.handle import IndexHandle
from rhymeflow.runtime.base import WorkerLost
from rhymeflow.runtime.node_histories import NodeHistories
from rhymeflow.runtime.supervisor import Supervisor, WorkerDied
from rhymeflow.workers.messages import HistoryGrew, HistoryReady, IndexHistory, UseDrafter


class Cluster:
    """A runtime whose workers are where they are asked to be, instances as `nodes` says."""

    def __init__(self, nodes: dict[str, str] | None = None) -> None:
        self.nodes, self.workers, self.stopped, self.room = nodes or {}, {}, [], 0

    def start(self, role, name, resources):
        told: list = []
        node = resources.node or self.nodes.get(name, "head")
        worker = SimpleNamespace(name=name, node=node, told=told, send=told.append)
        self.workers[name] = worker
        return worker

    def has_room(self, role, resources):
        assert role == "rollout"
        return self.room > 0

    def stop(self, name, *, patience):
        self.stopped.append(name)


def supervised(cluster, **rollout):
    sections = {"rollout": {"num_instances": 1, **rollout}, "run": {"instance_restarts": 1}}
    config = Config.model_validate({"runtime": "ray", **sections})
    supervisor = Supervisor(config, cluster)
    supervisor.start()
    return supervisor


@pytest.fixture
def side():
    cluster = Cluster({"rollout-0": "a", "rollout-1": "a", "rollout-2": "b"})
    supervisor = supervised(cluster, num_instances=3)
    warnings: list[str] = []
    histories = NodeHistories(supervisor, warnings.append, is_wanted=True, restarts=1)
    return SimpleNamespace(
        cluster=cluster, supervisor=supervisor, histories=histories, warnings=warnings
    )


def handle(name: str) -> IndexHandle:
    return IndexHandle(name, 1, 1, 1)


def test_each_node_has_one_and_its_instances_draft_from_it(side):
    instances = side.supervisor.instances.values()
    for _ in range(2):
        for instance in instances:
            side.histories.let_draft(instance)
    assert {n: w.node for n, w in side.cluster.workers.items() if "history" in n} == {
        "history": "a",
        "history.1": "b",
    }
    assert side.cluster.workers["history"].told == [IndexHistory(None)]
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
    assert side.cluster.workers["history.1"].node == "a"
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
    histories = NodeHistories(side.supervisor, print, is_wanted=False, restarts=1)
    histories.let_draft(side.supervisor.instances["rollout-0"])
    assert histories.metrics() == {}
    assert "history" not in side.cluster.workers


def test_it_grows_while_there_is_room_up_to_the_most():
    cluster = Cluster()
    supervisor = supervised(cluster, max_instances=3)
    assert supervisor.grow() is None
    cluster.room = 1
    assert [supervisor.grow().name for _ in range(2)] == ["rollout-1", "rollout-2"]
    assert supervisor.grow() is None


def test_above_the_least_a_lost_instance_is_replaced_when_there_is_room():
    cluster = Cluster()
    cluster.room = 1
    supervisor = supervised(cluster, max_instances=2)
    supervisor.grow()
    assert supervisor.replace_instance(WorkerLost("rollout-0", "gone", with_node=True)) is None
    replaced = supervisor.replace_instance(WorkerLost("rollout-1", "gone", with_node=True))
    assert replaced.name == "rollout-1.1"
    assert supervisor.grow().name == "rollout-0.1"


def test_only_those_that_did_not_go_with_their_node_are_counted():
    supervisor = supervised(Cluster())
    for number in range(3):
        loss = WorkerLost(*supervisor.instances, f"node {number} is gone", with_node=True)
        supervisor.replace_instance(loss)
    supervisor.replace_instance(WorkerLost(*supervisor.instances, "it died"))
    with pytest.raises(WorkerDied, match="again"):
        supervisor.replace_instance(WorkerLost(*supervisor.instances, "it died again"))
