"""What docs/from-others.md shows, with functions and classes as other trainers have them."""

import asyncio
import re
import sys
from pathlib import Path

import pytest
import torch

from rhymeflow.config import EnvironmentConfig, RewardFunction
from rhymeflow.environments.kinds import load_kinds
from rhymeflow.errors import UserError
from rhymeflow.reward.functions import Judge
from rhymeflow.utils.user_modules import imported
from tests.refused import refusal
from tests.reward import judged

PAGE = Path(__file__).parent.parent / "docs" / "from-others.md"

THEIRS = """
from types import SimpleNamespace

import torch


def gsm8k_reward_fn(prompt, completions, prompt_ids, completion_ids, answer, **kwargs) -> float:
    return float(prompt == "2+2?" and completions == answer and completion_ids == [len(answer)])


async def custom_rm(args, sample, **kwargs):
    return float((sample.prompt, sample.response, sample.metadata) == ("2+2?", sample.label, {}))


def reward_func(queries, prompts, labels, **kwargs):
    right = [float(q == p + each) for q, p, each in zip(queries, prompts, labels)]
    return {"rewards": torch.tensor(right), "scores": torch.tensor(right), "extra_logs": {}}


def batched(data_sources, solution_strs, ground_truths, extra_infos): ...


class MultiplyEnv:
    def __init__(self, env_config={}, extras={}):
        self.truth, self.turns = extras["reward_spec"]["ground_truth"], 0

    def init(self, prompt):
        return prompt, {}

    def step(self, action):
        self.turns += 1
        observed = [{"role": "user", "content": "No."}]
        done = action == self.truth
        return {"observations": observed, "reward": 0.5, "done": done, "metadata": {}}

    def close(self):
        self.turns = None


class MathAgent:
    async def run(self, data, **extra_kwargs):
        assert extra_kwargs["base_url"] == "http://here/v1"
        return {"a": 0.0, "b": 1.0} if data["messages"] == "2+2?" else float(data["answer"])


class AgentInstance:
    async def reset(self, states, **kwargs):
        self.seen = states["observation"]
        return states

    async def step(self, states, **kwargs):
        assert states["observation_text"].startswith(self.seen)
        reward = torch.tensor([0.5])
        said = f"\\n\\nHuman: {states['observation_text']}"
        done = states["action_text"] == states["label"]
        return {"rewards": reward, "scores": reward, "environment_feedback": said, "done": done}


class SlidingPuzzleEnv:
    def step(self, message_log_batch, metadata):
        [info], [[*_, said]] = metadata, message_log_batch
        return SimpleNamespace(
            observations=[{"role": "environment", "content": f"{info} and {said['content']}"}],
            metadata=[info + 1],
            rewards=torch.tensor([0.5]),
            terminateds=torch.tensor([info == 1]),
        )
"""


@pytest.fixture
def wrapped(tmp_path, monkeypatch):
    """Files with the page's code: the surrogate, the functions, the classes."""
    monkeypatch.delitem(sys.modules, "theirs", raising=False)
    (tmp_path / "theirs.py").write_text(THEIRS)
    blocks = re.findall(r"```python\n(.*?)```", PAGE.read_text(encoding="utf-8"), re.DOTALL)
    for name, block in zip(("surrogate", "functions", "classes"), blocks, strict=True):
        (tmp_path / f"{name}.py").write_text(block)
    return tmp_path


@pytest.mark.parametrize(
    ("name", "columns"),
    [
        ("areal", {"answer": "4"}),
        ("slime", {"label": "4", "metadata": {}}),
        ("openrlhf", {"label": "4"}),
    ],
)
@pytest.mark.parametrize("prompt", ["2+2?", [{"role": "user", "content": "2+2?"}]])
def test_functions_are_wrapped(name, columns, prompt, wrapped):
    judge = Judge(RewardFunction(function=f"{wrapped}/functions.py:{name}"))
    judge.check_columns(columns)
    assert judged(judge, ["4", "5"], columns, prompt=prompt) == [1.0, 0.0]


@pytest.mark.parametrize(
    ("name", "whose"),
    [
        ("gsm8k_reward_fn", "AReaL"),
        ("custom_rm", "slime"),
        ("reward_func", "OpenRLHF"),
        ("batched", "verl"),
    ],
)
def test_a_function_as_it_is_is_refused_with_its_trainer(name, whose, wrapped):
    judge = Judge(RewardFunction(function=f"{wrapped}/theirs.py:{name}"))
    with pytest.raises(UserError, match=rf"a function of {whose}'s\? docs/from-others.md wraps"):
        judge.check_columns({"label"})


def kinds(specification: str):
    return load_kinds(EnvironmentConfig.model_validate({"classes": [specification]}))


def test_environments_are_wrapped(wrapped):
    [kind] = kinds({"environment": f"{wrapped}/classes.py:OfSkyRL"})
    env = kind.make()
    env.reset("2+2?", reward_spec={"ground_truth": "4"})
    assert env.step([{"role": "assistant", "content": "5"}])[0]["content"] == "No."
    assert env.step([{"role": "assistant", "content": "4"}]) is None
    assert env.reward() == 1.0
    env.close()
    assert env.env.turns is None
    [kind] = kinds({"environment": f"{wrapped}/classes.py:OfNeMoRL"})
    env = kind.make()
    env.reset(extra_env_info=0)
    assert env.step([{"role": "assistant", "content": "up"}]) == "0 and up"
    assert env.step([{"role": "assistant", "content": "up"}]) is None
    assert env.reward() == 1.0
    [kind] = kinds({"environment": f"{wrapped}/classes.py:OfOpenRLHF"})
    env = kind.make()
    asyncio.run(env.reset("2+2?", "4"))
    turns = [{"content": "2+2?"}, {"content": "5"}]
    assert asyncio.run(env.step(turns)) == "\n\nHuman: 2+2?"
    assert asyncio.run(env.step([*turns, {"content": "No."}, {"content": "4"}])) is None
    assert env.reward() == 1.0
    for name in "MultiplyEnv", "SlidingPuzzleEnv":
        said = refusal(kinds, {"environment": f"{wrapped}/theirs.py:{name}"})
        assert "it has no method `reset` (docs/from-others.md wraps SkyRL's and NeMo-RL's)" in said


@pytest.mark.parametrize(("prompt", "reward"), [("2+2?", 1.0), ("3+3?", 6.0)])
def test_an_agent_is_wrapped(prompt, reward, wrapped):
    areal = imported(f"{wrapped}/classes.py:areal", "a test")
    row = {"prompt": prompt, "answer": "6"}
    assert asyncio.run(areal("http://here/v1", row)) == reward


def test_prime_rls_loss_masks_by_what_the_probability_moved(wrapped):
    space = {}
    exec((wrapped / "surrogate.py").read_text(), space)
    new, old = torch.tensor([0.5, 0.9, 0.1, 0.9]).log(), torch.tensor([0.4, 0.6, 0.4, 0.6]).log()
    advantages = torch.tensor([1.0, 1.0, -1.0, -1.0])
    losses = space["dppo"]((new - old).exp(), advantages, new, None)
    objective = torch.tensor([1.25, 0.0, 0.0, -1.5])
    torch.testing.assert_close(losses, 1e-3 * (new - old) ** 2 - objective)
