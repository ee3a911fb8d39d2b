"""A node that is cut off and comes back, one that is slow, a run that goes on from its backup."""

from __future__ import annotations

import os
import shutil
import signal
import threading
import time

import pytest

from rhymeflow.store.backup import restore
from rhymeflow.store.reader import TrajectoryReader
from rhymeflow.utils.child import descendants
from tests.processes import is_running
from tests.ray.runs import joined, on_ray, published, train_while
from tests.ray.test_faults import PINS, elsewhere
from tests.runtime.logs import check_bound, check_replay, train
from tests.runtime.test_resume import (
    SYNCHRONOUS,
    audit,
    learned,
    resume,
    small,
    tokens,
    train_until,
)

pytestmark = [pytest.mark.ray, pytest.mark.timeout(1200)]
TWO = {"num_instances": 1, "max_instances": 2}


def test_an_instance_on_a_node_that_is_cut_off_is_replaced_and_not_believed(
    nodes, tmp_path, monkeypatch
):
    """Only what connects the node to the cluster is stopped. The instance goes on computing and
    sending; it ends when its node finds that the cluster has given it up.
    """
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

    def stop(controller):
        controller.stop_asked = True
        return True

    config = on_ray(
        tmp_path,
        cluster.address,
        **PINS,
        rollout=TWO,
        learner={"max_steps": 10_000},
    )
    with pytest.raises(KeyboardInterrupt):
        train_while(monkeypatch, config, cut_off, is_given_up, another_joined, is_gone, stop)
    assert told["lived_on"]
    audit(tmp_path / "run")
    check_replay(config)


def test_a_slow_node_is_no_lost_one(nodes, tmp_path, monkeypatch):
    """Its workers have a fifth of the time. What is generated there moves, and nothing is lost."""
    cluster = nodes(2)
    slowed: list[str] = []
    over = threading.Event()

    def slow_down(raylet: int) -> None:
        while not over.is_set():
            for stop, seconds in ((signal.SIGSTOP, 0.4), (signal.SIGCONT, 0.1)):
                for pid in descendants(raylet):
                    try:
                        os.kill(pid, stop)
                    except ProcessLookupError:
                        continue
                time.sleep(seconds)

    def slow(controller):
        away = elsewhere(controller)
        if not published(controller, 1) or len(joined(controller)) < 2 or not away:
            return False
        slowed.append(away[0].name)
        raylet = cluster.raylet(away[0].node)
        threading.Thread(target=slow_down, args=(raylet,), daemon=True).start()
        return True

    config = on_ray(
        tmp_path,
        cluster.address,
        **PINS,
        rollout=TWO,
        schedule={"name": "staleflow", "max_staleness": 2},
        learner={"max_steps": 60},
    )
    try:
        summary, _ = train_while(monkeypatch, config, slow)
    finally:
        over.set()
    assert summary.steps == 60
    audit(tmp_path / "run")
    check_bound(config)
    check_replay(config)
    log = TrajectoryReader(tmp_path / "run" / "events.db")
    ((left,),) = log.query("SELECT COUNT(*) FROM events WHERE kind = 'InstanceLeft'")
    ((after,),) = log.query(
        "SELECT COUNT(*) FROM segments WHERE instance = ? AND version > 1", slowed[0]
    )
    log.close()
    assert left == 0, "it was taken for dead"
    assert after > 0, "it generated nothing any more"


def test_a_run_whose_controller_and_directory_are_lost_goes_on_from_its_backup(
    nodes, tmp_path, monkeypatch
):
    cluster = nodes(1)
    train(small(tmp_path, "straight", **SYNCHRONOUS))
    backup = {"backup": str(tmp_path / "backup"), "save_steps": 1}
    config = on_ray(tmp_path, cluster.address, **SYNCHRONOUS, run=backup)
    behind: list[float] = []

    def is_shipped(controller):
        behind.append(time.monotonic())
        return controller.training.published >= 3 and behind[-1] - behind[0] > 1

    train_until(monkeypatch, config, is_shipped)
    shutil.rmtree(tmp_path / "run")
    restore(str(tmp_path / "backup"), tmp_path / "found")
    summary = resume(tmp_path / "found")
    assert summary.steps == config.learner.max_steps
    assert tokens(tmp_path / "found") == tokens(tmp_path / "straight")
    assert learned(tmp_path / "found") == learned(tmp_path / "straight")
    audit(tmp_path / "found")
