"""What a configuration leaves to others, as a run's `config.yaml` says it."""

from pathlib import Path

import pytest

from rhymeflow import placement
from rhymeflow.config import Config
from rhymeflow.config.load import dump_config, parse_config
from rhymeflow.runtime import train


def before_the_start(monkeypatch, **sections) -> Config:
    monkeypatch.setattr(placement, "usable_cores", lambda: 24)
    found = train.in_force(Config.model_validate(sections), Path("runs/one"))
    assert parse_config(dump_config(found)) == found
    assert train.in_force(found, Path("runs/one")) == found
    return found


def test_cores_are_shared_where_nothing_says_how_many(monkeypatch):
    found = before_the_start(monkeypatch, rollout={"num_instances": 3})
    assert (found.learner.num_threads, found.rollout.num_threads) == (6, 6)
    assert found.run.output_dir == "runs/one"
    found = before_the_start(
        monkeypatch, learner={"num_threads": 5, "cpus": [0, 1]}, rollout={"num_threads": 4}
    )
    assert (found.learner.num_threads, found.rollout.num_threads) == (5, 4)


@pytest.mark.parametrize(("cpus", "threads"), [([[0, 1], [2, 3]], 2), ([[0, 1], [2]], None)])
def test_pinned_workers_have_as_many_threads_as_cores(monkeypatch, cpus, threads):
    found = before_the_start(
        monkeypatch, learner={"cpus": [4, 5, 6]}, rollout={"num_instances": 2, "cpus": cpus}
    )
    assert (found.learner.num_threads, found.rollout.num_threads) == (3, threads)


def test_the_upper_clip_is_the_lower_one_where_none_is_given(monkeypatch):
    for given, expected in ((None, 0.1), (0.3, 0.3)):
        learner = {"epsilon": 0.1, "epsilon_high": given}
        assert before_the_start(monkeypatch, learner=learner).learner.epsilon_high == expected


@pytest.mark.parametrize(
    ("device", "sections", "shape"),
    [
        ("cpu", {}, "linear"),
        ("cuda", {}, "tree"),
        ("cuda:1", {"rollout": {"engine": "vllm"}}, "linear"),
        ("cuda", {"drafting": {"shape": "linear"}}, "linear"),
        ("cpu", {"drafting": {"shape": "tree"}}, "tree"),
        ("cpu", {"emulation": {"profile": "qwen3-30b-a3b-h20", "devices": 16}}, "tree"),
    ],
)
def test_drafts_branch_where_a_drafted_token_costs_little(device, sections, shape):
    assert Config.model_validate(sections).draft_shape(device) == shape


def test_an_interpreter_is_the_one_that_its_name_has_here(monkeypatch, tmp_path):
    (tmp_path / "python7").write_text("")
    (tmp_path / "python7").chmod(0o700)
    monkeypatch.setenv("PATH", str(tmp_path))
    found = before_the_start(
        monkeypatch,
        environment={"agent": "verifiers", "agent_python": "python7"},
        data={"source": "verifiers:x", "options": {"python": "python7"}},
        reward={"functions": []},
    )
    assert found.environment.agent_python == str(tmp_path / "python7")
