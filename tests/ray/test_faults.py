"""Workers and nodes that die, hang and come: the run goes on, and its log holds every law."""

import os
import signal
import subprocess
from pathlib import Path

import pytest

from rhymeflow.store.reader import TrajectoryReader
from tests.processes import is_running
from tests.ray.runs import joined, on_ray, published, train_until
from tests.runtime.logs import audit, check_replay
from tests.runtime.test_resume import BY_DIFFERENCES, resume
from tests.runtime.tiny import program, until
from tests.runtime.tiny import published as published_in

pytestmark = [pytest.mark.ray, pytest.mark.timeout(1200)]
STEPS = 12
PINS = {"run": {"eval_steps": 0, "save_steps": 3, "worker_timeout": 40.0, "instance_restarts": 2}}


def elsewhere(controller) -> list:
    """The instances that have joined, on nodes that have neither the learner nor the controller."""
    import ray

    here = {controller.supervisor.learner.node, ray.get_runtime_context().get_node_id()}
    instances = controller.supervisor.instances
    return [
        instances[name]
        for name in joined(controller)
        if name in instances and instances[name].node not in here
    ]


def test_instances_die_hang_leave_and_come(nodes, tmp_path):
    cluster = nodes(2)
    told: dict[str, str] = {}

    def both_joined(controller):
        return len(joined(controller)) >= 2 and published(controller, 1)

    def kill_an_instance(controller):
        if not both_joined(controller):
            return False
        told["killed"] = joined(controller)[0]
        os.kill(controller.supervisor.instances[told["killed"]].pid, signal.SIGKILL)
        return True

    def kill_a_node(controller):
        away = elsewhere(controller)
        if told["killed"] in joined(controller) or not both_joined(controller) or not away:
            return False
        told["left"] = away[0].name
        cluster.kill(away[0].node)
        return True

    def stop_an_instance(controller):
        there = joined(controller)
        if told["left"] in there or not there:
            return False
        told["hung"] = there[0]
        os.kill(controller.supervisor.instances[there[0]].pid, signal.SIGSTOP)
        return True

    def add_a_node(controller):
        if told["hung"] in joined(controller):
            return False
        told["new"] = cluster.add()
        return True

    def new_one_is_used(controller):
        return any(worker.node == told["new"] for worker in elsewhere(controller))

    config = on_ray(
        tmp_path,
        cluster.address,
        **PINS,
        # One more than there is room for once a node is gone: it waits for the new one.
        rollout={"num_instances": 1, "max_instances": 3},
        learner={"max_steps": 10_000},
        drafting={"window": "aimd"},
        weights=BY_DIFFERENCES["weights"],
    )

    acts = kill_an_instance, kill_a_node, stop_an_instance, add_a_node, new_one_is_used
    train_until(config, *acts)
    audit(tmp_path / "run")
    check_replay(config)
    log = TrajectoryReader(tmp_path / "run" / "events.db")
    left = {name for (name,) in log.query(
        "SELECT json_extract(body, '$.instance') FROM events WHERE kind = 'InstanceLeft'"
    )}  # fmt: skip
    log.close()
    assert {told["killed"], told["left"], told["hung"]} <= left


def test_an_instance_on_a_node_that_is_cut_off_is_replaced_and_not_believed(nodes, tmp_path):
    """Only what connects the node to the cluster is stopped. The instance goes on computing and
    sending; it ends when its node finds that the cluster has given it up."""
    cluster = nodes(2)
    told: dict = {}

    def cut_off(controller):
        away = elsewhere(controller)
        if not published(controller, 2) or len(joined(controller)) < 2 or not away:
            return False
        told.update(name=away[0].name, pid=away[0].pid, raylet=cluster.raylet(away[0].node))
        os.kill(told["raylet"], signal.SIGSTOP)
        return True

    def is_given_up(controller):
        if told["name"] in joined(controller):
            return False
        told["lived_on"] = is_running(told["pid"])
        return True

    def another_joined(controller):
        if len(joined(controller)) < 2:
            return False
        os.kill(told["raylet"], signal.SIGCONT)
        return True

    def is_gone(controller):
        return not is_running(told["pid"])

    config = on_ray(
        tmp_path,
        cluster.address,
        **PINS,
        rollout={"num_instances": 1, "max_instances": 2},
        learner={"max_steps": 10_000},
    )
    train_until(config, cut_off, is_given_up, another_joined, is_gone)
    assert told["lived_on"]
    audit(tmp_path / "run")
    check_replay(config)


def test_a_controller_that_is_killed_takes_its_actors_along_and_is_resumed(nodes, tmp_path):
    cluster = nodes(1)
    config = on_ray(tmp_path, cluster.address, **PINS, learner={"max_steps": STEPS})
    quiet = subprocess.DEVNULL
    process = program(config, tmp_path, stdout=quiet, stderr=quiet)
    until(lambda: published_in(tmp_path / "run") >= 3 or process.poll() is not None, 600)
    assert process.poll() is None
    process.kill()
    process.wait()
    until(lambda: not workers_of(tmp_path / "run"), 600)
    assert resume(tmp_path / "run").steps == STEPS
    audit(tmp_path / "run")
    check_replay(config)


def workers_of(run_dir: Path) -> list[str]:
    """Processes that write to a log of the run."""
    found = []
    for link in Path("/proc").glob("[0-9]*/fd/1"):
        try:
            target = os.readlink(link)
        except OSError:  # it has ended
            continue
        found += [target] if target.startswith(str(run_dir / "logs")) else []
    return found
