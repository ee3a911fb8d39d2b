"""The pool with real processes: what reward functions and environments give, and what is said when
they give nothing."""

import ast
import json
import math
import os
import signal
import subprocess
import sys
import textwrap
import time
from collections.abc import Callable
from multiprocessing.connection import wait
from pathlib import Path
from types import ModuleType, SimpleNamespace
from typing import Any

import pytest

from rhymeflow import pool as module
from rhymeflow.config import Config, EnvironmentClass, EnvironmentConfig, RewardConfig
from rhymeflow.config import RewardFunction as Function
from rhymeflow.core.types import TrajectoryId
from rhymeflow.environments import episodes
from rhymeflow.environments.episode import Episode
from rhymeflow.environments.episodes import Episodes
from rhymeflow.errors import UserError
from rhymeflow.pool import Pool
from rhymeflow.reward.calls import FunctionRewards, RewardTask, reward_pool
from rhymeflow.reward.components import WeightedSum, component_names
from rhymeflow.reward.messages import RewardRequest, TrainerState
from rhymeflow.suites.suite import RUN
from rhymeflow.utils import child, user_modules
from tests.environments.test_rendering import ids, tokenizer
from tests.environments.worlds import FILE as WORLDS
from tests.processes import is_running
from tests.refused import refusal

FILE = Path(__file__).parent / "reward/functions.py"
GRADERS = Path(__file__).parent / "graders.py"
TEXT = tokenizer(None)
Start = Callable[..., Any]


@pytest.fixture
def pools():
    """Pools that end with the test."""
    made: list[Pool] = []
    yield made
    for pool in made:
        pool.close()


def finished(pool: Pool, seconds: float = 60.0) -> dict[Any, Any]:
    """Run the caller's loop until all is returned; the tasks by key."""
    tasks: dict[Any, Any] = {}
    end = time.monotonic() + seconds
    while len(pool):
        assert time.monotonic() < end, "not answered in time"
        pool.wait(1.0)
        for task in pool.poll(time.monotonic()):
            assert task.key not in tasks
            tasks[task.key] = task
    return tasks


# -- reward functions ----------------------------------------------------------------------------


def named(*names: str) -> tuple[Function, ...]:
    return tuple(Function(function=f"{FILE}:{name}") for name in names)


@pytest.fixture
def judges(pools):
    """Start a pool of reward functions."""

    def start(*names: str, **fields: Any) -> Pool:
        config = RewardConfig(**({"functions": named(*names)} | fields))
        pool: Any = reward_pool(config)
        pool.names = component_names(config.functions)
        pools.append(pool)
        pool.start()
        return pool

    return start


def together(*completions: str, prompt: Any = "p", **columns: Any) -> RewardRequest:
    """Several responses to one prompt."""
    tokens = [[1, 2 + place] for place in range(len(completions))]
    return RewardRequest(prompt, list(completions), tokens, columns, TrainerState(3, 9))


def request(completion: str = "fine", prompt: Any = "p", **columns: Any) -> RewardRequest:
    return together(completion, prompt=prompt, **columns)


def submit(pool: Any, key: Any, asked: RewardRequest, *functions: int) -> None:
    pool.submit(RewardTask(key, asked, functions or range(len(pool.names)), pool.names))


def judge(pool: Any, *requests: RewardRequest) -> list[Any]:
    """What came of each: `FunctionRewards`, or an error."""
    for member, each in enumerate(requests):
        submit(pool, TrajectoryId(4, member), each)
    tasks = finished(pool)
    found = [tasks[TrajectoryId(4, member)] for member in range(len(requests))]
    return [task.result if task.error is None else task.error for task in found]


def value(judged: FunctionRewards) -> float:
    """What the only function gave the only response."""
    [components] = judged.components
    [reward] = components.values()
    return reward


def test_each_function_gives_a_component(judges):
    weighted = (
        Function(function=f"{FILE}:length", weight=0.5),
        Function(function="exact_match", weight=10),
        Function(function=f"{FILE}:patient", weight=-1),
        Function(function=f"{FILE}:half"),
        Function(function=f"{FILE}:not_mine", weight=100),
        Function(function=f"{FILE}:length", weight=2),
    )
    [done] = judge(judges(functions=weighted), request("four", answer="four"))
    assert list(done.components[0].items()) == [
        ("length", 4.0), ("exact_match", 1.0), ("patient", 0.25), ("half", 0.5), ("length#2", 4.0),
    ]  # fmt: skip
    assert WeightedSum(weighted)(done.components[0]) == 0.5 * 4 + 10 * 1 - 0.25 + 0.5 + 2 * 4
    assert WeightedSum(weighted)({}) is None, "nothing is not 0"
    said = "reward functions half, 4.1: all returned None: none applies to this sample"
    assert WeightedSum(weighted[3:4]).problem("4.1", [1.0, None]) == said
    agent = WeightedSum([], [EnvironmentClass(environment="agent")]).problem("4.1", [None])
    assert str(agent).endswith("program returns its reward, or writes it to RHYMEFLOW_REWARD")


def test_arguments_are_those_of_trl(judges, tmp_path):
    report = str(tmp_path / "report")
    pool = judges("sees")

    def told(asked: RewardRequest) -> Any:
        judge(pool, asked)
        return ast.literal_eval(Path(report).read_text())

    assert told(together("b", "c", colour="red", report=report)) == {
        "prompts": ["p", "p"], "completions": ["b", "c"], "completion_ids": [[1, 2], [1, 3]],
        "colour": ["red", "red"], "step": 3,
    }  # fmt: skip
    asked, begun = {"role": "user", "content": "q"}, {"role": "assistant", "content": "be"}
    seen = told(request("gun", [asked, begun], colour=1, report=report))
    assert seen["prompts"] == [[asked]]
    assert seen["completions"] == [[{"role": "assistant", "content": "begun"}]]


def test_a_group_is_judged_in_one_call_and_only_by_the_functions_asked_for(judges):
    pool = judges("length", "by_rank", "length")
    submit(pool, "group 7", together("aaa", "b", "cc"), 0, 1)
    assert finished(pool)["group 7"].result.components == [
        {"length": 3.0, "by_rank": 1.0}, {"length": 1.0, "by_rank": 0.0}, {"length": 2.0},
    ]  # fmt: skip
    assert judge(judges("not_mine", "not_mine"), together("a", "b")) == [FunctionRewards([{}, {}])]


def test_what_a_function_does_to_its_arguments_is_seen_by_no_other(judges):
    pool = judges("spoils", "spoils", retries=0)
    messages = [{"role": "user", "content": "q"}]
    [done] = judge(pool, together("a", "b", prompt=messages, answers=["yes"]))
    assert done.components == [{"spoils": 2.0, "spoils#2": 2.0}] * 2


WRONG = {
    "raise": "raised ValueError: the judge is ill (functions.py:",
    "exit": "raised SystemExit: 3 (functions.py:",
    "nan": "returned nan as a reward",
    "hang in C": "took longer than reward.timeout = 0.3 seconds",
    "kill": "ended its process (killed by SIGKILL)",
    "surrogate": "raised ValueError: half \\ud800",
    "long": "raised ValueError: xxxxxxxxxxxxx",
}


def test_what_is_no_reward_is_an_error_and_harms_no_other(judges):
    pool = judges("length", "by_order", timeout=0.3, retries=0)
    outcomes = judge(pool, *[request(c) for order in WRONG for c in ("fine", order)])
    found = zip(WRONG, outcomes[::2], outcomes[1::2], strict=True)
    for number, (order, fine, error) in enumerate(found):
        assert fine == FunctionRewards([{"length": 4.0, "by_order": 1.0}])
        assert error.startswith(f"reward function 'by_order', 4.{2 * number + 1}: ")
        assert WRONG[order] in error
        assert ("\n" in error, len(error) < 1200, "tried" in error) == (False, True, False)
    submit(pool, "group 7", together("fine", "fine"), 1)
    assert finished(pool)["group 7"].error == (
        "reward function 'by_order', group 7: returned 1 reward for 2 responses "
        "(with `per: response` each call gets one response)"
    )


def test_functions_have_one_thread_and_may_start_processes(judges, monkeypatch):
    monkeypatch.setenv("OMP_NUM_THREADS", "7")  # of the parent
    outcomes = judge(judges("by_order"), *map(request, ("threads", "fork", "wait")))
    assert [*map(value, outcomes)] == [1.0, 5.0, 1.0]


@pytest.mark.parametrize("function", ["flaky", "flaky_death"])
def test_a_failure_is_tried_again_and_the_rest_is_kept(judges, function, tmp_path):
    report, counter = str(tmp_path / "report"), tmp_path / "counter"
    pool = judges("counted", function, "length", retries=1)
    [done] = judge(pool, request("abc", report=report, counter=str(counter)))
    assert done.components == [{"counted": 0.5, function: 1.0, "length": 3.0}]
    assert counter.read_text() == "x"


def test_a_process_is_replaced_and_the_others_go_on(judges):
    pool = judges("by_order", num_workers=2, timeout=0.5, retries=0)
    before = {value(outcome) for outcome in judge(pool, *[request("pid")] * 8)}
    submit(pool, "hang", request("hang"))
    pool.poll(time.monotonic())
    begin, others = time.monotonic(), []
    for number in range(20):
        submit(pool, number, request("fine"))
    while len(others) < 20:
        wait(pool.connections(), 0.01)
        others += pool.poll(time.monotonic())
    assert all(task.error is None for task in others)
    assert time.monotonic() - begin < 0.4  # not behind the one that hangs
    assert finished(pool)["hang"].error is not None
    after = {value(outcome) for outcome in judge(pool, *[request("pid")] * 8)}
    assert len(after - before) <= 1
    assert not any(is_running(int(pid)) for pid in before - after)


def test_time_is_an_argument(judges):
    """A caller that is late is no function that hangs."""
    pool = judges("by_order", timeout=1000, retries=0)
    assert pool.next_deadline() is None
    submit(pool, "a", request("fine"))
    assert pool.next_deadline() == -math.inf
    assert pool.poll(now=0.0) == []
    assert pool.next_deadline() == 1000.0
    wait(pool.connections())
    [task] = pool.poll(now=5000.0)
    assert value(task.result) == 1.0
    assert pool.next_deadline() is None
    submit(pool, "b", request("hang"))
    assert pool.poll(now=6000.0) == []
    assert pool.poll(now=6999.0) == []
    [task] = pool.poll(now=7000.0)
    assert "took longer than reward.timeout = 1000 seconds" in task.error


def test_a_function_that_hangs_is_tried_again_before_what_waits(judges):
    """Else a long queue of calls that all hang takes all their time before one is returned."""
    pool = judges("by_order", timeout=1000.0, retries=1)
    for member in range(5):
        submit(pool, member, request("hang"))
    pool.poll(0.0)
    assert pool.poll(2000.0) == []
    deadline = time.monotonic() + 20
    while pool.next_deadline() != 3001.0:  # the next process is asked once it is ready
        assert time.monotonic() < deadline
        wait(pool.connections(), 0.1)
        pool.poll(2001.0)
    [task] = pool.poll(4000.0)
    assert (task.key, "tried 2 times" in task.error) == (0, True)


def assert_end(*pids: int) -> None:
    deadline = time.monotonic() + 10
    while any(map(is_running, pids)):  # killed, but perhaps not gone yet
        assert time.monotonic() < deadline, "one outlives its parent"
        time.sleep(0.01)


@pytest.mark.parametrize(
    ("order", "said"), [("session", "took longer"), ("die with a child", "killed by SIGKILL")]
)
def test_a_killed_process_takes_its_children_along(judges, tmp_path, monkeypatch, order, said):
    pid_file = tmp_path / "pid"
    monkeypatch.setenv("CHILD_PID_FILE", str(pid_file))
    [error] = judge(judges("by_order", timeout=1.0, retries=0), request(order))
    assert said in error
    assert_end(int(pid_file.read_text()))


def test_nothing_outlives_the_parent(tmp_path):
    """Even inside a call that never returns, and what that call started."""
    script, pid_file = tmp_path / "parent.py", tmp_path / "pid"
    code = textwrap.dedent(f"""
        import multiprocessing, os, pathlib, time
        from rhymeflow.config import RewardConfig, RewardFunction
        from rhymeflow.reward.calls import RewardTask, reward_pool
        from rhymeflow.reward.messages import RewardRequest, TrainerState
        if __name__ == "__main__":
            function = RewardFunction(function={str(FILE) + ":by_order"!r})
            pool = reward_pool(RewardConfig(functions=(function,), num_workers=2))
            pool.start()
            print(*[each.pid for each in multiprocessing.active_children()], flush=True)
            order = RewardRequest("p", ["hang in C with a child"], [[]], {{}}, TrainerState(0, 1))
            pool.submit(RewardTask(0, order, [0], ["f"]))
            pool.poll(0.0)
            pid_file = pathlib.Path({str(pid_file)!r})
            while not (pid_file.exists() and pid_file.read_text()):
                time.sleep(0.01)
            os.kill(os.getpid(), 9)
        """)
    script.write_text(code)
    environment = os.environ | {"CHILD_PID_FILE": str(pid_file)}
    result = subprocess.run(
        [sys.executable, script], capture_output=True, text=True, check=False, env=environment
    )
    assert result.returncode == -9, result.stderr
    pids = [int(pid) for pid in result.stdout.split()]
    assert len(pids) == 2
    assert_end(*pids, int(pid_file.read_text()))


NAMES = ("in_processes", "in_pool", "in_executor", "in_spawned", "start_method")


@pytest.mark.parametrize("by_value", [False, True])
def test_functions_start_processes_as_any_program_does(judges, tmp_path, monkeypatch, by_value):
    """In a file, and typed into a notebook."""
    where = str(GRADERS)
    if by_value:
        main = ModuleType("__main__")
        exec(GRADERS.read_text(), vars(main))
        monkeypatch.setitem(sys.modules, "__main__", main)
        where = str(tmp_path / "objects.pickle")
        Path(where).write_bytes(user_modules.dumped({name: vars(main)[name] for name in NAMES}))
    pool = judges(functions=tuple(Function(function=f"{where}:{name}") for name in NAMES))
    [done] = judge(pool, together("ab", "a"))
    rows = [tuple(each.values()) for each in done.components]
    assert rows == [(2.0, 2.0, 2.0, 2.0, 0.0), (1.0, 1.0, 1.0, 1.0, 0.0)]


def test_processes_that_never_stay_end_the_run(judges, tmp_path):
    file, marker = tmp_path / "once.py", tmp_path / "marker"
    file.write_text(
        textwrap.dedent(f"""
        import os, pathlib
        marker = pathlib.Path({str(marker)!r})
        if marker.exists():
            os._exit(5)
        marker.touch()
        def f(completions, **kwargs):
            os._exit(6)
        """)
    )
    pool = judges(functions=(Function(function=f"{file}:f"),))
    with pytest.raises(UserError, match=r"3 ended in a row.*exit code 5"):
        judge(pool, request())


@pytest.mark.parametrize(
    ("text", "said"),
    [
        ("1 / 0\n", "importing it raised ZeroDivisionError: division by zero (bad.py:1)"),
        ("import os; os._exit(9)\n", "importing them ended the process (exit code 9)"),
        ("import time; time.sleep(99)\n", "importing them took longer than"),
    ],
)
def test_a_bad_import_is_told_before_training(judges, text, said, tmp_path, monkeypatch):
    file = tmp_path / "bad.py"
    file.write_text(text)
    if "sleep" in text:
        monkeypatch.setattr(child, "START_SECONDS", 1.5)
    message = refusal(judges, functions=(Function(function=f"{file}:f"),))
    assert said in message
    assert str(file) in message


def test_processes_ignore_ctrl_c_are_replaced_when_idle_and_end_with_the_pool(judges):
    pool = judges("by_order")
    pids = [int(value(judge(pool, request("pid"))[0]))]
    os.kill(pids[0], signal.SIGINT)
    assert value(judge(pool, request("pid"))[0]) == pids[0]
    os.kill(pids[0], signal.SIGKILL)
    wait(pool.connections())
    assert pool.poll(0.0) == []
    pids.append(int(value(judge(pool, request("pid"))[0])))
    assert pids[0] != pids[1]
    pool.close()
    assert not any(map(is_running, pids))


def test_large_requests_and_long_queues(judges):
    pool = judges("length", num_workers=2)
    outcomes = judge(pool, *[request("x" * 300_000), request("ab")] * 200)
    assert [value(outcome) for outcome in outcomes] == [300_000.0, 2.0] * 200


def test_what_functions_log_comes_with_the_rewards(judges):
    (done,) = judge(judges("logs", "logs", "length"), together("a", "b"))
    assert done.noted == [("distance", 0.5), ("distance", 2.0)] * 2
    assert done.extra == {"parsed": ["A", "B"], "logs#2/parsed": ["A", "B"]}
    (error,) = judge(judges("logs_badly"), together("a"))
    assert "log_metric('distance', nan): not a finite number" in error


# -- environments --------------------------------------------------------------------------------


def section(*names: str, tools: tuple[str, ...] = (), **fields: Any) -> EnvironmentConfig:
    classes = tuple(EnvironmentClass(environment=f"{WORLDS}:{name}") for name in names)
    functions = tuple(name if ".py:" in name else f"{WORLDS}:{name}" for name in tools)
    fields = {"timeout": 30.0, "retries": 0} | fields
    return EnvironmentConfig(classes=classes, tools=functions, **fields)


@pytest.fixture
def worlds(pools):
    """Start a pool of environments."""

    def start(*names: str, **fields: Any) -> Any:
        environment = section(*names, **fields)
        config = Config(environment=environment)
        episodes = Episodes(config, {RUN: environment}, TEXT)
        pools.append(episodes.pool())
        pools[-1].start()
        return SimpleNamespace(pool=pools[-1], episodes=episodes)

    return start


def ask(world: Any, key: str, *turns: str, wants: Any = "answer", **columns: Any) -> None:
    said, observed = [ids(TEXT, each) for each in turns], columns.pop("observed", ())
    seen = [ids(TEXT, each) for each in observed]
    world.pool.submit(
        world.episodes.task(Episode(key, 5, 0, "begin", columns, said, seen), wants, 10**7)
    )


def answers(world: Any) -> dict[str, Any]:
    """What was answered, or what went wrong, by key."""
    return {key: plain(task) for key, task in finished(world.pool).items()}


def plain(task: Any) -> Any:
    if task.error is not None:
        return task.error
    return task.result.answer if hasattr(task.result, "answer") else task.result.value


def one(world: Any, *turns: str, **options: Any) -> Any:
    ask(world, "5.1", *turns, **options)
    return answers(world)["5.1"]


def test_an_episode_is_asked_turn_by_turn_and_judged(worlds, tmp_path):
    world, log = worlds("Echo"), str(tmp_path / "log")
    columns = {"colour": "blue", "log": log, "unknown": 1, "seed": 7}
    assert one(world, "a", **columns) == "a"
    assert one(world, "a", "count", **columns) == "4 2"
    assert one(world, "a", "count", "bye", **columns) is None
    assert one(world, "a", "count", "bye", wants="reward", **columns) == 3
    world.pool.close()
    lines = Path(log).read_text().splitlines()
    assert lines[:4] == ["reset 7 begin blue", "step a", "step count", "step bye"]
    assert lines[4:] in ([], ["close"])


def test_it_is_brought_back_to_where_it_was_and_looked_at_on_the_way(worlds):
    world = worlds("Echo")
    drawn = one(world, "seed")
    assert drawn == one(worlds("Echo"), "a", "seed", observed=["a"])
    assert drawn != one(world, "seed", seed=8), "a column of this name takes precedence"
    assert one(world, "a", "a", "count", observed=["a", "a"]) == "6 3"
    assert "environment of 5.1, turn 1: it is not reproducible" in one(
        world, "b", "a", observed=["a"]
    )
    assert one(world, "a", "a", "x", wants="reward", observed=["a", "a", "x"]) == 3


def test_failures_are_told_by_name_and_never_a_reward(worlds):
    world = worlds("Echo", retries=1)
    for text, says in (
        ("raise", "raised ValueError: no, thank you (worlds.py:"),
        ("nonsense", "step returned int 7, should be"),
    ):
        told = one(world, text)
        assert told.startswith(f"environment of 5.1, turn 1: {says}")
        assert told.endswith("(tried 2 times)")
    told = one(world, "a", wants="reward", colour="nan")
    assert "environment of 5.1, reward: reward returned nan as a reward" in told
    assert one(world, "a", wants="reward", colour="nothing") is None
    assert one(world, "a", wants="reward", colour="red") == 1.5


def test_reset_must_fit_the_data_and_the_prompt(worlds):
    told = one(worlds("Opens"), "a")
    assert "5.1, reset: returned str 'Welcome.', which is not in the prompt" in told
    needy = worlds("Needy")
    assert "reset takes an argument 'word', and the data has no such column" in one(needy, "a")
    assert "did you mean" in one(needy, "a", words="x")
    assert one(needy, "a", word="x") == "x"


def test_a_long_answer_is_cut_and_says_so(worlds):
    world = worlds("Echo", max_observation_chars=999_950)
    assert one(world, "long") == "x" * 999_950 + "\n[cut: 999950 of 1000000 characters]"


@pytest.mark.parametrize("name", ["Sleeper", "Async"])
def test_what_waits_waits_together(worlds, name):
    world = worlds(name)
    one(world, "wait 0")
    begin = time.monotonic()
    for number in range(256):
        ask(world, str(number), "wait 0.2")
    found = answers(world)
    assert time.monotonic() - begin < 2 * (1 + os.getloadavg()[0] / 2)
    assert len(found) == 256
    assert set(found.values()) == {None if name == "Sleeper" else "done"}


def test_no_more_than_max_concurrent_answer_at_once(worlds, monkeypatch):
    monkeypatch.setattr(episodes, "MAX_CONCURRENT", 2)
    world = worlds("Async")
    begin = time.monotonic()
    for number in range(6):
        ask(world, str(number), "wait 0.2")
    assert len(answers(world)) == 6
    assert time.monotonic() - begin >= 0.6


def test_what_hangs_in_a_loop_is_cancelled_and_its_process_lives(worlds):
    world = worlds("Async", timeout=1.0)
    pid = one(world, "pid")
    ask(world, "good", "wait 0.1")
    ask(world, "bad", "wait 1000")
    ask(world, "odd", "cancel")
    found = answers(world)
    assert found["good"] == "done"
    late = "environment of bad, turn 1: took longer than environment.timeout = 1 seconds"
    assert late in found["bad"]
    assert "raised CancelledError" in found["odd"]
    assert one(world, "pid") == pid


@pytest.mark.parametrize(("name", "text"), [("Echo", "hang"), ("Echo", "c"), ("Async", "stubborn")])
def test_what_cannot_be_cancelled_ends_with_its_process_and_only_it_is_charged(
    worlds, name, text, monkeypatch
):
    monkeypatch.setattr(module, "GRACE_SECONDS", 1.5)
    world = worlds(name, timeout=3.0)
    pid = int(one(world, "pid"))
    before = "done" if name == "Async" else "wait 0"
    for key in ("live", "other"):
        ask(world, key, "wait 0")
    answers(world)
    ask(world, "bad", text)
    ask(world, "good", "wait 0.1")
    ask(world, "live", "wait 0", "wait 0.1", observed=[before])
    found = answers(world)
    assert "took longer than environment.timeout" in found["bad"]
    assert found["good"] == found["live"] == ("done" if name == "Async" else "wait 0.1")
    assert not is_running(pid)
    ask(world, "other", "wait 0", "wait 0", observed=[before])
    assert answers(world)["other"] == before


def test_of_many_only_the_one_that_ends_the_process_is_charged(worlds):
    world = worlds("Echo")
    for number in range(4):
        ask(world, f"good {number}", "slow")
    ask(world, "bad", "exit")
    found = answers(world)
    assert "exit code 3" in found.pop("bad")
    assert found == {f"good {number}": "slow" for number in range(4)}


def test_what_is_dropped_is_not_answered_and_may_be_asked_again(worlds, tmp_path):
    world, log = worlds("Echo"), str(tmp_path / "log")
    ask(world, "1.0", "slow", log=log)
    ask(world, "1.1", "a")
    while not (Path(log).exists() and "step slow" in Path(log).read_text()):
        assert not [each for each in world.pool.poll(time.monotonic()) if each.key == "1.0"]
        time.sleep(0.01)
    ask(world, "1.2", "queued", log=log)
    world.pool.drop(["1.0", "1.2", "nobody"])
    answers(world)
    ask(world, "1.0", "b", log=log)
    assert answers(world) == {"1.0": "b"}
    world.pool.drop(["1.0"])
    end = time.monotonic() + 10
    while Path(log).read_text().splitlines().count("close") < 2:
        assert time.monotonic() < end, "closing is called"
        time.sleep(0.05)
    assert world.pool.poll(time.monotonic()) == []
    assert "queued" not in Path(log).read_text()


def test_closing_holds_up_nobody(worlds):
    world = worlds("Echo", timeout=1.0)
    assert one(world, "a", colour="clinging") == "a"
    world.pool.drop(["5.1"])
    assert one(world, "b") == "b"


def test_tools_are_called_and_their_errors_are_read_by_the_policy(worlds):
    world = worlds("Counter", tools=("multiply", "leave"))
    said = [
        'I add.<tool_call>{"name": "add", "arguments": {"amount": 2}}</tool_call>'
        '<tool_call>{"name": "multiply", "arguments": {"a": 2, "b": 1.5}}</tool_call>',
        '<tool_call>{"name": "fail"}</tool_call><tool_call>{"name"</tool_call>'
        '<tool_call>{"name": "leave"}</tool_call>',
    ]
    assert one(world, said[0], start=3) == [
        {"role": "tool", "name": "add", "content": "5"},
        {"role": "tool", "name": "multiply", "content": "3.0"},
    ]
    assert [each["content"] for each in one(world, *said, start=3)] == [
        "Error: RuntimeError: at 5",
        "Error: the tool call cannot be read: it is no JSON: Expecting ':' delimiter",
        "Error: SystemExit: left",
    ]
    assert one(world, *said, "That is all.", start=3) is None
    assert one(world, *said, "That is all.", start=3, wants="reward") == 5.0


def test_a_tool_that_raises_fails_the_response_where_that_is_wanted(worlds):
    world = worlds("Counter", on_tool_error="fail")
    told = one(world, '<tool_call>{"name": "fail"}</tool_call>')
    assert "environment of 5.1, turn 1: tool fail raised RuntimeError: at 0 (worlds.py:" in told
    [unknown] = one(world, '<tool_call>{"name": "fails"}</tool_call>')
    assert "no tool 'fails'; did you mean fail?" in unknown["content"]


def test_tools_need_no_class(worlds):
    world = worlds(tools=("plot", f"{GRADERS}:run_code"))
    table = [
        ("plot", {"function": "x", "self": "y"}, "xy"),  # parameters may have any names
        ("run_code", {"text": "abc"}, "[3.0] [3.0] [3.0]"),  # it starts processes
    ]
    for name, arguments, content in table:
        call = f"<tool_call>{json.dumps({'name': name, 'arguments': arguments})}</tool_call>"
        assert one(world, call) == [{"role": "tool", "name": name, "content": content}]
        assert one(world, call, "6") is None
        assert one(world, call, "6", wants="reward") is None
