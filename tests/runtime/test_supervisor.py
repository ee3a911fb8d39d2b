"""Who counts as hanging, the silent and those whose work stands still; what takes whose place."""

from types import SimpleNamespace

import pytest

from rhymeflow.config import Config
from rhymeflow.core.events import Accumulated
from rhymeflow.runtime.base import Received, WorkerLost
from rhymeflow.runtime.supervisor import Supervisor, WorkerDied
from rhymeflow.workers.messages import Alive

LIMIT = 10.0


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


def supervised(cluster, *, used_names=(), num_ranks=1, **rollout):
    config = Config.model_validate(
        {
            "runtime": "ray",
            "rollout": {"num_instances": 1, **rollout},
            "learner": {"num_ranks": num_ranks},
            "run": {"worker_timeout": LIMIT, "instance_restarts": 1},
        }
    )
    supervisor = Supervisor(config, cluster, used_names=used_names)
    supervisor.start()
    return supervisor


class Watch:
    """A supervisor of a learner of two ranks and one instance, and a clock."""

    def __init__(self) -> None:
        self.cluster, self.now = Cluster(), 0.0
        self.supervisor = supervised(self.cluster, num_ranks=2)
        self.progress = dict.fromkeys(self.cluster.workers, 0)
        self.look()

    def look(self, *said: Received) -> list[str]:
        """What is said now; why workers count as lost."""
        news = self.supervisor.watch(said, self.now)
        return [item.reason for item in news if isinstance(item, WorkerLost)]

    def beat(self, *, but: str = "", still: tuple[str, ...] = ()) -> list[str]:
        """A second later all say that they live, and what is not `still` has advanced."""
        self.now += 1.0
        said = []
        for name in set(self.progress) - {but}:
            self.progress[name] += name not in still
            said.append(Received(name, Alive(self.progress[name])))
        return self.look(*said)


@pytest.fixture
def watch():
    return Watch()


@pytest.mark.parametrize("victim", ["learner", "learner-rank-1", "rollout-0", "reward"])
@pytest.mark.parametrize("lives", [False, True])
def test_who_is_silent_or_stands_still_hangs(watch, victim, lives):
    how = {"still": (victim,)} if lives else {"but": victim}
    watch.beat()
    for _ in range(int(LIMIT)):
        assert watch.beat(**how) == []
    what = "made no progress" if lives else "been silent"
    assert watch.beat(**how) == [
        f"{victim} has {what} for 10 seconds (run.worker_timeout): it hangs"
    ]


def test_who_says_anything_else_has_worked(watch):
    for _ in range(3 * int(LIMIT)):
        assert watch.look(Received("learner", Accumulated(0, 1))) == []
        assert watch.beat(still=("learner",)) == []


def test_who_is_slow_is_not_taken_for_lost(watch):
    """As on a node that others load: a sign of life now and then, little progress."""
    for _ in range(20):
        watch.now += LIMIT - 1
        watch.progress = {name: done + 1 for name, done in watch.progress.items()}
        assert watch.look(*(Received(n, Alive(p)) for n, p in watch.progress.items())) == []


def test_a_stopped_rank_is_named_before_those_that_wait_for_it(watch):
    """The others make no progress in the meantime."""
    watch.beat()
    found = []
    while not found:
        found = watch.beat(but="learner-rank-1", still=("learner",))
    assert "learner-rank-1 has been silent" in found[0]


def test_who_has_no_place_yet_is_not():
    cluster = Cluster()
    supervisor = supervised(cluster)
    cluster.workers["learner"].node = None
    supervisor.watch((), 0.0)
    lost = [list(supervisor.watch((), now)) for now in (0.0, 1e6)]
    assert "learner" not in {item.worker for item in lost[-1]}
    assert "reward" in {item.worker for item in lost[-1]}


@pytest.mark.parametrize(
    ("used", "begun"),
    [
        ([], ["rollout-0", "rollout-1"]),
        (["rollout-0", "rollout-0.1", "rollout-1"], ["rollout-0.2", "rollout-1.1"]),
        # The first died before it had joined, so nobody has heard of it.
        (["rollout-0.1", "rollout-1.7", "rollout-10"], ["rollout-0.2", "rollout-1.8"]),
    ],
)
def test_no_instance_has_the_name_of_an_earlier_attempts(used, begun):
    assert list(supervised(Cluster(), used_names=used, num_instances=2).instances) == begun


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


@pytest.mark.parametrize("lost", ["rollout", "learner", "reward"])
def test_a_loss_counts_for_an_hour(watch, lost):
    def lose(now):
        list(watch.supervisor.watch((), now))
        if lost == "rollout":
            watch.supervisor.replace_instance(WorkerLost(*watch.supervisor.instances, "it died"))
        else:
            is_learner = lost == "learner"
            worker = watch.supervisor.learner if is_learner else watch.supervisor.rewards
            watch.supervisor.replace(WorkerLost(worker.name, "it died"))

    for hour in range(3):
        lose(3600.0 * hour)
    with pytest.raises(WorkerDied):
        lose(3600.0 * 2.99)


@pytest.mark.parametrize("lost", ["learner-rank-1", "reward"])
def test_others_are_replaced_as_often_as_may_be_and_ranks_together(watch, lost):
    again = watch.supervisor.replace(WorkerLost(lost, "it died")).name
    ranks = ["learner", "learner-rank-1"]
    assert watch.cluster.stopped == (ranks if lost in ranks else [lost])
    assert again in ("learner.1", "reward.1")
    with pytest.raises(WorkerDied, match="again"):
        watch.supervisor.replace(WorkerLost(again, "it died again"))
