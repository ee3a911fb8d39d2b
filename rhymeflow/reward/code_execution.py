"""The built-in reward `code_execution`: the share of a row's unit tests that a program passes.

A test is an assertion, an input with its output, or a call with its result."""

from __future__ import annotations

import json
import math
import re
from collections.abc import Callable
from contextlib import suppress
from itertools import chain
from typing import Any

from rhymeflow.reward.builtin import content
from rhymeflow.sandbox.programs import ProgramLimits, ProgramOutcome, chosen, run

COLUMNS = (
    "tests", "test_cases", "test_list", "input_output", "verification_info", "test",
    "ground_truth",
)  # fmt: skip
"""Columns with the tests if none is named; the first that a row has is used."""

Test = tuple[dict[str, Any], Any]
"""What the sandbox is given, and what has to come out (of an assertion, nothing)."""


def code_execution(
    column: str | None = None,
    continuous: bool = True,
    timeout: float = 5.0,
    total_timeout: float = 30.0,
    memory_limit_mb: int = 1024,
    least_walls: str = "limits",
) -> Callable[..., list[float]]:
    """Run the response's last block of Python (in ``` fences) on the row's unit tests.

    Args:
        column: the column with the tests.
        continuous: the reward is the share of tests that pass. False: 1 if all pass, else 0.
        timeout: longest processor time of a test in seconds; one that waits has twice as long.
        total_timeout: longest time of all tests of a response in seconds; those that have not ended
            by then have failed. 15 seconds less than `reward.timeout` at most.
        memory_limit_mb: memory of each process of a program.
        least_walls: the run is refused where only weaker walls stand: `namespaces`, `landlock` or
            `limits`. The strongest that stand are used."""
    walls = chosen(least_walls)

    def score(completions: list[Any], log_metric: Callable[..., None], **given: Any) -> list[float]:
        rewards = []
        for number, completion in enumerate(completions):
            row = {name: each[number] for name, each in given.items() if isinstance(each, list)}
            tests, program = _tests_of(row, column), code_block(content(completion))
            outcomes: list[ProgramOutcome] = []
            if program is not None:
                before = [*(row.get("test_imports") or ()), row.get("test_setup_code") or ""]
                most = max(100_000, *(4 * len(str(wanted)) for _, wanted in tests))
                limits = ProgramLimits(timeout, total_timeout, memory_limit_mb, most)
                asked, whole = [each for each, _ in tests], "\n".join([*before, program])
                outcomes = run(whole, asked, limits, walls)
            share = sum(map(_passed, tests, outcomes)) / len(tests)
            rewards.append(share if continuous else float(share == 1))
            log_metric("code/no_block", float(program is None))
            is_late = any(each.ended in ("out of time", "late") for each in outcomes)
            log_metric("code/out_of_time", float(is_late))
        return rewards

    return score


def code_block(text: str) -> str | None:
    """Return the last complete fenced block of Python in a response; None: there is none."""
    names = ("", "python", "py", "python3")
    fences = r"^[ \t]*```[ \t]*(\w*)[^\n]*\n(.*?)^[ \t]*```[ \t]*$"
    found = re.findall(fences, text, re.MULTILINE | re.DOTALL)
    blocks = [block for name, block in found if name.lower() in names]
    return blocks[-1] if blocks else None


def _tests_of(row: dict[str, Any], column: str | None) -> list[Test]:
    names = COLUMNS if column is None else (column,)
    name = next((each for each in names if row.get(each) is not None), None)
    if name is None:
        raise KeyError(f"no column with tests: {', '.join(names)} (option `column`)")
    tests: list[Test] = []
    with suppress(AttributeError, LookupError, TypeError, ValueError):
        tests = _tests(row[name], row.get("entry_point"))
    if not tests:
        raise ValueError(f"column {name!r}: {str(row[name])[:80]!r} has no tests in a known form")
    return tests


def _tests(value: Any, entry: str | None = None) -> list[Test]:
    """Return the tests in any of the usual forms; a value in none of them raises anything."""
    if isinstance(value, str):
        try:
            value = json.loads(value)
        except ValueError:  # it is Python
            return [_assertion(value, entry)] if value.strip() else []
    if isinstance(value, list):
        return [_assertion(e, entry) if isinstance(e, str) else _test(**e) for e in value]
    if "inputs" not in value:
        return _tests(value.get("test_cases") or value["assert_case"])
    pairs = zip(value["inputs"], value["outputs"], strict=True)
    return [_test(given, wanted, fn_name=value.get("fn_name")) for given, wanted in pairs]


def _assertion(text: str, entry: str | None) -> Test:
    """Return a test that is Python. HumanEval's defines `check`, and a column names what it is
    called with; where nothing calls it every program would pass."""
    if "def check(" in text and entry:
        text += f"\ncheck({entry})"
    if "def check(" in text and text.count("check(") == 1:
        raise ValueError("`check` is defined and never called")
    return {"assert": text}, None


def _test(
    input: Any, output: Any, fn_name: str | None = None, testtype: str = "", **more: Any
) -> Test:
    """Return a test with input and output, or if it names a function, a call of it."""
    function = fn_name or (more.get("metadata") or {}).get("func_name")
    if function is None or "stdin" in (testtype or more.get("type", "")):
        lines = [each if isinstance(each, list) else [each] for each in (input, output)]
        given, wanted = ("\n".join(map(str, each)) for each in lines)
        return {"stdin": given}, wanted
    if isinstance(input, str):  # an argument a line
        input = [json.loads(line) for line in input.splitlines() if line.strip()]
        output = json.loads(output) if isinstance(output, str) else output
    return {"call": function, "arguments": list(input)}, output


def _passed(test: Test, outcome: ProgramOutcome) -> bool:
    given, wanted = test
    if outcome.ended or "assert" in given:
        return outcome.passed
    if "stdin" in given:
        return _same_output(outcome.out, wanted)
    with suppress(ValueError):  # it is empty if the program ended before the call did
        result = json.loads(outcome.report)
        return bool(result == wanted or [result] == wanted)  # the latter in APPS
    return False


def _same_output(printed: str, wanted: str) -> bool:
    """Compare line by line and word by word; decimal fractions to six digits."""
    ours, theirs = ([*map(str.split, text.strip().splitlines())] for text in (printed, wanted))
    words = zip(chain.from_iterable(ours), chain.from_iterable(theirs), strict=False)
    return [*map(len, ours)] == [*map(len, theirs)] and all(a == b or _near(a, b) for a, b in words)


def _near(printed: str, wanted: str) -> bool:
    try:
        return "." in wanted and math.isclose(float(printed), float(wanted), rel_tol=1e-6)
    except ValueError:
        return False
