"""A digest of code differs if what it does may, and in no other process."""

import os
import subprocess
import sys
from functools import partial

import pytest

from rhymeflow.utils.code_digest import digest_of_object, file_of_module

SCRIPT = """
import re
from rhymeflow.utils.code_digest import digest_of_object
{beside}
WEIGHT, UNUSED = 2, {unused}
def helper(x):
    return {helper}
class Judge:
    names = {{"b", "a", "c"}}
    def __init__(self, low):
        self.low, self.pattern = low, re.compile("a")
    def __call__(self, completions):
        return [helper(x) in {{"p", "q", "r"}} for x in completions] + [WEIGHT, self.low]
def made(factor):
    return lambda x, power=3: [factor * helper(each) ** power for each in x]
print(digest_of_object(Judge(0.5)), digest_of_object(made(1)), digest_of_object(Judge(1).__call__))
"""


def printed(seed: int, beside: str = "", helper: str = "x + 1", unused: int = 0) -> list[str]:
    text = SCRIPT.format(beside=beside, helper=helper, unused=unused)
    env = {**os.environ, "PYTHONHASHSEED": str(seed), "PYTHONPATH": os.getcwd()}
    command = [sys.executable, "-c", text]
    return subprocess.run(
        command, env=env, capture_output=True, text=True, check=True
    ).stdout.split()


def test_another_process_with_the_same_code_has_the_same():
    first = printed(1)
    assert first == printed(2, beside="# a line more\ndef other(): pass", unused=1)
    assert not {*first} & {*printed(3, helper="x + 2")}


CACHED = "import functools\n@functools.lru_cache\n"
ARRAY = "import numpy\na = numpy.zeros(2000)\na[500] = 1\nf = lambda x: a"


def test_what_is_not_there_yet_or_nested_too_deep_is_no_error():
    assert digest("def g():\n f = lambda: h\n yield f\n h = 1\nf = next(g())")
    assert digest("a = []\nfor _ in range(5000): a = [a]\nf = lambda: a")


def digest(text: str, **beside: object) -> str:
    names: dict[str, object] = {"__name__": "__main__", **beside}
    exec(text, names)
    return digest_of_object(names["f"])


@pytest.mark.parametrize(
    ("one", "other"),
    [
        ("f = lambda x: x + 1", "f = lambda x: x + 2"),
        (CACHED + "def f(x): return 1", CACHED + "def f(x): return 2"),
        (ARRAY, ARRAY.replace("[500] = 1", "[500] = 2")),
        ("f = lambda x: x.upper()", "f = lambda x: x.lower()"),
        ("def f(x, by=1): return by", "def f(x, by=2): return by"),
        ("def f(x, *, by=1): return by", "def f(x, *, by=2): return by"),
        ("by = [1]\ndef f(x): return by", "by = [2]\ndef f(x): return by"),
        ("g = lambda k: lambda x: k\nf = g(1)", "g = lambda k: lambda x: k\nf = g({1: 2})"),
        ("def f(x):\n def g(): return 1\n return g", "def f(x):\n def g(): return 2\n return g"),
        ("class f:\n @property\n def a(self): 1", "class f:\n @property\n def a(self): return 2"),
        ("class f:\n @staticmethod\n def a(): 1", "class f:\n @staticmethod\n def a(): return 2"),
        ("class g: a = 1\nclass f(g): pass", "class g: a = 2\nclass f(g): pass"),
        ("from json import dumps as f", "from json import loads as f"),
        ("import cmd\nf = cmd.Cmd()\nf.a = 1", "import cmd\nf = cmd.Cmd()\nf.a = 2"),
        ("import json as m\nf = lambda x: m", "import math as m\nf = lambda x: m"),
    ],
)  # fmt: skip
def test_what_may_do_something_else_has_another(one, other):
    assert digest(one) == digest(one) != digest(other)


def test_arguments_of_a_partial_and_functions_that_call_themselves_count():
    assert digest_of_object(partial(max, 1)) != digest_of_object(partial(max, 2))
    assert digest("def f(x): return f(x)") == digest("def f(x): return f(x)")


def test_modules_are_found_and_not_imported(tmp_path, monkeypatch):
    monkeypatch.syspath_prepend(tmp_path)
    (tmp_path / "some").mkdir()
    (tmp_path / "some" / "__init__.py").write_text("raise RuntimeError")
    (tmp_path / "some" / "rewards.py").write_text("raise RuntimeError")
    assert file_of_module("some.rewards") == str(tmp_path / "some" / "rewards.py")
    assert file_of_module("some.other") is file_of_module("other_that_is_nowhere") is None
