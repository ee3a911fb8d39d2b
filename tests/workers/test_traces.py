"""Which steps of a worker are recorded; `runtime/test_run_directory.py` reads those of a run."""

from pathlib import Path

import pytest
import torch

from rhymeflow.config.load import read_config
from rhymeflow.errors import UserError
from rhymeflow.runtime.resume_options import check_change
from rhymeflow.workers import rollout, traces
from rhymeflow.workers.traces import Traces


def recorded(directory: Path) -> list[str]:
    found = [path.name.removesuffix(".json.gz") for path in (directory / "profile").glob("*")]
    return sorted(found)


def test_a_step_that_was_passed_over_is_recorded_by_the_next_but_no_earlier_one(tmp_path):
    of_worker = Traces((9, 2, 3, 5), tmp_path / "profile" / "rollout-0")
    for step in (3, 4, 7, 8):  # it joined at version 2
        of_worker.begin(step)
        of_worker.begin(step)  # has no effect: it is being recorded
        torch.ones(2).sum()
        of_worker.end()
        of_worker.end()
    assert recorded(tmp_path) == ["rollout-0-step-3", "rollout-0-step-7"]


def test_an_engine_is_recorded_for_so_many_iterations(tmp_path, monkeypatch):
    monkeypatch.setattr(traces, "MAX_ITERATIONS", 3)
    instance = Traces((1,), tmp_path / "profile" / "rollout-0")
    instance.begin(1)
    for number in range(5):
        assert recorded(tmp_path) == (["rollout-0-step-1"] if number >= 3 else [])
        instance.count_iteration()


def test_only_learners_and_the_first_instance_are_recorded(tmp_path, monkeypatch):
    monkeypatch.setattr(rollout, "RolloutInstance", plain := rollout.RolloutInstance)
    config = read_config("demo", {"run.profile_steps": "3"})
    for role, name in (("rollout", "rollout-1"), ("reward", "reward"), ("history", "history")):
        traces.record(role, name, config, tmp_path / "not there")
    assert rollout.RolloutInstance is plain
    with pytest.raises(UserError, match=r"run\.profile_steps: there is no .*not there on .* roll"):
        traces.record("rollout", "rollout-0.1", config, tmp_path / "not there")
    traces.record("rollout", "rollout-0.1", config, tmp_path)
    assert issubclass(rollout.RolloutInstance, plain)
    assert rollout.RolloutInstance is not plain


def test_steps_that_do_not_come_are_refused():
    with pytest.raises(UserError, match=r"run\.profile_steps: there is no step 12: learner\.max_"):
        read_config("demo", {"run.profile_steps": "[3, 12]", "learner.max_steps": "10"})
    before, after = (read_config("demo", {"run.profile_steps": s}) for s in ("[2]", "[2, 4]"))
    check_change(before, after, published=3)
    with pytest.raises(UserError, match=r"^run\.profile_steps: the run has done step 4 already$"):
        check_change(before, after, published=4)
