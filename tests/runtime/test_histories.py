"""Histories: each node with instances has one, a process that fills an index; it is replaced."""

from types import SimpleNamespace

import pytest

from rhymeflow.config import Config
from rhymeflow.errors import UserError
from rhymeflow.histospec.draft import IndexHandle
from rhymeflow.runtime.base import Received, WorkerLost
from rhymeflow.runtime.histories import Histories
from rhymeflow.workers.messages import Failed, HistoryGrew, UseDrafter
from tests.runtime.test_supervisor import Cluster, supervised


@pytest.fixture
def side():
    cluster = Cluster({"rollout-0": "a", "rollout-1": "a", "rollout-2": "b"})
    supervisor = supervised(cluster, num_instances=3)
    warnings, freed = list[str](), list[str]()
    reporter = SimpleNamespace(warn=warnings.append)
    histories = Histories(supervisor._config, supervisor, reporter, free=freed.append)
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
    side.histories.hear("history.1", HistoryGrew(handle("of b"), 0))
    for _ in range(2):
        for instance in instances:
            side.histories.let_draft(instance)
    assert [instance.told for instance in instances] == [[], [], [UseDrafter(handle("of b"))]]
    side.histories.hear("history", HistoryGrew(handle("of a"), 5))
    side.histories.hear("history.1", HistoryGrew(handle("of b"), 7))
    assert side.histories.metrics() == {"draft/history_tokens": 7}


def test_one_that_is_lost_is_replaced_as_often_as_may_be(side):
    first = side.supervisor.instances["rollout-0"]
    side.histories.let_draft(first)
    side.histories.hear("history", HistoryGrew(handle("old"), 0))
    side.histories.let_draft(first)
    side.histories.lose(WorkerLost("history", "it died"))
    assert side.cluster.stopped == ["history"]
    assert side.freed == ["old"]
    assert side.cluster.workers["history.1"].node == "a"
    late = side.supervisor.instances["rollout-1"]
    side.histories.let_draft(late)
    assert late.told == [], "what the old one left is gone"
    side.histories.hear("history.1", HistoryGrew(handle("new"), 0))
    side.histories.let_draft(first)
    assert first.told == [UseDrafter(handle("old")), UseDrafter(handle("new"))]
    side.histories.lose(WorkerLost("history.1", "it died"))
    assert "history.2" not in side.cluster.workers
    assert "replaced as often as run.instance_restarts allows" in side.warnings[-1]


def test_one_that_hangs_is_replaced(side):
    side.histories.start()
    list(side.supervisor.watch((), 0.0))
    (loss, _) = (e for e in side.supervisor.watch((), 1e6) if "history" in e.worker)
    assert "has been silent" in loss.reason
    side.histories.lose(loss)
    assert side.cluster.workers["history.2"].node == side.cluster.workers[loss.worker].node


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
    histories = Histories(config, side.supervisor, SimpleNamespace(warn=print), free=print)
    histories.start()
    assert histories.metrics() == {}
    assert "history" not in side.cluster.workers


def test_a_defect_costs_drafts_and_not_the_run(side):
    side.histories.start()
    said = Failed("Traceback\n  ...\nOperationalError: no such table\n", user_error=False)
    (loss,) = side.supervisor.watch([Received("history", said)], 0.0)
    assert loss.reason == "history failed: OperationalError: no such table"


def test_what_the_user_has_to_change_ends_the_run(side):
    side.histories.start()
    said = Failed("/dev/shm has no room for the history index", user_error=True)
    with pytest.raises(UserError, match="no room"):
        list(side.supervisor.watch([Received("history", said)], 0.0))
