"""The executor with real processes: what is answered, and what is said when it cannot be."""

from __future__ import annotations

import json
import os
import signal
import time
from collections.abc import Callable, Iterator
from multiprocessing.connection import wait
from pathlib import Path
from typing import Any

import pytest

from rhymeflow.config import EnvironmentClass, EnvironmentConfig
from rhymeflow.environments import executor as module
from rhymeflow.environments.executor import EnvironmentExecutor
from rhymeflow.environments.kinds import load_kinds
from rhymeflow.environments.messages import Opening, Said
from rhymeflow.environments.parsing import parse_calls
from rhymeflow.environments.requests import EpisodeAnswer, EpisodeError, EpisodeReward, Request
from rhymeflow.errors import UserError
from tests.processes import is_running

FILE = Path(__file__).parent / "worlds.py"
Start = Callable[..., EnvironmentExecutor]


@pytest.fixture
def start() -> Iterator[Start]:
    """Make started executors that end with the test."""
    made: list[EnvironmentExecutor] = []

    def _start(*names: str, tools: tuple[str, ...] = (), **fields: Any) -> EnvironmentExecutor:
        classes = tuple(EnvironmentClass(environment=f"{FILE}:{name}") for name in names)
        fields = {"timeout": 30.0, "retries": 0} | fields
        functions = tuple(name if ".py:" in name else f"{FILE}:{name}" for name in tools)
        config = EnvironmentConfig(classes=classes, tools=functions, **fields)
        schemas = [kind.schemas() for kind in load_kinds(config)]
        made.append(EnvironmentExecutor(config, schemas))
        made[-1].start()
        return made[-1]

    yield _start
    for executor in made:
        executor.close()


def ask(
    executor: EnvironmentExecutor,
    key: str,
    *turns: str,
    judges: bool = False,
    kind: int = 0,
    accepts: Callable[..., str | None] = lambda turn, answer: None,
    **columns: Any,
) -> None:
    said = [Said(text, parse_calls(text)) for text in turns]
    opening = Opening(kind, 7, "begin", columns)
    executor.submit(Request(key, opening, said, judges, accepts))


def run(executor: EnvironmentExecutor, seconds: float = 60.0) -> dict[str, Any]:
    """Run the caller's loop until all is reported; answers by key."""
    outcomes, end = {}, time.monotonic() + seconds
    for outcome in executor.poll(time.monotonic()):
        outcomes[outcome.key] = outcome
    while len(executor):
        now = time.monotonic()
        assert now < end, "not answered in time"
        deadline = executor.next_deadline()
        patience = 1.0 if deadline is None else min(1.0, max(0.0, deadline - now))
        wait(executor.connections(), patience)
        for outcome in executor.poll(time.monotonic()):
            assert outcome.key not in outcomes
            outcomes[outcome.key] = outcome
    return {key: plain(outcome) for key, outcome in outcomes.items()}


def plain(outcome: Any) -> Any:
    match outcome:
        case EpisodeAnswer(answered=answered):
            return answered.answer
        case EpisodeReward(value=value):
            return value
        case EpisodeError(message=message):
            return message


def one(executor: EnvironmentExecutor, *turns: str, **options: Any) -> Any:
    ask(executor, "5.1", *turns, **options)
    return run(executor)["5.1"]


def test_an_episode_is_asked_turn_by_turn_and_judged(start: Start, tmp_path: Path) -> None:
    executor, log = start("Echo"), str(tmp_path / "log")
    columns = {"colour": "blue", "log": log, "unknown": 1}
    assert one(executor, "a", **columns) == "a"
    assert one(executor, "a", "count", **columns) == "4 2"
    assert one(executor, "a", "count", "bye", **columns) is None
    assert one(executor, "a", "count", "bye", judges=True, **columns) == 3
    executor.close()
    lines = Path(log).read_text().splitlines()
    assert lines[:4] == ["reset 7 begin blue", "step a", "step count", "step bye"]
    assert lines[4:] in ([], ["close"])


def test_a_column_named_seed_takes_precedence(start: Start) -> None:
    executor = start("Echo")
    ours, theirs = one(executor, "seed"), one(executor, "seed", seed=8)
    assert ours != theirs
    assert one(executor, "seed", seed=7) == ours


def test_it_is_brought_back_to_where_it_was_and_looked_at_on_the_way(start: Start) -> None:
    executor, seen = start("Echo"), []

    def accepts(turn: int, answer: Any) -> str | None:
        seen.append((turn, answer))
        return None if answer == "a" or turn == 2 else "odd"

    assert one(executor, "a", "a", "seed", accepts=accepts) == one(start("Echo"), "seed")
    assert seen == [(0, "a"), (1, "a")]
    assert "environment of 5.1, turn 1: odd" in one(executor, "b", "a", accepts=accepts)
    assert one(executor, "a", "a", "x", judges=True, accepts=accepts) == 3


def test_failures_are_told_by_name_and_never_a_reward(start: Start) -> None:
    executor = start("Echo", retries=1)
    for text, says in (
        ("raise", "raised ValueError: no, thank you (worlds.py:"),
        ("nonsense", "step returned int 7, should be"),
        ("exit", "ended its process (exit code 3)"),
    ):
        told = one(executor, text)
        assert told.startswith("environment of 5.1, turn 1: ")
        assert says in told
        assert told.endswith("(tried 2 times)")
    told = one(executor, "a", judges=True, colour="nan")
    assert "environment of 5.1, reward: reward returned nan as a reward" in told
    assert one(executor, "a", judges=True, colour="nothing") is None
    assert one(executor, "a", judges=True, colour="red") == 1.5


def test_reset_must_fit_the_data_and_the_prompt(start: Start) -> None:
    told = one(start("Opens"), "a")
    assert "5.1, reset: returned str 'Welcome.', which is not in the prompt" in told
    needy = start("Needy", retries=0)
    assert "reset takes an argument 'word', and the data has no such column" in one(needy, "a")
    assert "did you mean" in one(needy, "a", words="x")
    assert one(needy, "a", word="x") == "x"


def test_a_retry_may_succeed(start: Start, tmp_path: Path) -> None:
    executor = start("Echo", retries=1)
    assert one(executor, "a", f"once {tmp_path / 'mark'}") == f"once {tmp_path / 'mark'}"


def test_a_long_answer_is_cut_and_says_so(start: Start) -> None:
    executor = start("Echo", max_observation_chars=50)
    assert one(executor, "long") == "x" * 50 + "\n[cut: 50 of 1000000 characters]"
    executor = start("Echo", max_observation_chars=2_000_000)
    assert one(executor, "long") == "x" * 1_000_000


@pytest.mark.parametrize("name", ["Sleeper", "Async"])
def test_what_waits_waits_together(start: Start, name: str) -> None:
    executor = start(name)
    one(executor, "wait 0")
    begin = time.monotonic()
    for number in range(256):
        ask(executor, str(number), "wait 0.2")
    answers = run(executor)
    assert time.monotonic() - begin < 2 * (1 + os.getloadavg()[0] / 2)
    assert len(answers) == 256
    assert set(answers.values()) == {None if name == "Sleeper" else "done"}


def test_no_more_than_max_concurrent_answer_at_once(start: Start) -> None:
    executor = start("Async", max_concurrent=2)
    begin = time.monotonic()
    for number in range(6):
        ask(executor, str(number), "wait 0.2")
    assert len(run(executor)) == 6
    assert time.monotonic() - begin >= 0.6


def test_what_hangs_in_a_loop_is_cancelled_and_its_process_lives(start: Start) -> None:
    executor = start("Async", timeout=1.0)
    [pid] = [slot.process.pid for slot in executor._slots]
    ask(executor, "good", "wait 0.1")
    ask(executor, "bad", "wait 1000")
    ask(executor, "odd", "cancel")
    answers = run(executor)
    assert answers["good"] == "done"
    assert (
        "environment of bad, turn 1: took longer than environment.timeout = 1 seconds"
        in answers["bad"]
    )
    assert "raised CancelledError" in answers["odd"]
    assert [slot.process.pid for slot in executor._slots] == [pid]


@pytest.mark.parametrize(
    ("name", "text"), [("Echo", "hang"), ("Echo", "c"), ("Async", "block"), ("Async", "stubborn")]
)
def test_what_cannot_be_cancelled_ends_with_its_process_and_only_it_is_charged(
    start: Start, name: str, text: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(module, "GRACE_SECONDS", 1.5)
    executor = start(name, timeout=3.0)
    [pid] = [slot.process.pid for slot in executor._slots]
    for key in ("live", "other"):
        ask(executor, key, "wait 0")
    run(executor)
    ask(executor, "bad", text)
    ask(executor, "good", "wait 0.1")
    ask(executor, "live", "wait 0", "wait 0.1")
    answers = run(executor)
    assert "took longer than environment.timeout" in answers["bad"]
    assert answers["good"] == answers["live"] == ("done" if name == "Async" else "wait 0.1")
    assert not is_running(pid)
    ask(executor, "other", "wait 0", "wait 0")
    assert run(executor)["other"] == ("done" if name == "Async" else "wait 0")


def test_of_many_only_the_one_that_ends_the_process_is_charged(start: Start) -> None:
    executor = start("Echo")
    for number in range(8):
        ask(executor, f"good {number}", "slow")
    ask(executor, "bad", "exit")
    answers = run(executor)
    assert "exit code 3" in answers.pop("bad")
    assert answers == {f"good {number}": "slow" for number in range(8)}


def test_the_end_of_an_idle_process_is_nobodys_failure(start: Start) -> None:
    executor = start("Echo")
    assert one(executor, "count") == "2 1"
    os.kill(executor._slots[0].process.pid, signal.SIGKILL)
    time.sleep(0.2)
    assert one(executor, "count", "count") == "4 2"


def test_what_is_closed_is_not_answered_and_may_be_asked_again(
    start: Start, tmp_path: Path
) -> None:
    executor, log = start("Echo"), str(tmp_path / "log")
    ask(executor, "1.0", "slow", log=log)
    ask(executor, "1.1", "a")
    while not (Path(log).exists() and "step slow" in Path(log).read_text()):
        assert not [each for each in executor.poll(time.monotonic()) if each.key == "1.0"]
        time.sleep(0.01)
    executor.close_episodes(["1.0", "nobody"])
    run(executor)
    ask(executor, "1.0", "b", log=log)
    assert run(executor) == {"1.0": "b"}
    executor.close_episodes(["1.0"])
    end = time.monotonic() + 10
    while Path(log).read_text().splitlines().count("close") < 2:
        assert time.monotonic() < end, "closing is called"
        time.sleep(0.05)
    assert executor.poll(time.monotonic()) == []


def test_closing_holds_up_nobody(start: Start) -> None:
    executor = start("Echo", timeout=1.0)
    assert one(executor, "a", colour="clinging") == "a"
    executor.close_episodes(["5.1"])
    assert one(executor, "b") == "b"


def test_tools_are_called_and_their_errors_are_read_by_the_policy(start: Start) -> None:
    executor = start("Counter", tools=("multiply", "leave"))
    said = [
        'I add.<tool_call>{"name": "add", "arguments": {"amount": 2}}</tool_call>'
        '<tool_call>{"name": "multiply", "arguments": {"a": 2, "b": 1.5}}</tool_call>',
        '<tool_call>{"name": "fail"}</tool_call><tool_call>{"name"</tool_call>'
        '<tool_call>{"name": "leave"}</tool_call>',
    ]
    assert one(executor, said[0], start=3) == [
        {"role": "tool", "name": "add", "content": "5"},
        {"role": "tool", "name": "multiply", "content": "3.0"},
    ]
    ask(executor, "5.1", *said, start=3)
    executor.poll(time.monotonic())
    assert [each["content"] for each in run(executor)["5.1"]] == [
        "Error: RuntimeError: at 5",
        "Error: the tool call cannot be read: it is no JSON: Expecting ':' delimiter",
        "Error: SystemExit: left",
    ]
    assert one(executor, *said, "That is all.", start=3) is None
    assert one(executor, *said, "That is all.", start=3, judges=True) == 5.0


def test_a_tool_that_raises_fails_the_response_where_that_is_wanted(start: Start) -> None:
    executor = start("Counter", on_tool_error="fail")
    told = one(executor, '<tool_call>{"name": "fail"}</tool_call>')
    assert "environment of 5.1, turn 1: tool fail raised RuntimeError: at 0 (worlds.py:" in told
    [unknown] = one(executor, '<tool_call>{"name": "fails"}</tool_call>')
    assert "no tool 'fails'; did you mean fail?" in unknown["content"]


def test_a_tool_may_call_its_parameters_what_it_likes(start: Start) -> None:
    executor = start(tools=("plot",))
    call = '<tool_call>{"name": "plot", "arguments": {"function": "x", "self": "y"}}</tool_call>'
    assert one(executor, call) == [{"role": "tool", "name": "plot", "content": "xy"}]


def test_a_tool_starts_processes_as_any_program_does(start: Start) -> None:
    executor = start(tools=(str(Path(__file__).parents[1] / "graders.py") + ":run_code",))
    call = json.dumps({"name": "run_code", "arguments": {"text": "abc"}})
    [answer] = one(executor, f"<tool_call>{call}</tool_call>")
    assert answer["content"] == "[3.0] [3.0] [3.0]"


def test_tools_need_no_class(start: Start) -> None:
    executor = start(tools=("multiply",))
    call = '<tool_call>{"name": "multiply", "arguments": {"a": 2, "b": 3}}</tool_call>'
    assert one(executor, call) == [{"role": "tool", "name": "multiply", "content": "6"}]
    assert one(executor, call, "6") is None
    assert one(executor, call, "6", judges=True) is None


@pytest.mark.parametrize(
    ("classes", "tools", "says"),
    [
        (["Echoo"], [], "there is no 'Echoo' in it"),
        (["multiply"], [], "needs the option 'a'"),
        (["breaks"], [], "raised ValueError: no server"),
        (["Echo"], ["multiply"], "it has a `step`, so environment.tools are never called"),
        ([], ["nothing"], "there is no 'nothing' in it"),
        ([], ["Counter"], "is a type, not a function"),
        ([], ["undocumented"], "tool undocumented of tools: Cannot generate JSON schema"),
    ],
)
def test_what_cannot_be_had_is_refused(classes, tools, says) -> None:
    config = EnvironmentConfig(
        classes=tuple(EnvironmentClass(environment=f"{FILE}:{name}") for name in classes),
        tools=tuple(f"{FILE}:{name}" for name in tools),
    )
    with pytest.raises(UserError) as error:
        [kind.schemas() for kind in load_kinds(config)]
    assert says in str(error.value)
