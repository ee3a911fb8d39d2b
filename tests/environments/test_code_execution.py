"""The tool `code_execution`: what the policy is told of it, and reads of its programs."""

import asyncio
import sys
from typing import Any

import pytest

from rhymeflow.config import EnvironmentConfig
from rhymeflow.environments.code_execution import CodeExecution
from rhymeflow.environments.kinds import load_kinds
from rhymeflow.environments.live import CallFailed, LiveEnvironment
from rhymeflow.environments.messages import Call, Opening, Said
from rhymeflow.sandbox import programs
from tests.refused import refusal

pytestmark = pytest.mark.skipif(sys.platform != "linux", reason="needs Linux")
CLASS = "rhymeflow.environments.code_execution.CodeExecution"


def read(code: str) -> str:
    return CodeExecution(timeout=1).code_execution(code)


@pytest.mark.parametrize(
    ("code", "text"),
    [
        ("print(6 * 7)", "42"),
        ("x = 1", "[it printed nothing]"),
        ("import sys\nprint('a')\nprint('b', file=sys.stderr)", "a\nb"),
        ("print('a', flush=True)\nimport os; os._exit(3)", "a\n[ended: exit code 3]"),
        ("print('a', flush=True)\nwhile True: pass", "a\n[ended: out of time]"),
        ("print('y' * 5000)", "y" * 4000 + "\n[cut: 4000 of 5001 characters]"),
    ],
)
def test_the_policy_reads_what_was_printed(code, text):
    assert read(code) == text


def test_the_policy_reads_exceptions_and_the_end_of_long_ones():
    last = ["ZeroDivisionError: division by zero", "[ended: exit code 1]"]
    assert read("1 / 0").splitlines()[-2:] == last
    long = read("raise ValueError('z' * 9000)")
    assert long.startswith("[cut: 2000 of ")
    assert long.endswith("zzz\n[ended: exit code 1]")
    flood = read("while True: print('y' * 1000)")
    assert flood.startswith("yyy")
    assert "OSError: [Errno 27] File too large\n" in flood


@pytest.mark.parametrize(
    "section",
    [
        {"tools": ["code_execution"]},
        {"classes": [{"environment": CLASS, "options": {"timeout": 1}}]},
    ],
)
def test_it_is_a_tool_by_name(section):
    config = EnvironmentConfig.model_validate(section)
    [kind] = load_kinds(config)
    [schema] = kind.schemas()
    assert schema["function"]["name"] == "code_execution"
    assert schema["function"]["parameters"]["required"] == ["code"]
    live = LiveEnvironment(0, config, kind, [schema])
    call = Call("code_execution", '{"code": "print(1 + 1)"}')

    async def answered() -> Any:
        await live.open(Opening(0, 0, "p", {}))
        return (await live.step(Said("", [call]))).answer

    assert asyncio.run(answered())[0]["content"] == "2"


def test_a_sandbox_that_fails_is_not_for_the_policy(monkeypatch):
    config = EnvironmentConfig(tools=("code_execution",))
    [kind] = load_kinds(config)
    live = LiveEnvironment(0, config, kind, kind.schemas())
    monkeypatch.setattr(programs, "INSIDE", "none.py")
    call = Call("code_execution", '{"code": "print(1)"}')
    with pytest.raises(CallFailed, match="tool code_execution raised SandboxFailed: "):
        asyncio.run(live.step(Said("", [call])))


def test_without_walls_it_is_refused_before_the_first_response(monkeypatch):
    monkeypatch.setattr(programs, "standing", lambda: (None, " (limits: no)"))
    config = EnvironmentConfig(tools=("code_execution",))
    assert "cannot be run behind the walls" in refusal(load_kinds, config)
