"""Runs whose learner is many processes: they go on when one dies, and on another number of them."""

from __future__ import annotations

import io
import os
import signal

import pytest
from rich.console import Console

from rhymeflow.runtime.controller import Controller
from tests.runtime.logs import check_bound, check_replay, reader, train
from tests.runtime.test_resume import STEPS, SYNCHRONOUS, audit, learned, resume, small

WARNING = "learner-rank-1 died (killed by SIGKILL)"


def kill_rank(monkeypatch, rank: int) -> list[int]:
    """Kill a rank once, while it trains."""
    killed: list[int] = []
    turn = Controller._tick

    def tick(self):
        turn(self)
        if self.training.published == 3 and self.training.batch is not None and not killed:
            supervisor = self.supervisor
            ranks = [supervisor.learner, *supervisor.other_ranks]
            killed.extend(worker.pid for worker in ranks)
            os.kill(killed[rank], signal.SIGKILL)

    monkeypatch.setattr(Controller, "_tick", tick)
    return killed


@pytest.mark.slow
def test_a_rank_that_dies_ends_no_run_which_then_goes_on_alone(tmp_path, monkeypatch):
    config = small(tmp_path, learner={"num_ranks": 2}, run={"token_details": True}, **SYNCHRONOUS)
    console = Console(file=io.StringIO(), width=200)
    with monkeypatch.context() as patch:
        killed = kill_rank(patch, 1)
        assert train(config, console).steps == STEPS
    assert WARNING in console.file.getvalue()
    assert len(killed) == 2
    for pid in killed:  # the survivor was replaced, too
        with pytest.raises(ProcessLookupError):
            os.kill(pid, 0)
    audit(tmp_path / "run")
    check_bound(config)
    check_replay(config)
    log = reader(config)
    ((missing,),) = log.query(
        "SELECT COUNT(*) FROM trajectories t LEFT JOIN token_details d USING (group_id, member)"
        " WHERE t.trained IS NOT NULL AND d.logprobs IS NULL"
    )
    log.close()
    assert missing == 0, "both ranks' token details are stored"
    summary = resume(tmp_path / "run", learner__num_ranks="1", learner__max_steps=str(STEPS + 2))
    assert summary.steps == STEPS + 2
    audit(tmp_path / "run")


@pytest.mark.slow
def test_a_run_of_one_rank_goes_on_on_two_and_learns_the_same(tmp_path):
    straight = small(tmp_path, "straight", **SYNCHRONOUS)
    train(straight)
    half = small(tmp_path, learner={"max_steps": STEPS // 2}, **SYNCHRONOUS)
    train(half)
    resume(tmp_path / "run", learner__num_ranks="2", learner__max_steps=str(STEPS))
    found, expected = learned(tmp_path / "run"), learned(tmp_path / "straight")
    assert found.keys() == expected.keys()
    for step, row in expected.items():
        for name, value in row.items():
            assert found[step][name] == pytest.approx(value, rel=1e-3, abs=1e-5), (step, name)
    audit(tmp_path / "run")
