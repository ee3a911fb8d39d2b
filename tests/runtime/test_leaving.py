"""Instances that die or hang while others, or their successors, go on."""

from __future__ import annotations

import io
import os
import signal

import pytest
from rich.console import Console

from rhymeflow.core.events import InstanceJoined, InstanceLeft
from rhymeflow.runtime.controller import Controller
from rhymeflow.runtime.supervisor import WorkerDied
from tests.runtime.logs import check_bound, reader, replay, train
from tests.runtime.tiny import save_model, save_prompts, tiny_config

pytestmark = pytest.mark.slow


STEPS = 3


def config_for(tmp_path, instances, window="off", **run):
    """Responses of 400 tokens, long enough that parts of them are always stored."""
    save_model(tmp_path / "model", unused_ids=1000, max_length=512)
    save_prompts(tmp_path / "prompts.jsonl")
    return tiny_config(
        tmp_path,
        rollout={"num_instances": instances, "max_num_seqs": 4, "max_completion_length": 400},
        learner={"max_steps": STEPS, "groups_per_batch": 4},
        run={"eval_steps": 0, **run},
        drafting={"window": window},
    )


def strike(monkeypatch, number, victim, *, times=1, at_version=1):
    """Send a signal to an instance in the middle of the run; again to each successor."""
    struck = []
    tick = Controller._tick

    def tick_and_strike(self):
        name = victim if not struck else f"{victim}.{len(struck)}"
        worker = self.supervisor.instances.get(name)
        is_due = len(struck) < times and self.training.published >= at_version
        if is_due and worker is not None and is_half_way(self, name):
            struck.append(worker.pid)
            os.kill(worker.pid, number)
        tick(self)

    def is_half_way(self, name):
        return any(
            segment.instance == name and segment.start + len(segment.tokens) < 200
            for group in self.in_flight._groups.values()
            for segment in group.open.values()
        )

    monkeypatch.setattr(Controller, "_tick", tick_and_strike)
    return struck


@pytest.mark.parametrize(
    ("instances", "number", "times", "window"),
    [
        (2, signal.SIGKILL, 1, "off"),
        (1, signal.SIGKILL, 2, "cost"),
        (2, signal.SIGSTOP, 1, "off"),
    ],
    ids=["one of two dies", "the only one dies, and so does its successor", "one of two hangs"],
)
def test_the_run_goes_on_and_nothing_is_lost(
    tmp_path, monkeypatch, instances, number, times, window
):
    run = {"worker_timeout": 5.0} if number == signal.SIGSTOP else {}
    config = config_for(tmp_path, instances, window, **run)
    struck = strike(monkeypatch, number, "rollout-0", times=times)
    console = Console(file=io.StringIO())
    summary = train(config, console)
    assert len(struck) == times
    assert summary.steps == STEPS
    assert summary.endings == {"consumed": 4 * STEPS, "filtered": 0, "aborted": 0}
    check_bound(config)
    events = [event for event, _ in replay(config)]
    names = [f"rollout-0.{n}" if n else "rollout-0" for n in range(times + 1)]
    assert [e.instance for e in events if isinstance(e, InstanceLeft)] == names[:-1]
    if instances == 1:  # else the others may be done before a successor is up
        assert [e.instance for e in events if isinstance(e, InstanceJoined)] == names
    said = "hangs" if number == signal.SIGSTOP else "killed by SIGKILL"
    # History, which has the lowest priority, may be silent for so long on a busy machine.
    lines = console.file.getvalue().splitlines()
    warnings = [line for line in lines if line.startswith("warning: rollout")]
    assert len(warnings) == times
    assert all(said in line for line in warnings)
    log = reader(config)
    gone_on = log.query(
        "SELECT COUNT(*) FROM segments a JOIN segments b USING (group_id, member)"
        " WHERE a.instance = 'rollout-0' AND b.instance != 'rollout-0' AND b.start > a.start"
    )
    log.close()
    assert gone_on[0][0] > 0, "what was stored of its responses was gone on with"
    for pid in struck:
        with pytest.raises(ProcessLookupError):
            os.kill(pid, 0)


def test_no_more_are_replaced_than_may_be(tmp_path, monkeypatch):
    config = config_for(tmp_path, 2, instance_restarts=0)
    strike(monkeypatch, signal.SIGKILL, "rollout-1")
    with pytest.raises(WorkerDied, match=r"rollout-1 died .*SIGKILL"):
        train(config)


def test_a_reward_worker_that_dies_is_replaced_and_asked_again(tmp_path, monkeypatch):
    """What it had not answered is judged by the next one: no reward is lost, none is made up."""
    config = config_for(tmp_path, 1)
    tick, struck, lost = Controller._tick, [], []

    def tick_and_strike(self):
        asked = self.rewards._asked
        if not struck and self.training.published >= 1 and asked:
            struck.append(self.supervisor.rewards.pid)
            lost.extend(asked)
            os.kill(struck[0], signal.SIGKILL)
        tick(self)

    monkeypatch.setattr(Controller, "_tick", tick_and_strike)
    console = Console(file=io.StringIO())
    summary = train(config, console)
    assert lost
    assert summary.steps == STEPS
    assert summary.endings == {"consumed": 4 * STEPS, "filtered": 0, "aborted": 0}
    check_bound(config)
    assert "warning: reward died (killed by SIGKILL)" in console.file.getvalue()
