"""The reward `code_execution`: columns of the usual data sets, shares, and what is no reward."""

import json
import sys
from typing import Any

import pytest

from rhymeflow.config import RewardFunction
from rhymeflow.reward.code_execution import code_block
from rhymeflow.reward.functions import Judge, NotAReward
from rhymeflow.sandbox import programs
from tests.refused import refusal
from tests.reward import judged

pytestmark = pytest.mark.skipif(sys.platform != "linux", reason="needs Linux")

SQUARE = "```python\ndef f(x):\n    return x * x\n```"
DOUBLE = "```python\nprint(2 * int(input()))\n```"
PAIRS = {"inputs": ["1\n", "2\n"], "outputs": ["2\n", "5\n"]}


def score(completion: str, columns: dict[str, Any], **options: Any) -> float | None:
    [reward] = judged("code_execution", [completion], columns, **options)
    return reward


ASSERTS = ["assert f(2) == 4", "assert f(3) == 9", "assert f(3) == 6", "assert f(4) == 16"]
CALLS = {"fn_name": "f", "inputs": [[2], [3]], "outputs": [4, [9]]}
LINES = [{"input": "2", "output": "4", "testtype": "functional", "metadata": {"func_name": "f"}}]
ONE = {"type": "stdin_stdout", "input": "4\n", "output": "8\n"}


@pytest.mark.parametrize(
    ("completion", "columns", "share"),
    [
        (SQUARE, {"tests": ASSERTS}, 0.75),
        (SQUARE, {"test_list": ASSERTS[:2], "test_setup_code": "y = 1", "test_imports": []}, 1),
        (SQUARE, {"test_cases": json.dumps(ASSERTS)}, 0.75),
        (SQUARE, {"test": "def check(g):\n    assert g(3) == 9", "entry_point": "f"}, 1),
        (SQUARE, {"test": "def check(g):\n    assert g(3) == 6", "entry_point": "f"}, 0),
        (SQUARE, {"input_output": json.dumps(CALLS)}, 1),
        (SQUARE, {"tests": LINES}, 1),
        (SQUARE, {"ground_truth": json.dumps({"assert_case": ASSERTS})}, 0.75),
        (DOUBLE, {"ground_truth": json.dumps(PAIRS)}, 0.5),
        (DOUBLE, {"input_output": PAIRS}, 0.5),
        (DOUBLE, {"verification_info": {"language": "python", "test_cases": [ONE]}}, 1),
        (DOUBLE, {"tests": ["assert False"], "mine": [ONE]}, 0),
        ("```python\nclass Solution:\n    def f(self, x): return x * x\n```", {"tests": CALLS}, 1),
    ],
)
def test_tests_are_taken_in_the_usual_forms(completion, columns, share):
    assert score(completion, columns) == share


def test_options():
    assert score(SQUARE, {"tests": ASSERTS}, continuous=False) == 0
    assert score(SQUARE, {"tests": ASSERTS[:2]}, continuous=False) == 1
    assert score(DOUBLE, {"tests": ["assert False"], "mine": [ONE]}, column="mine") == 1
    message = refusal(Judge, RewardFunction(function="code_execution", options={"timeot": 1}))
    assert "takes no option 'timeot'" in message


def test_outputs_are_compared_word_by_word():
    echo = "```python\nimport sys\nprint(sys.stdin.read())\n```"
    same = [("1  2 \n3\n", "1 2\n3"), ("0.3333333333", "0.33333333"), ("", ""), ("a", "a\n\n")]
    other = [("1 2 3", "1 2\n3"), ("0.34", "0.33"), ("7.0", "7"), ("a", "a.b"), ("", "1")]
    for pairs, share in ((same, 1), (other, 0)):
        tests = [{"input": printed, "output": wanted} for printed, wanted in pairs]
        assert score(echo, {"tests": tests}) == share


@pytest.mark.parametrize(
    "program",
    [
        "class E:\n    def __eq__(self, other): return True\nprint(E())",
        "print(1)\nexit(3)",
        "print(1)\n1 / 0",
        "import os\nos.write(4, b'1')\nos.write(3, b'1')",
    ],
)
def test_what_fails_is_worth_nothing(program):
    tests = [{"input": "", "output": "1"}]
    assert score(f"```python\n{program}\n```", {"tests": tests}) == 0


def test_responses_without_a_program_are_counted():
    judge = Judge(RewardFunction(function="code_execution"))
    loop = "```python\nwhile True: pass\n```"
    texts = ["no program", SQUARE]
    assert judged(judge, texts, {"tests": ASSERTS[:1]}) == [0, 1]
    names = ("code/no_block", "code/out_of_time")
    assert judge.logged.metrics == [(names[0], 1), (names[1], 0), (names[0], 0), (names[1], 0)]
    judge = Judge(RewardFunction(function="code_execution", options={"timeout": 0.1}))
    assert judged(judge, [loop], {"tests": ASSERTS[:1]}) == [0]
    assert judge.logged.metrics[1] == ("code/out_of_time", 1)


@pytest.mark.parametrize(
    ("columns", "says"),
    [
        ({"prompt": "x"}, "no column with tests"),
        ({"tests": []}, "column 'tests': .*has no tests in a known form"),
        ({"test": "def check(g):\n    assert g(3) == 9", "name": "f"}, "no tests in a known form"),
        ({"test": ["def check(g):\n    assert g(3) == 9"]}, "has no tests in a known form"),
        ({"tests": " "}, "column 'tests': .*has no tests in a known form"),
        ({"tests": [3]}, r"column 'tests': '\[3\]' has no tests in a known form"),
        ({"tests": {"inputs": [1], "outputs": []}}, "has no tests in a known form"),
    ],
)
def test_a_row_without_tests_is_an_error(columns, says):
    with pytest.raises(NotAReward, match=says):
        score(SQUARE, columns)


def test_a_sandbox_that_fails_is_no_reward(monkeypatch):
    judge = Judge(RewardFunction(function="code_execution"))
    assert judged(judge, [SQUARE], {"tests": ASSERTS[:1]}) == [1]
    monkeypatch.setattr(programs, "INSIDE", "none.py")
    with pytest.raises(NotAReward, match=r"raised SandboxFailed: .*none\.py"):
        judged(judge, [SQUARE], {"tests": ASSERTS[:1]})


@pytest.mark.parametrize(
    ("text", "block"),
    [
        ("so\n```python\nx = 1\n```\nend", "x = 1\n"),
        ("```\nx = 1\n```", "x = 1\n"),
        ("```py\nx = 1\n```\n```Python\ny\n```", "y\n"),
        ("```python\nx = 1\n```\n```json\n{}\n```", "x = 1\n"),
        ("```json\n{}\n```\nso\n```python\nx = 1\n```", "x = 1\n"),
        ("- so\n  ```python\n  if x:\n      y\n  ```", "  if x:\n      y\n"),
        ("```python\nx = 1", None),
        ("x = 1", None),
    ],
)
def test_the_last_block_of_python_is_the_program(text, block):
    assert code_block(text) == block
