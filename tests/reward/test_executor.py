"""The executor with real processes: what is judged, and what is said when it cannot be."""

from __future__ import annotations

import ast
import math
import os
import subprocess
import sys
import textwrap
import time
from collections.abc import Callable, Iterator
from multiprocessing.connection import wait
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest

from rhymeflow.config import RewardConfig, RewardFunction
from rhymeflow.core.types import TrajectoryId
from rhymeflow.errors import UserError
from rhymeflow.reward.components import WeightedSum
from rhymeflow.reward.executor import RewardDone, RewardError, RewardExecutor
from rhymeflow.reward.messages import RewardRequest, TrainerState
from rhymeflow.utils import pickled
from tests.processes import is_running

FILE = Path(__file__).parent / "functions.py"
Start = Callable[..., RewardExecutor]


def request(completion: str = "fine", prompt: Any = "p", **columns: Any) -> RewardRequest:
    return together(completion, prompt=prompt, **columns)


def together(*completions: str, prompt: Any = "p", **columns: Any) -> RewardRequest:
    """Several responses to one prompt."""
    ids = [[1, 2 + place] for place in range(len(completions))]
    return RewardRequest(prompt, list(completions), ids, columns, TrainerState(3, 9))


def functions(*names: str) -> tuple[RewardFunction, ...]:
    return tuple(RewardFunction(function=f"{FILE}:{name}") for name in names)


@pytest.fixture
def start() -> Iterator[Start]:
    """Make started executors that end with the test."""
    made: list[RewardExecutor] = []

    def _start(*names: str, **fields: Any) -> RewardExecutor:
        config = RewardConfig(**({"functions": functions(*names)} | fields))
        made.append(RewardExecutor(config))
        made[-1].start()
        return made[-1]

    yield _start
    for executor in made:
        executor.close()


def collect(executor: RewardExecutor, seconds: float = 20.0) -> dict[Any, Any]:
    """Run the caller's loop until all is reported."""
    outcomes, end = {}, time.monotonic() + seconds
    while len(executor):
        now = time.monotonic()
        assert now < end, "not judged in time"
        deadline = executor.next_deadline()
        if deadline != -math.inf:
            wait(executor.connections(), None if deadline is None else max(0.0, deadline - now))
        outcomes |= {outcome.key: outcome for outcome in executor.poll(time.monotonic())}
    return outcomes


def judge(executor: RewardExecutor, *requests: RewardRequest) -> list[Any]:
    every = range(len(executor.names))
    for member, each in enumerate(requests):
        executor.submit(TrajectoryId(4, member), each, every)
    outcomes = collect(executor)
    assert len(outcomes) == len(requests)
    return [outcomes[TrajectoryId(4, member)] for member in range(len(requests))]


def value(done: RewardDone) -> float:
    """What the only function gave the only response."""
    [components] = done.components
    [reward] = components.values()
    return reward


def test_each_function_gives_a_component(start: Start) -> None:
    weighted = (
        RewardFunction(function=f"{FILE}:length", weight=0.5),
        RewardFunction(function="exact_match", weight=10),
        RewardFunction(function=f"{FILE}:patient", weight=-1),
        RewardFunction(function=f"{FILE}:half"),
        RewardFunction(function=f"{FILE}:not_mine", weight=100),
        RewardFunction(function=f"{FILE}:length", weight=2),
    )
    [done] = judge(start(functions=weighted), request("four", answer="four"))
    assert done.components == (
        {"length": 4.0, "exact_match": 1.0, "patient": 0.25, "half": 0.5, "length#2": 4.0},
    )
    assert list(done.components[0]) == ["length", "exact_match", "patient", "half", "length#2"]
    assert WeightedSum(weighted)(done.components[0]) == 0.5 * 4 + 10 * 1 - 0.25 + 0.5 + 2 * 4
    assert WeightedSum(weighted)({}) is None, "nothing is not 0"
    assert done.key == TrajectoryId(4, 0)


def test_arguments_are_those_of_trl(start: Start, tmp_path: Path) -> None:
    report = str(tmp_path / "report")
    executor = start("sees")
    judge(executor, request("b", colour="red", report=report))
    assert ast.literal_eval(Path(report).read_text()) == {
        "prompts": ["p"],
        "completions": ["b"],
        "completion_ids": [[1, 2]],
        "colour": ["red"],
        "step": 3,
    }
    judge(executor, together("b", "c", colour="red", report=report))
    assert ast.literal_eval(Path(report).read_text()) == {
        "prompts": ["p", "p"],
        "completions": ["b", "c"],
        "completion_ids": [[1, 2], [1, 3]],
        "colour": ["red", "red"],
        "step": 3,
    }
    asked, begun = {"role": "user", "content": "q"}, {"role": "assistant", "content": "be"}
    judge(executor, request("gun", [asked, begun], colour=1, report=report))
    told = ast.literal_eval(Path(report).read_text())
    assert told["prompts"] == [[asked]]
    assert told["completions"] == [[{"role": "assistant", "content": "begun"}]]


def test_a_group_is_judged_in_one_call_and_only_by_the_functions_asked_for(start: Start) -> None:
    executor = start("length", "by_rank", "length")
    executor.submit("group 7", together("aaa", "b", "cc"), [0, 1])
    assert collect(executor) == {
        "group 7": RewardDone(
            "group 7",
            (
                {"length": 3.0, "by_rank": 1.0},
                {"length": 1.0, "by_rank": 0.0},
                {"length": 2.0},
            ),
        )
    }


def test_an_error_of_a_group_call_says_what_is_wrong_with_the_call(start: Start) -> None:
    executor = start("by_order", retries=0)
    executor.submit("group 7", together("fine", "fine"), [0])
    assert collect(executor)["group 7"].message == (
        "reward function 'by_order', group 7: returned 1 reward for 2 responses "
        "(`per: response` hands them over singly)"
    )


def test_what_a_function_does_to_its_arguments_is_seen_by_no_other(start: Start) -> None:
    executor = start("spoils", "spoils", retries=0)
    messages = [{"role": "user", "content": "q"}]
    [done] = judge(executor, together("a", "b", prompt=messages, answers=["yes"]))
    assert done.components == ({"spoils": 2.0, "spoils#2": 2.0},) * 2


def test_a_function_may_name_only_what_it_needs(start: Start) -> None:
    picky = RewardFunction(function=f"{FILE}:picky", options={"factor": 3.0})
    executor = start(functions=(picky,))
    right, wrong = judge(executor, request("red", colour="red", x=1), request("red", color="red"))
    assert value(right) == 3.0
    assert "takes an argument 'colour', and there is no such column or option" in wrong.message
    assert "did you mean color?" in wrong.message


WRONG = {
    "raise": "raised ValueError: the judge is ill (functions.py:",
    "exit": "raised SystemExit: 3 (functions.py:",
    "nan": "returned nan as a reward",
    "inf": "returned inf as a reward",
    "two": "returned 2 rewards for 1 response",
    "none at all": "returned 0 rewards for 1 response",
    "bare": "returned float 1.0, should be a list with 1 number",
    "nothing": "returned NoneType None, should be a list with 1 number",
    "text": "returned str '1', should be a list with 1 number",
    "text inside": "returned str '1' as a reward, should be a number or None",
    "mapping": "returned dict {'reward': 1.0}, should be a list",
    "hang": "took longer than reward.timeout = 0.3 seconds",
    "hang in C": "took longer than reward.timeout = 0.3 seconds",
    "hang awaiting": "took longer than reward.timeout = 0.3 seconds",
    "kill": "ended its process (killed by SIGKILL)",
    "huge": "returned 1e+308 as a reward, the largest size is 1e+15",
    "leave": "ended its process (exit code 7)",
    "surrogate": "raised ValueError: half \\ud800",
    "long": "raised ValueError: xxxxxxxxxxxxx",
}


def test_what_is_no_reward_is_an_error_and_harms_no_other(start: Start) -> None:
    executor = start("length", "by_order", timeout=0.3, retries=0)
    bad = list(WRONG)
    outcomes = judge(executor, *[request(c) for order in bad for c in ("fine", order)])
    for order, fine, error in zip(bad, outcomes[::2], outcomes[1::2], strict=True):
        assert fine == RewardDone(fine.key, ({"length": 4.0, "by_order": 1.0},))
        assert isinstance(error, RewardError), order
        assert error.message.startswith(f"reward function 'by_order', {error.key}: ")
        assert WRONG[order] in error.message
        assert "\n" not in error.message
        assert len(error.message) < 1200
        assert "tried" not in error.message


def test_what_is_a_reward(start: Start, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("OMP_NUM_THREADS", "7")  # of the parent
    executor = start("by_order")
    outcomes = judge(
        executor, *[request(c) for c in ("true", "tuple", "tensor", "threads", "fork")]
    )
    assert [value(outcome) for outcome in outcomes] == [1.0, 2.0, 0.5, 1.0, 5.0]


def test_none_is_no_component(start: Start) -> None:
    [done] = judge(start("not_mine", "not_mine"), together("a", "b"))
    assert done.components == ({}, {})


@pytest.mark.parametrize("function", ["flaky", "flaky_death"])
def test_a_failure_is_tried_again_and_the_rest_is_kept(
    start: Start, function: str, tmp_path: Path
) -> None:
    report, counter = str(tmp_path / "report"), tmp_path / "counter"
    executor = start("counted", function, "length", retries=1)
    [done] = judge(executor, request("abc", report=report, counter=str(counter)))
    assert done.components == ({"counted": 0.5, function: 1.0, "length": 3.0},)
    assert counter.read_text() == "x"


def test_tries_are_counted(start: Start) -> None:
    [error] = judge(start("by_order", retries=2), request("nan"))
    assert error.message.endswith("(tried 3 times)")


def test_a_worker_is_replaced_and_the_others_go_on(start: Start) -> None:
    executor = start("by_order", num_workers=2, timeout=0.5, retries=0)
    before = {value(outcome) for outcome in judge(executor, *[request("pid")] * 8)}
    executor.submit("hang", request("hang"), [0])
    executor.poll(time.monotonic())
    begin = time.monotonic()
    others = judge_more(executor, 20)
    assert all(isinstance(outcome, RewardDone) for outcome in others)
    assert time.monotonic() - begin < 0.4  # not behind the one that hangs
    assert isinstance(collect(executor)["hang"], RewardError)
    after = {value(outcome) for outcome in judge(executor, *[request("pid")] * 8)}
    assert len(after - before) <= 1
    for pid in before - after:
        assert not is_running(int(pid))


def judge_more(executor: RewardExecutor, count: int) -> list[Any]:
    for number in range(count):
        executor.submit(number, request("fine"), [0])
    outcomes: list[Any] = []
    while len(outcomes) < count:
        wait(executor.connections(), 0.01)
        outcomes += executor.poll(time.monotonic())
    return outcomes


def test_time_is_an_argument(start: Start) -> None:
    """A caller that is late is no function that hangs."""
    executor = start("by_order", timeout=1000, retries=0)
    assert executor.next_deadline() is None
    executor.submit("a", request("fine"), [0])
    assert executor.next_deadline() == -math.inf
    assert executor.poll(now=0.0) == []
    assert executor.next_deadline() == 1000.0
    wait(executor.connections())
    assert executor.poll(now=5000.0) == [RewardDone("a", ({"by_order": 1.0},))]
    assert executor.next_deadline() is None
    executor.submit("b", request("hang"), [0])
    assert executor.poll(now=6000.0) == []
    assert executor.poll(now=6999.0) == []
    [error] = executor.poll(now=7000.0)
    assert "took longer than reward.timeout = 1000 seconds" in error.message


@pytest.mark.parametrize(
    ("order", "said"),
    [
        ("child", "took longer"),
        ("session", "took longer"),
        ("die with a child", "killed by SIGKILL"),
    ],
)
def test_a_killed_worker_takes_its_children_along(
    start: Start, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, order: str, said: str
) -> None:
    pid_file = tmp_path / "pid"
    monkeypatch.setenv("CHILD_PID_FILE", str(pid_file))
    [error] = judge(start("by_order", timeout=1.0, retries=0), request(order))
    assert said in error.message
    assert_ends(int(pid_file.read_text()))


def assert_ends(pid: int) -> None:
    deadline = time.monotonic() + 10
    while is_running(pid) and time.monotonic() < deadline:  # it was killed, but may not be gone yet
        time.sleep(0.01)
    assert not is_running(pid)


def test_nothing_outlives_a_parent_that_its_function_kills(tmp_path: Path) -> None:
    code = textwrap.dedent(f"""
        import time
        from rhymeflow.config import RewardConfig, RewardFunction
        from rhymeflow.reward.executor import RewardExecutor
        from rhymeflow.reward.messages import RewardRequest, TrainerState
        if __name__ == "__main__":
            function = RewardFunction(function={str(FILE) + ":by_order"!r})
            executor = RewardExecutor(RewardConfig(functions=(function,)))
            executor.start()
            order = RewardRequest("p", ["kill the parent"], [[]], {{}}, TrainerState(0, 1))
            executor.submit(0, order, [0])
            executor.poll(0.0)
            time.sleep(60)
        """)
    script, pid_file = tmp_path / "parent.py", tmp_path / "pid"
    script.write_text(code)
    result = subprocess.run(
        [sys.executable, script], env=os.environ | {"CHILD_PID_FILE": str(pid_file)}, check=False
    )
    assert result.returncode == -9
    assert_ends(int(pid_file.read_text()))


def test_a_function_may_wait_for_all_its_children(start: Start) -> None:
    [done] = judge(start("by_order"), request("wait"))
    assert value(done) == 1.0


GRADERS = ("in_processes", "in_pool", "in_executor", "in_spawned", "start_method")


@pytest.mark.parametrize("by_value", [False, True])
def test_functions_start_processes_as_any_program_does(
    start: Start, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, by_value: bool
) -> None:
    """In a file, and typed into a notebook: processes are sent what stands beside them."""
    file = Path(__file__).parents[1] / "graders.py"
    where = str(file)
    if by_value:
        main = ModuleType("__main__")
        exec(file.read_text(), vars(main))
        monkeypatch.setitem(sys.modules, "__main__", main)
        where = str(tmp_path / "objects.pickle")
        Path(where).write_bytes(pickled.dumped({name: vars(main)[name] for name in GRADERS}))
    given = tuple(RewardFunction(function=f"{where}:{name}") for name in GRADERS)
    executor = start(functions=given, num_workers=1)
    [done] = judge(executor, together("ab", "a"))
    assert isinstance(done, RewardDone), done
    assert [tuple(each.values()) for each in done.components] == [
        (2.0, 2.0, 2.0, 2.0, 0.0),
        (1.0, 1.0, 1.0, 1.0, 0.0),
    ]


def test_a_function_that_hangs_is_tried_again_before_what_waits(start: Start) -> None:
    """Else a long queue of calls that all hang takes all their time before one is reported."""
    executor = start("by_order", timeout=1000.0, retries=1)
    for member in range(5):
        executor.submit(member, request("hang"), [0])
    executor.poll(0.0)
    assert executor.poll(2000.0) == []
    deadline = time.monotonic() + 20
    while not executor._workers[0].calls:  # its successor is sent the same call once it is ready
        assert time.monotonic() < deadline
        wait(executor.connections(), 0.1)
        executor.poll(2001.0)
    [error] = executor.poll(4000.0)
    assert (error.key, "tried 2 times" in error.message) == (0, True)


def test_an_idle_worker_that_dies_is_replaced(start: Start) -> None:
    executor = start("by_order")
    [first] = judge(executor, request("pid"))
    os.kill(int(value(first)), 9)
    wait(executor.connections())
    assert executor.poll(0.0) == []
    [second] = judge(executor, request("pid"))
    assert value(second) != value(first)


def test_workers_that_never_stay_end_the_run(start: Start, tmp_path: Path) -> None:
    file = tmp_path / "once.py"
    marker = tmp_path / "marker"
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
    executor = start(functions=(RewardFunction(function=f"{file}:f"),))
    with pytest.raises(UserError, match=r"3 ended in a row.*exit code 5"):
        judge(executor, request())


BAD_FILES = {
    "syntax": ("def f(:\n", "importing it raised SyntaxError"),
    "raises": ("1 / 0\n", "importing it raised ZeroDivisionError: division by zero (bad.py:1)"),
    "package": ("import no_such_package\n", "raised ModuleNotFoundError: No module named"),
    "leaves": ("import sys; sys.exit(2)\n", "importing it raised SystemExit: 2"),
    "dies": ("import os; os._exit(9)\n", "importing them ended the process (exit code 9)"),
    "hangs": ("import time; time.sleep(99)\n", "importing them took longer than"),
    "name": ("def g(completions): return [1]\n", "there is no 'f' in it; did you mean g"),
    "value": ("f = 3\n", "is a int, not a function"),
}


@pytest.mark.parametrize("case", BAD_FILES)
def test_a_bad_import_is_told_before_training(start: Start, case: str, tmp_path: Path) -> None:
    text, said = BAD_FILES[case]
    file = tmp_path / "bad.py"
    file.write_text(text)
    fields = {"start_timeout": 1.5} if case == "hangs" else {}
    with pytest.raises(UserError) as error:
        start(functions=(RewardFunction(function=f"{file}:f"),), **fields)
    if case == "name":
        said = "there is no 'f' in it; there are: g"
    assert said in str(error.value)
    assert str(file) in str(error.value)
    assert "\n" not in str(error.value)


def test_workers_end_with_their_parent(tmp_path: Path) -> None:
    """Even inside a call that never returns."""
    code = textwrap.dedent(f"""
        import os, time
        from multiprocessing.connection import wait
        from rhymeflow.config import RewardConfig, RewardFunction
        from rhymeflow.reward.executor import RewardExecutor
        from rhymeflow.reward.messages import RewardRequest, TrainerState
        if __name__ == "__main__":
            function = RewardFunction(function={str(FILE) + ":by_order"!r})
            executor = RewardExecutor(RewardConfig(functions=(function,), num_workers=2))
            executor.start()
            hang = RewardRequest("p", ["hang in C"], [[]], {{}}, TrainerState(0, 1))
            executor.submit(0, hang, [0])
            executor.poll(0.0)
            time.sleep(0.2)
            print(*[worker.process.pid for worker in executor._workers], flush=True)
            os.kill(os.getpid(), 9)
        """)
    script = tmp_path / "parent.py"
    script.write_text(code)
    result = subprocess.run([sys.executable, script], capture_output=True, text=True, check=False)
    pids = [int(pid) for pid in result.stdout.split()]
    assert len(pids) == 2, result.stderr
    end = time.monotonic() + 5
    while any(is_running(pid) for pid in pids):
        assert time.monotonic() < end, "a worker outlived its parent"
        time.sleep(0.01)


def test_workers_ignore_ctrl_c_and_close_ends_them(start: Start) -> None:
    executor = start("by_order", num_workers=2)
    pids = [worker.process.pid for worker in executor._workers]
    for pid in pids:
        os.kill(pid, 2)
    assert value(judge(executor, request())[0]) == 1.0
    executor.close()
    assert not any(is_running(pid) for pid in pids)


def test_large_requests_and_long_queues(start: Start) -> None:
    executor = start("length", num_workers=2)
    large = request("x" * 300_000)
    outcomes = judge(executor, *[large, request("ab")] * 200)
    assert [value(outcome) for outcome in outcomes] == [300_000.0, 2.0] * 200


def test_what_functions_log_comes_with_the_rewards(start: Start) -> None:
    executor = start("logs", "length")
    (done,) = judge(executor, together("a", "b"))
    assert isinstance(done, RewardDone)
    assert done.noted == (("distance", 0.5), ("distance", 2.0))
    assert done.extra == {"parsed": ["A", "B"]}
    (error,) = judge(start("logs_badly"), together("a"))
    assert isinstance(error, RewardError)
    assert "log_metric('distance', nan): not a finite number" in error.message
