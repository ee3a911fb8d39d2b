"""Tasks of verifiers, and other clients, in a Python of their own: `make test-verifiers`.

The tasks' rubric, their MCP server, the harness and the client are verifiers' own. In that Python
OpenAI's client is version 2, in this one version 3.
"""

import contextlib
import os
from pathlib import Path
from typing import Any

import pytest

from rhymeflow.config import Config
from rhymeflow.data.generators import generate
from rhymeflow.environments.agents import Agents
from rhymeflow.utils.objects import LOOPBACK
from tests.environments import programs
from tests.environments.test_agents import CHAT, END, Play
from tests.environments.test_rendering import ids
from tests.refused import refusal
from tests.verifiers import clients

PYTHON = os.environ.get("RHYMEFLOW_VERIFIERS", "")
pytestmark = pytest.mark.skipif(not PYTHON, reason="make test-verifiers names a Python that has it")
SOURCE = "verifiers:sumtools"
CALL = '<tool_call>{"name": "add", "arguments": {"a": 41}}</tool_call>'


@pytest.fixture(autouse=True)
def _can_be_imported(monkeypatch):
    here = Path(__file__).parent
    monkeypatch.setenv("PYTHONPATH", f"{here}{os.pathsep}{here.parents[1]}")


def rows(num_train: int, num_held_out: int = 0, **options: Any) -> list[list[Any]]:
    given = {"python": PYTHON, **options}
    parts = generate(SOURCE, given, 0, num_train, num_held_out, "data.source")
    return [[each.values for each in part] for part in parts]


@pytest.fixture
def playing(tmp_path):
    with contextlib.ExitStack() as stack:

        def start(agent):
            environment = {"agent": agent, "agent_python": PYTHON, "idle_timeout": 120.0}
            config = Config.model_validate(
                {
                    "environment": environment,
                    "reward": {"functions": []},
                    "rollout": {"max_completion_length": 1000},
                }
            )
            agents = Agents(config, CHAT, tmp_path / "log", LOOPBACK)
            stack.callback(agents.close)
            agents.start()
            play = Play(agents, CHAT)
            play.patience = 120.0  # these libraries are slow to import
            return play

        yield start


@pytest.fixture
def play(playing):
    return playing("verifiers")


def test_tasks_are_rows():
    train, held_out = rows(3, 2, taskset={"least": 7})
    assert [each["prompt"] for each in train] == [f"What is {a} + 40?" for a in (7, 8, 9)]
    assert [each["verifiers"]["task"]["answer"] for each in held_out] == [50, 51]
    assert refusal(rows, 9) == "data.source: verifiers:sumtools has 5 tasks, and data.size = 9"
    assert "leest Extra inputs are not permitted" in refusal(rows, 1, taskset={"leest": 1})
    other = refusal(generate, "verifiers:nowhere", {"python": PYTHON}, 0, 1, 0, "data.source")
    assert "taskset 'nowhere' not found" in other


def test_a_rubric_rewards_the_policy(play):
    [[row], _] = rows(1)
    assert play.episode(lambda n: f"42{END}", room=1000, **row) == 1.5
    assert play.read()[0].endswith("What is 2 + 40?<|im_end|>\n<|im_start|>assistant\n")
    assert play.episode(lambda n: f"It may be 42.{END}", "3.2", room=1000, **row) == 1.0
    failed = play.episode(lambda n: f"raise{END}", "3.3", room=1000, **row)
    assert "the agent of 3.3 raised RuntimeError: TaskError: " in failed
    assert "this is no sum" in failed


def test_a_tool_of_its_server_answers_the_policy(play):
    """What it sampled, two spaces included, is what it reads before the answer."""
    [[row], _] = rows(1, taskset={"task": {"has_calculator": True}})
    call = '<tool_call>{"name": "calc_add", "arguments": {"a": 2,  "b": 40}}</tool_call>'
    assert play.episode(lambda n: (call, "42")[n - 1] + END, room=1000, **row) == 1.5
    first, second = play.read()
    assert second.startswith(first + call)
    assert "\n42<|im_end|>" in second[len(first) + len(call) :]


def test_litellm_calls_a_tool_and_streams(playing):
    play = playing(f"{clients.__file__}:uses_litellm")
    says = [f"{CALL}{END}", f"42{END}", f"42{END}"]
    assert play.episode(lambda n: says[n - 1], room=1000) == 42.0
    first, second, again = play.read()
    assert second == again
    assert second.startswith(first + CALL)
    assert [each.until.texts for each in play.asked["3.1"]] == [("\n\n",), (), ()]


@pytest.mark.parametrize("responses", [False, True])
def test_openai_agents_calls_a_function(playing, responses):
    play = playing(f"{clients.__file__}:uses_openai_agents")
    says = [f"{CALL}{END}", f"42{END}"]
    assert play.episode(lambda n: says[(n - 1) % 2], room=1000, responses=responses) == 42.0
    first, second, *again = play.read()
    assert again == [first, second]
    assert second.startswith(first + CALL)
    assert "\n42<|im_end|>" in second[len(first) + len(CALL) :]


def test_the_train_client_of_verifiers_has_the_tokens_that_were_sampled(playing, tmp_path):
    CHAT.save_pretrained(tmp_path / "tokenizer")
    play, said = playing(f"{clients.__file__}:uses_train_client"), f"42{END}"
    about = {"tokenizer": str(tmp_path / "tokenizer"), "sampled": ids(CHAT, said)}
    assert play.episode(lambda n: said, room=1000, **about) == len(about["sampled"])
    assert "What is 2 + 40?" in play.read()[0]


def test_the_second_version_of_openais_client_works_unchanged(playing):
    play = playing(f"{programs.FILE}:official_clients")
    says = f"I add. {CALL}{END}"
    reward = play.episode(lambda n: f"{n}{END}" if n < 6 else says, room=1000, prompt="add")
    assert reward == 21.0
