"""What a configuration leaves to others, as a run's `config.yaml` says it."""

import json
from operator import attrgetter
from pathlib import Path
from typing import Any, Literal, get_args, get_origin

import pytest
from pydantic import ValidationError
from pydantic.fields import FieldInfo

from rhymeflow import placement
from rhymeflow.config import Config, yaml
from rhymeflow.config.fields import every_field, section_of
from rhymeflow.config.load import dump_config, parse_config
from rhymeflow.errors import UserError
from rhymeflow.runtime import train
from tests.refused import refusal


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


# -- configurations made in Python ---------------------------------------------------------------


VALUES = (True, False, 1, 2, 3, 0.5, 0.9, 1e-3, "some", ("some",), (1,), ((1,),), {"a": 1})
"""One of these is a valid value of each field of a scalar or list type, and not its default."""
OWN: dict[str, Any] = {
    "learner.off_policy_masks": {"veto": 0.9},
    "data.few_shot": [{"role": "assistant", "content": "x"}],
    "environment.classes": [{"environment": "a.B"}],
    "eval.suites": [{"name": "a"}],
    "reward.functions": [{"function": "a.b", "options": {"x": (1, 2)}}],
}


def as_section(path: str, value: Any) -> dict[str, Any]:
    for part in reversed(path.split(".")):
        value = {part: value}
    return value


def changed(path: str, field: FieldInfo) -> Config | str:
    """A configuration with another valid value of this field alone, or why there is none."""
    literals = [each for kind in (field.annotation, *get_args(field.annotation))
                if get_origin(kind) is Literal for each in get_args(kind)]  # fmt: skip
    refusals = []
    for value in [OWN.get(path), *literals, *((each,) for each in literals), *VALUES]:
        try:
            config = Config(**as_section(path, value))
            if attrgetter(path)(config) != attrgetter(path)(Config()):
                return config
        except ValidationError as error:
            refusals += [each["msg"] for each in error.errors() if each["type"] == "value_error"]
    return "; ".join(refusals)


def test_what_resume_would_refuse_is_refused_at_the_start(monkeypatch):
    begun, refused = list[Config](), set()

    def begin(config: Config, *_: object) -> None:
        begun.append(config)
        raise UserError("begun")

    monkeypatch.setattr(train, "claimed", begin)
    fields = {path: each for path, each in every_field() if not section_of(each.annotation)}
    for path, field in fields.items():
        config = changed(path, field)
        if isinstance(config, str):
            assert path.rpartition(".")[2] in config, path
            refused.add(path)
        elif (said := refusal(train.train, config)) != "begun":
            assert said.startswith(f"Config: {path}: has no effect "), path
            refused.add(path)
        else:
            value = json.loads(json.dumps(attrgetter(path)(config), default=dict))
            assert parse_config(yaml.write(as_section(path, value))) == begun[-1], path
    assert {"environment.max_turns", "ray.address", "learner.gamma", "sft.size"} <= refused
    assert len(refused) < len(fields) / 2, refused
