"""Reward functions tried before a run: what is said of them, and what is refused."""

from pathlib import Path
from typing import Any

import pytest

from rhymeflow.config import Config, RewardConfig, RewardFunction
from rhymeflow.data.prompts import Prompt
from rhymeflow.reward.trial import tried
from tests.refused import refusal

PROMPT = Prompt(0, "1+1?", {"answer": "0"}, "sums.csv:2")


def lines(*functions: RewardFunction, prompt: Prompt = PROMPT, **fields: Any) -> list[str]:
    config = Config(reward=RewardConfig(functions=functions, **fields))
    printed: list[str] = []
    found = tried(config, functions, prompt, lambda text: [7], printed.append)
    return [*found, "".join(printed)]


def of_file(tmp_path: Path, *bodies: str) -> list[RewardFunction]:
    heads = (f"def f{n}(completions, **c): {body}\n" for n, body in enumerate(bodies))
    (tmp_path / "mine.py").write_text("".join(heads))
    return [RewardFunction(function=f"{tmp_path}/mine.py:f{n}") for n in range(len(bodies))]


def test_each_is_called_as_in_a_run(tmp_path):
    functions = of_file(
        tmp_path,
        "print('seen', completions, c['answer']); return [len(completions)] * len(completions)",
        "return [None] * len(completions)",
    )
    built_in = RewardFunction(function="exact_match")
    alone = functions[0].model_copy(update={"per": "response"})
    judge = RewardFunction(function="llm_judge", options={"model": "m", "prompt": "p"})
    on = "on a response '0' to sums.csv:2"
    found = lines(*functions, built_in, alone, judge)
    assert found[:5] == [
        f"f0: 8 {on}",
        f"f1: None (does not apply) {on}",
        f"exact_match: 1 {on}",
        f"f0#2: 1 {on}",
        "llm_judge: not tried, it asks a server",
    ]
    assert found[5].splitlines()[0] == f"seen {['0'] * 8} {['0'] * 8}"


def test_messages_are_answered_by_messages(tmp_path):
    functions = of_file(tmp_path, "return [len(each[0]['content']) for each in completions]")
    prompt = Prompt(0, [{"role": "user", "content": "1+1?"}], {}, "a.jsonl:1")
    assert lines(*functions, prompt=prompt)[0] == "f0: 1 on a response '0' to a.jsonl:1"


@pytest.mark.parametrize(
    ("body", "said"),
    [
        ("raise ValueError('odd')", "raised ValueError: odd (mine.py:1)"),
        ("return ['1.0'] * len(completions)", "returned str '1.0' as a reward"),
        ("import time; time.sleep(60)", "took longer than reward.timeout = 0.2 seconds"),
    ],
)
def test_what_gives_no_reward_is_refused_where_a_run_would_stop(tmp_path, body, said):
    functions = of_file(tmp_path, body)
    where = "reward function 'f0', on a response '0' to sums.csv:2: "
    assert refusal(lines, *functions, timeout=0.2).startswith(where + said)
    assert said in lines(*functions, timeout=0.2, on_failure="drop")[0]
