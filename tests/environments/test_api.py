"""What users import, and what is looked at before a run."""

from typing import Any

import pytest

from rhymeflow.config import Config, EvalConfig
from rhymeflow.data.prompts import kind_of
from rhymeflow.environments import check_names, tool_schemas, tool_schemas_apart
from rhymeflow.environments.kinds import load_kinds
from rhymeflow.errors import UserError
from rhymeflow.suites.suite import RUN
from tests.environments.worlds import FILE
from tests.refused import refusal


def config(*classes: Any, tools: tuple[str, ...] = ()) -> Config:
    named = [each if isinstance(each, dict) else {"environment": each} for each in classes]
    for each in named:
        each["environment"] = f"{FILE}:{each['environment']}"
    section = {"classes": named, "tools": [f"{FILE}:{each}" for each in tools]}
    return Config.model_validate({"environment": section})


def names(schemas: Any) -> list[str]:
    return [each["function"]["name"] for each in schemas]


def test_the_policy_is_told_of_functions_and_public_methods():
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


def test_of_several_classes_each_has_its_own():
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


def test_options_are_those_of_the_class():
    [kind] = load_kinds(config({"environment": "Echo", "options": {"greeting": "hi "}}).environment)
    assert kind.make is not None
    assert kind.make().greeting == "hi "
    with pytest.raises(UserError, match="takes no option 'greting'; did you mean greeting"):
        tool_schemas(config({"environment": "Echo", "options": {"greting": "hi"}}))


@pytest.mark.parametrize(
    ("classes", "tools", "says"),
    [
        (["multiply"], [], "needs the option 'a'"),
        (["breaks"], [], "raised ValueError: no server"),
        (["Echo"], ["multiply"], "it has a `step`, so environment.tools are never called"),
        (["Counter"], ["add"], "its method 'add' has the name of one of"),
        ([], ["Counter"], "is a type, not a function"),
        ([], ["undocumented"], "tool undocumented of tools: Cannot generate JSON schema"),
        ([], ["untyped"], "tool untyped of tools: "),
    ],
)
def test_what_cannot_be_had_is_refused(classes, tools, says):
    assert says in refusal(tool_schemas, config(*classes, tools=tuple(tools)))


def test_files_are_looked_at_before_anything_of_them_runs():
    check_names(config("Counter", tools=("multiply",)))
    with pytest.raises(UserError, match=r"tool .*: there is no 'nothing' in it"):
        check_names(config(tools=("nothing",)))
    with pytest.raises(UserError, match=r"environment .*: there is no 'Echoo' in it"):
        check_names(config("Echoo"))


def test_they_are_the_same_found_in_another_process():
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
