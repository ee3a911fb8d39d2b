"""Runs an agent's program once for each line of JSON that it reads, and writes a line when it ends.

It is run by its path, in any Python from 3.9 on, so it imports the standard library alone. The file
of a function is imported once, and each run is a fork. All end when this process does.
"""

from __future__ import annotations

import contextlib
import ctypes
import gc
import importlib.util
import inspect
import json
import math
import os
import random
import select
import signal
import socket
import sys
import tempfile
import traceback
from collections.abc import Callable
from typing import Any

PR_SET_PDEATHSIG, PR_SET_CHILD_SUBREAPER = 1, 36  # prctl(2)

MOST_PRINTED = 1 << 28
"""Bytes of the log, which all programs print to; then it begins anew, or it would fill the disk."""

Job = dict[str, Any]
"""What a line says: `id`, `base_url`, `row` and `seed`, or `id` and `kill`."""


def main() -> None:
    """Serve standard input until it closes. The argument is JSON: which of `loaded`, `played` and
    `commanded` makes the program, and of what."""
    [(make, of)] = json.loads(sys.argv[1]).items()
    del sys.path[0]  # where this file is: its neighbours are no modules of the program
    # What the program reads and prints, as it is imported too, is not what is said here; and what
    # it starts does not inherit these two, by whose end it is known that this process has ended.
    heard, says = os.dup(0), os.dup(1)
    os.dup2(os.open(os.devnull, os.O_RDONLY), 0)
    os.dup2(2, 1)
    sys.stdout = open(1, "w", buffering=1, closefd=False)  # noqa: SIM115 - for all that it runs
    try:
        makes: dict[str, Any] = {"call": loaded, "play": played, "command": commanded}
        program = makes[make](of)
    except Exception as error:  # noqa: BLE001 - the user's file may raise anything
        traceback.print_exc()
        say(says, {"failed": described(error)})
        return
    say(says, {"failed": None})
    socket.getaddrinfo("127.0.0.1", 0)  # loads what each fork would load when it connects
    gc.freeze()  # a collection in a fork would copy all that is here
    with tempfile.TemporaryDirectory(prefix="rhymeflow-agent-") as directory:
        Launcher(program, directory, heard, says, returns=make != "command").serve()


def say(says: int, line: Job) -> None:
    """Write a line to a pipe."""
    os.write(says, json.dumps(line).encode() + b"\n")


def described(error: BaseException) -> str:
    """Return an exception's type and text in one line."""
    return f"{type(error).__name__}: {' '.join(str(error).split())}"[:1000]


def imported(name: str, path: str) -> Any:
    """Import a file as the module `name`."""
    found = importlib.util.spec_from_file_location(name, path)
    assert found is not None
    assert found.loader is not None
    module = importlib.util.module_from_spec(found)
    sys.modules[name] = module
    found.loader.exec_module(module)
    return module


def played(section: str) -> Callable[[Job, str], Any]:
    """Return what plays the classes of a section `environment`, with Rhymeflow."""
    player = importlib.import_module("rhymeflow.environments.player").player
    return _calling(player(section), "the player")


def loaded(call: str) -> Callable[[Job, str], Any]:
    """Import `path/to/file.py:function`; return what calls it."""
    path, _, name = call.rpartition(":")
    path = os.path.abspath(os.path.expanduser(path))
    sys.path.insert(0, os.path.dirname(path))  # for imports of its neighbours
    function = getattr(imported("agent", path), name)
    if inspect.isclass(function) and hasattr(function, "reset"):
        raise TypeError(f"{name} is a class: environment.classes names it, and agent is 'classes'")
    return _calling(function, name)


def _calling(function: Callable[..., Any], name: str) -> Callable[[Job, str], Any]:
    """Return what calls the function with the arguments that it names."""
    parameters = inspect.signature(function).parameters
    takes_all = any(each.kind is each.VAR_KEYWORD for each in parameters.values())
    names = ("base_url", "row", "seed")
    if "base_url" not in parameters and not takes_all:
        raise TypeError(f"{name} takes no argument base_url, the address of the policy")
    for each in parameters.values():
        is_needed = each.default is each.empty and each.kind not in (2, 4)  # *args, **kwargs
        if each.name not in names and is_needed:
            raise TypeError(f"{name} takes {each.name}, and is given {', '.join(names)}")

    if inspect.iscoroutinefunction(function):
        importlib.import_module("asyncio")  # with it, each fork is half as dear again

    def run(job: Job, _: str) -> Any:
        given = {each: job[each] for each in names if takes_all or each in parameters}
        random.seed(job["seed"])  # a fork would begin with the state of all others
        value = function(**given)
        if inspect.iscoroutine(value):
            import asyncio

            return asyncio.run(value)
        return value

    return run


def commanded(command: list[str]) -> Callable[[Job, str], Any]:
    """Return what becomes the command: the row is its standard input, as JSON; the seed and the
    file for a reward are in its environment."""

    def execute(job: Job, reward: str) -> Any:
        with tempfile.TemporaryFile(dir=os.path.dirname(reward)) as file:
            file.write(json.dumps(job["row"]).encode())
            file.seek(0)
            os.dup2(file.fileno(), 0)
        os.environ.update(RHYMEFLOW_SEED=str(job["seed"]), RHYMEFLOW_REWARD=reward)
        os.execvp(command[0], command)

    return execute


def clients(base_url: str) -> dict[str, str]:
    """Return variables by which OpenAI's and Anthropic's clients know where the policy is, and that
    no proxy leads there."""
    keys = dict.fromkeys(("OPENAI_API_KEY", "ANTHROPIC_API_KEY"), "none")
    anthropic = base_url[: -len("/v1")]  # its clients append that
    host = base_url.split("/")[2].partition(":")[0]
    for name in ("NO_PROXY", "no_proxy"):
        keys[name] = ",".join(filter(None, [os.environ.get(name), host]))
    return {"OPENAI_BASE_URL": base_url, "ANTHROPIC_BASE_URL": anthropic, **keys}


def checked(value: Any) -> float | None:
    """Return a reward. Raises `ValueError` if the value is neither a number nor None."""
    if value is None:
        return None
    if not hasattr(value, "__float__") or not math.isfinite(value):
        raise ValueError(f"it returned {value!r:.100}, should be a finite number or None")
    return float(value)


class Launcher:
    """The programs that run, by process; each leads a process group. Jobs come from the pipe
    `heard`, and go with their results to `says`. `returns`: they are functions, no commands."""

    def __init__(
        self,
        program: Callable[[Job, str], Any],
        directory: str,
        heard: int,
        says: int,
        *,
        returns: bool,
    ) -> None:
        self._program, self._directory, self._returns = program, directory, returns
        self._heard, self._says = heard, says
        self._running: dict[int, tuple[Job, int]] = {}
        """By process: its job, and the pipe that the program's result comes from."""
        self._parent = os.getpid()
        self._prctl = ctypes.CDLL(None).prctl if sys.platform == "linux" else None
        if self._prctl is not None:
            self._prctl(PR_SET_CHILD_SUBREAPER, 1)
        self._kept = {os.getpgrp(), *(os.getpgid(each) for each in children())}
        """Groups with what importing the program has started, which all runs may use."""

    def serve(self) -> None:
        """Start and end programs until `heard` closes; then end all."""
        woken, wakes = os.pipe()
        for end in (woken, wakes):
            os.set_blocking(end, False)
        signal.set_wakeup_fd(wakes)
        signal.signal(signal.SIGCHLD, lambda *_: None)
        signal.signal(signal.SIGINT, signal.SIG_IGN)
        received = b""
        try:
            while True:
                ends = [self._heard, woken]
                ready, _, _ = select.select(ends, [], [], 1.0 if self._running else None)
                if os.fstat(2).st_size > MOST_PRINTED:
                    os.ftruncate(2, 0)
                    print("What programs had printed was too much, and is gone.", file=sys.stderr)
                if woken in ready:
                    os.read(woken, 4096)
                    self._reap()
                    self._end_orphans()
                if self._heard in ready:
                    if not (data := os.read(self._heard, 1 << 16)):
                        return
                    *lines, received = (received + data).split(b"\n")
                    for line in lines:
                        self._take(json.loads(line))
        finally:
            for process in self._running:
                end_group(process)
            self._running.clear()
            self._end_orphans()

    def _end_orphans(self) -> None:
        """Kill what ended programs have started in sessions of their own: it knows their URL."""
        urls = [job["base_url"].encode() for job, _ in self._running.values()]
        for process in children():
            with contextlib.suppress(OSError), open(f"/proc/{process}/environ", "rb") as about:
                given, group = about.read(), os.getpgid(process)
                is_known = b"OPENAI_BASE_URL=" in given or not urls
                is_wanted = group in self._running or any(each in given for each in urls)
                if is_known and not is_wanted and group not in self._kept:
                    end_group(group)

    def _take(self, job: Job) -> None:
        if "kill" in job:
            for process, (running, _) in self._running.items():
                if running["id"] == job["id"]:
                    end_group(process)
            return
        result, writes = os.pipe()
        process = os.fork()
        if process == 0:
            self._run(job, writes)
        with contextlib.suppress(OSError):  # it has done so, or it has ended
            os.setpgid(process, process)
        os.close(writes)
        os.set_blocking(result, False)
        self._running[process] = job, result

    def _run(self, job: Job, writes: int) -> None:
        """Be the program; never returns."""
        said: Job = {"error": "ended without a result"}
        program = os.getpid()
        try:
            os.setpgid(0, 0)
            if self._prctl is not None:
                self._prctl(PR_SET_PDEATHSIG, signal.SIGKILL)
                if os.getppid() != self._parent:
                    os._exit(1)
            signal.set_wakeup_fd(-1)
            for number in (signal.SIGCHLD, signal.SIGINT):
                signal.signal(number, signal.SIG_DFL)
            for end in (self._heard, self._says):
                os.close(end)
            os.environ.update(clients(job["base_url"]))
            said = {"value": checked(self._program(job, self._reward_file(job["id"])))}
        except BaseException as error:  # noqa: BLE001 - a program may raise anything
            traceback.print_exc()
            said = {"error": f"raised {described(error)}"}
        finally:
            try:
                if os.getpid() == program:  # else it is a fork of the program's own
                    os.write(writes, json.dumps(said).encode())
                sys.stdout.flush()
                sys.stderr.flush()
            finally:
                os._exit(0)

    def _reap(self) -> None:
        """Say how the programs ended that have, and leave no dead process that this one inherited,
        which would keep its place in the system's table."""
        with contextlib.suppress(ChildProcessError):  # there is none
            while (ended := os.waitpid(-1, os.WNOHANG))[0]:
                if ended[0] in self._running:
                    self._say_ended(*ended)

    def _say_ended(self, process: int, status: int) -> None:
        end_group(process)  # what it has started
        job, result = self._running.pop(process)
        try:
            said = os.read(result, 1 << 16)
        except BlockingIOError:  # what it has started holds the pipe
            said = b""
        os.close(result)
        ending = json.loads(said) if said else self._ending(job["id"], status)
        say(self._says, {"id": job["id"], **ending})

    def _ending(self, id: int, status: int) -> Job:
        """Return the result of a program that left none in the pipe: of a command, of what died."""
        code = os.waitstatus_to_exitcode(status)
        if code < 0:
            return {"error": f"was killed by {signal.Signals(-code).name}"}
        if code or self._returns:
            how = " before it returned" if self._returns else ""
            return {"error": f"ended with exit code {code}{how}"}
        path = self._reward_file(id)
        try:
            with open(path, errors="replace") as file:
                text = file.read(1000).strip()
            os.unlink(path)
            return {"value": checked(float(text))}
        except FileNotFoundError:
            return {"value": None}
        except OSError as error:
            return {"error": f"left no file at RHYMEFLOW_REWARD: {error.strerror}"}
        except ValueError:
            return {"error": f"wrote {text!r:.100} to RHYMEFLOW_REWARD, should be a finite number"}

    def _reward_file(self, id: int) -> str:
        return os.path.join(self._directory, f"{id}.reward")


def children() -> list[int]:
    """Return the processes that this one has started or inherited."""
    with contextlib.suppress(OSError), open("/proc/thread-self/children") as file:  # Linux
        return [int(each) for each in file.read().split()]
    return []


def end_group(process: int) -> None:
    """Kill a program and what it has started, in its group."""
    with contextlib.suppress(ProcessLookupError, PermissionError):
        os.killpg(process, signal.SIGKILL)


if __name__ == "__main__":
    main()
