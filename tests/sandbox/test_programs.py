"""Programs that try to get out of their sandbox, behind each of the walls that stand here."""

import contextlib
import ctypes
import os
import signal
import site
import socket
import subprocess
import sys
import textwrap
import time
from pathlib import Path
from typing import Any

import pytest

from rhymeflow.errors import UserError
from rhymeflow.sandbox import programs
from rhymeflow.sandbox.programs import ProgramLimits, ProgramOutcome, SandboxFailed, chosen
from rhymeflow.utils.child import descendants

pytestmark = pytest.mark.skipif(sys.platform != "linux", reason="needs Linux")

QUICK = ProgramLimits(0.2, 10, 256, 100_000)
LARGE = ProgramLimits(10, 20, 512, 10_000)
SYSTEM_PYTHON = """
import site, sys
sys.executable = '/usr/bin/python3'
sys.prefix = sys.base_prefix = sys.base_exec_prefix = '/usr'
site.getsitepackages = list
"""
LOOP = "while True: pass"
TRIES = """
def tries(what):
    try:
        print(eval(what, globals()))
    except Exception as error:
        print(type(error).__name__)
import os, shutil, socket
"""


def problem(walls: str) -> str | None:
    """Why these walls do not stand on this machine."""
    try:
        [outcome] = programs.run(programs.PROBE, [{"stdin": ""}], LARGE, walls)
    except SandboxFailed as error:
        return str(error)
    return None if outcome.out == "3\n" else outcome.err


PROBLEMS = {each: problem(each) for each in programs.WALLS if sys.platform == "linux"}
OF_SYSTEM: dict[str, str | None] = {}  # the same with the system's Python
PYTHON, IS_ROOT = sys.executable, os.geteuid() == 0


@pytest.fixture(params=programs.WALLS)
def walls(request, monkeypatch):
    """Walls; if this Python is out of the reach of other users, around the system's."""
    if PROBLEMS[request.param]:
        for module, name in ((sys, "executable"), (sys, "prefix"), (sys, "base_prefix")):
            monkeypatch.setattr(module, name, getattr(module, name))
        monkeypatch.setattr(sys, "base_exec_prefix", "/usr")
        monkeypatch.setattr(site, "getsitepackages", list)
        exec(SYSTEM_PYTHON)
        programs._shown.cache_clear()
        if request.param not in OF_SYSTEM:
            OF_SYSTEM[request.param] = problem(request.param)
        if said := OF_SYSTEM[request.param]:
            pytest.skip(f"{request.param}: {said}")
    yield request.param
    programs._shown.cache_clear()


@pytest.fixture
def closed(walls):
    """Walls around files."""
    if walls == "limits" and not IS_ROOT:
        pytest.skip("limits: the program has the user's files")
    return walls


def ran(program: str, walls: str, limits: ProgramLimits = QUICK, **test: Any) -> ProgramOutcome:
    text = textwrap.dedent(program)
    [outcome] = programs.run(text, [test or {"stdin": ""}], limits, walls)
    return outcome


def tried(attempts: list[str], walls: str) -> list[str]:
    """What each expression gives in a sandbox: its value, or the name of what it raised."""
    calls = "\n".join(f"tries({each!r})" for each in attempts)
    return ran(f"{TRIES}\n{calls}", walls, QUICK._replace(seconds=5)).out.splitlines()


@pytest.fixture
def orphans():
    """Inherit all processes that lose their parent; a function that waits until none is left."""
    adopt = 36  # PR_SET_CHILD_SUBREAPER
    ctypes.CDLL(None).prctl(adopt, 1, 0, 0, 0)
    before = set(descendants(os.getpid()))

    def left() -> set[int]:
        until = time.monotonic() + 5
        while (found := set(descendants(os.getpid())) - before) and time.monotonic() < until:
            for pid in found:
                with contextlib.suppress(ChildProcessError):  # of another process
                    os.waitpid(pid, os.WNOHANG)
            time.sleep(0.01)
        return found

    yield left
    ctypes.CDLL(None).prctl(adopt, 0, 0, 0, 0)


def test_a_program_reads_and_prints(walls):
    program = "import decimal, sys, threading\nprint(int(input()) + 1)\nprint('b', 1)\n"
    program += "threading.Thread(target=lambda: print(__name__, file=sys.stderr)).start()"
    outcome = ran(program, walls, stdin="41\n")
    assert outcome == ProgramOutcome("", "42\nb 1\n", "__main__\n", "", False)
    outcome = ran("x = 1\nprint('é')\nx / 0", walls)
    assert (outcome.ended, outcome.out) == ("exit code 1", "é\n")
    assert outcome.err.splitlines()[:3] == [
        "Traceback (most recent call last):",
        '  File "<program>", line 3, in <module>',
        "    x / 0",
    ]
    assert ran("def (", walls).err.endswith("SyntaxError: invalid syntax\n")


def test_sets_have_one_order():
    walls = chosen("limits")
    printed = {ran("print({'a', 'b', 'c', 'd', 'e', 'f'})", walls).out for _ in range(2)}
    assert len(printed) == 1


def test_assertions_and_calls_are_reported(walls):
    program = "def f(x): return (x, [x])\nif __name__ == '__main__': input()\n"
    tests = [
        {"assert": "assert f(1)[0] == 1"},
        {"assert": "assert f(1)[0] == 2"},
        {"call": "f", "arguments": [3]},
    ]
    outcomes = programs.run(program, tests, QUICK, walls)
    assert [each.passed for each in outcomes] == [True, False, False]
    assert [each.ended for each in outcomes] == ["", "exit code 1", ""]
    assert outcomes[2].report == "[3, [3]]"


@pytest.mark.parametrize(
    "program",
    [
        "import os; os._exit(0)",
        "import sys; sys.exit(0)",
        "raise SystemExit",
        "import builtins; builtins.exec = builtins.compile = lambda *_: None",
        "import os; os.read = lambda *_: b''; os.write = lambda *_: 1",
        "import builtins; AssertionError = builtins.AssertionError = SystemExit",
        "import os\nfor n in range(3, 99):\n try: os.write(n, b'1' * 64)\n except OSError: pass",
        "def f(x): raise SystemExit(0)",
        "def f(x): __import__('os')._exit(0)",
        "import sys; sys.modules['os'] = sys.modules['json'] = None",
        "import signal, os; os.kill(os.getpid(), signal.SIGKILL)",
        "import ctypes; ctypes.string_at(0)",
    ],
)
def test_what_ends_before_its_test_or_changes_the_checker_has_not_passed(program):
    walls = chosen("limits")
    assert not ran(program, walls, **{"assert": "assert f(1) == 1"}).passed


def test_files_of_others_are_neither_read_nor_written(closed, tmp_path):
    store = tmp_path / "events.db"
    store.write_text("secret")
    mine = next(filter(Path.is_file, Path.home().iterdir()), tmp_path)
    listed = tried(
        [
            f"open({str(store)!r}).read()",
            f"open({str(store)!r}, 'a').write('x')",
            f"open({str(tmp_path / 'new')!r}, 'w').write('x')",
            f"open({str(mine)!r}).read()",
            "open('/usr/new', 'w')",
            f"open({os.path.join(sys.prefix, 'new')!r}, 'w')",
            "os.path.exists('/proc/1/environ') and open('/proc/1/environ').read()",
            "open('/etc/shadow').read()",
            "os.mkdir('here') or open('here/new', 'w').write('mine')",
        ],
        closed,
    )
    errors = ("FileNotFoundError", "PermissionError", "OSError", "False")
    assert all(each in errors for each in listed[:-1]), listed
    assert listed[-1] == "4"
    assert [each.name for each in tmp_path.iterdir()] == ["events.db"]
    assert store.read_text() == "secret"


def test_nothing_is_reached_by_network(walls):
    with socket.create_server(("127.0.0.1", 0)) as server:
        port = server.getsockname()[1]
        listed = tried(
            [
                f"socket.create_connection(('127.0.0.1', {port}), 1)",
                f"socket.socket(type=socket.SOCK_DGRAM).sendto(b'x', ('127.0.0.1', {port}))",
                "socket.create_connection(('1.1.1.1', 80), 1)",
                "socket.getaddrinfo('example.org', 80)",
            ],
            walls,
        )
    assert set(listed) <= {"PermissionError", "OSError", "gaierror"}, listed


def test_limits_hold():
    walls = chosen("limits")
    assert "MemoryError" in ran("x = bytearray(30 << 30)", walls).err
    assert ran("import mmap; mmap.mmap(-1, 30 << 30)", walls).ended == "exit code 1"
    printed = ran("while True: print('x' * 100_000)", walls, QUICK._replace(seconds=5))
    assert "File too large" in printed.err
    assert printed.out == "x" * QUICK.output_bytes
    assert ran("import time; time.sleep(60)", walls).ended == "out of time"
    deep = "import sys; sys.setrecursionlimit(10**9)\ndef f(n): return f(n) + 1\nf(0)"
    assert ran(deep, walls, QUICK._replace(memory_mb=64)).ended
    big = "open('big', 'wb').truncate(1 << 40)"
    assert ran(big, walls).ended == "exit code 1"


def test_processor_time_is_limited(walls):
    limit = "import resource; print(resource.getrlimit(resource.RLIMIT_CPU))"
    assert ran(limit, walls, QUICK._replace(seconds=3)).out == "(3, 4)\n"
    assert ran("import os; os.kill(os.getpid(), 24)", walls).ended == "out of time", "SIGXCPU"


def test_what_is_too_late_is_not_begun():
    limits = QUICK._replace(total_seconds=0.3)
    outcomes = programs.run(LOOP, [{"stdin": ""}] * 2, limits, chosen("limits"))
    assert [each.ended for each in outcomes] == ["out of time", "late"]


def test_a_fork_bomb_and_daemons_leave_nothing_behind(walls, orphans):
    bomb = "import os\nwhile True:\n try: os.fork()\n except OSError: pass"
    daemon = """
    import os, subprocess
    for _ in range(3):
        if os.fork() == 0:
            os.setsid()
            if os.fork() == 0:
                while True:
                    pass
            os._exit(0)
    subprocess.Popen(["/bin/sleep", "1000"], start_new_session=True)
    print("done")
    """
    assert ran(bomb, walls).ended == "out of time"
    assert ran(daemon, walls, QUICK._replace(seconds=3)).out == "done\n"
    assert not orphans()


def test_a_program_cannot_kill_what_runs_it(walls):
    if walls == "limits" and not IS_ROOT:
        pytest.skip("limits: the program may end the user's processes")
    program = "import os\nos.kill(os.getppid(), 9)\nprint('still there')"
    outcomes = programs.run(program, [{"stdin": ""}] * 2, QUICK, walls)
    assert len(outcomes) == 2


def test_a_sandbox_ends_with_the_process_that_runs_it(walls, orphans):
    python = SYSTEM_PYTHON if PROBLEMS[walls] else ""
    source = (
        f"{python}from rhymeflow.sandbox.programs import *\n"
        f"run({LOOP!r}, [{{'stdin': ''}}], ProgramLimits(60, 60, 256, 10), {walls!r})"
    )
    process = subprocess.Popen([PYTHON, "-c", source])
    until = time.monotonic() + 20
    while len(descendants(process.pid)) < 2 and time.monotonic() < until:
        time.sleep(0.02)
    time.sleep(0.1)
    process.send_signal(signal.SIGKILL)
    process.wait()
    assert not orphans()


def test_the_environment_is_not_the_users(monkeypatch):
    walls = chosen("limits")
    monkeypatch.setenv("API_KEY", "secret")
    assert "secret" not in ran("import os; print(os.environ)", walls).out


@pytest.mark.parametrize(
    ("script", "says"), [("raise OSError('no wall')", "OSError: no wall"), ("", "it ended: 0")]
)
def test_a_sandbox_that_fails_is_an_error(script, says, tmp_path, monkeypatch):
    (tmp_path / "inside.py").write_text(script)
    monkeypatch.setattr(programs, "INSIDE", tmp_path / "inside.py")
    with pytest.raises(SandboxFailed, match=says):
        ran("", "limits")
    monkeypatch.setattr(sys, "executable", str(tmp_path / "python"))
    with pytest.raises(SandboxFailed, match=r"No such file or directory: .*python"):
        ran("", "limits")


def test_fewer_walls_than_asked_for_are_refused(monkeypatch):
    monkeypatch.setattr(programs, "standing", lambda: ("landlock", " (namespaces: no)"))
    assert chosen("limits") == chosen("landlock") == "landlock"
    with pytest.raises(UserError, match=r"behind the walls 'namespaces' here \(namespaces: no\)"):
        chosen("namespaces")
    with pytest.raises(UserError, match="should be one of namespaces, landlock, limits"):
        chosen("best")
    assert "behind Landlock: " in programs.described()
    assert programs.described().endswith(" (namespaces: no)")
    monkeypatch.setattr(programs, "standing", lambda: (None, " (they need Linux)"))
    with pytest.raises(UserError, match="they need Linux"):
        chosen("limits")
