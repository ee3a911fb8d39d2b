"""Runs Python programs of the policy on tests, each program in a sandbox (`inside.py`).

A program that fails is an outcome; a sandbox that fails raises `SandboxFailed`. A sandbox ends
with this process, and as many run at once as there are cores."""

from __future__ import annotations

import json
import math
import os
import site
import subprocess
import sys
import tempfile
import threading
from collections.abc import Sequence
from functools import cache
from pathlib import Path
from typing import Any, NamedTuple

import msgspec

from rhymeflow.errors import UserError
from rhymeflow.utils.cores import usable_cores

WALLS = {
    "namespaces": "in namespaces: no network, no other processes, no files but the system's",
    "landlock": "behind Landlock: no network, no files but the system's",
    "limits": "behind limits alone: no network, but the files and processes of {}",
}
"""The walls around programs and what these reach, the strongest first."""

INSIDE = Path(__file__).with_name("inside.py")
SYSTEM = ["/usr", "/bin", "/sbin", "/lib", "/lib32", "/lib64", "/etc/ld.so.cache", "/nix/store"]
DEVICES = ["/dev/null", "/dev/zero", "/dev/urandom"]
"""What a program may read, beside Python and its packages."""
ENVIRONMENT = {"PATH": "/usr/bin:/bin", "LANG": "C.UTF-8", "PYTHONHASHSEED": "0"}
PROCESSES = 32  # and threads, of a program
SCRATCH_BYTES = 64 << 20  # of a file, and with namespaces of all files together
START_SECONDS = 15.0  # to put up and take down a sandbox
PROBE = "import decimal, fractions\nprint(decimal.Decimal(3))"  # loads files of Python

_running = threading.BoundedSemaphore(usable_cores())


class SandboxFailed(Exception):  # noqa: N818 - it is what happened
    """A sandbox was not put up, or ended without an outcome, which is not the program's fault."""


class ProgramLimits(NamedTuple):
    """What a program may use: seconds of processor time of a test (twice as much of real time) and
    of real time of all tests, memory of each process, and how much of a test's output is kept."""

    seconds: float
    total_seconds: float
    memory_mb: int
    output_bytes: int


class ProgramOutcome(msgspec.Struct, frozen=True):
    """How a program did on a test. `ended` is empty if that was by itself and without an error,
    else `out of time`, `late` (not begun within `total_seconds`), `exit code N` or `signal N`.
    `report` is what a call returned, as JSON; `passed` says whether an assertion held."""

    ended: str
    out: str
    err: str
    report: str
    passed: bool


def run(
    program: str, tests: Sequence[dict[str, Any]], limits: ProgramLimits, walls: str
) -> list[ProgramOutcome]:
    """Run a program on each test: `{"stdin": text}`, `{"assert": source}` (run after the program,
    in its module) or `{"call": name, "arguments": [...]}`. Raises `SandboxFailed`."""
    number = PROCESSES
    if walls != "namespaces" and os.geteuid():  # the limit counts all that the user runs
        number += sum(1 for _ in Path("/proc").glob("[0-9]*/task/[0-9]*"))
    with _running, tempfile.TemporaryDirectory(prefix="rf-", ignore_cleanup_errors=True) as scratch:
        task = {
            "program": program, "tests": tests, "walls": walls, "scratch": scratch,
            "scratch_bytes": SCRATCH_BYTES, "shown": _shown(), "packages": site.getsitepackages(),
            "parent": os.getpid(), "seconds": 2 * limits.seconds,
            "total_seconds": limits.total_seconds, "output_bytes": limits.output_bytes,
            "limits": {
                "RLIMIT_AS": limits.memory_mb << 20, "RLIMIT_CPU": math.ceil(limits.seconds) + 1,
                "RLIMIT_FSIZE": SCRATCH_BYTES, "RLIMIT_NPROC": number, "RLIMIT_NOFILE": 256,
                "RLIMIT_CORE": 0,
            },
        }  # fmt: skip
        home = "/tmp" if walls == "namespaces" else scratch
        try:
            done = subprocess.run(
                [sys.executable, "-s", "-S", "-P", "-B", str(INSIDE)],
                input=json.dumps(task).encode(), capture_output=True, start_new_session=True,
                timeout=limits.total_seconds + START_SECONDS, cwd=scratch,
                env=ENVIRONMENT | {"HOME": home, "TMPDIR": home, "OMP_NUM_THREADS": "1"},
            )  # fmt: skip
        except (OSError, subprocess.TimeoutExpired) as error:
            raise SandboxFailed(str(error)) from None
    results = done.stdout.splitlines()
    if done.returncode or len(results) != len(tests):
        said = done.stderr.decode(errors="replace").strip() or f"it ended: {done.returncode}"
        raise SandboxFailed(said.splitlines()[-1])
    return [msgspec.json.decode(each, type=ProgramOutcome) for each in results]


@cache
def _shown() -> list[str]:
    """Return what a program may read, each directory before what is in it."""
    python = [sys.base_prefix, sys.base_exec_prefix, sys.prefix, *site.getsitepackages()]
    paths = dict.fromkeys([*SYSTEM, *DEVICES, *python, *map(os.path.realpath, python)])
    return [path for path in paths if os.path.exists(path)]


@cache
def standing() -> tuple[str | None, str]:
    """Return the strongest walls that stand on this machine, and why stronger ones do not."""
    problems = "" if sys.platform == "linux" else " (they need Linux)"
    for walls in () if problems else WALLS:
        try:
            [outcome] = run(PROBE, [{"stdin": ""}], ProgramLimits(10, 20, 512, 10_000), walls)
        except SandboxFailed as error:
            problems += f" ({walls}: {error})"
            continue
        if outcome.out == "3\n":
            return walls, problems
        said = (outcome.err.strip() or outcome.ended).splitlines()[-1]
        problems += f" ({walls}: {sys.executable}, started by a user other than root: {said})"
    return None, problems


def chosen(least: str) -> str:
    """Return the strongest walls. Raises `UserError` if they are weaker than `least`."""
    if least not in WALLS:
        raise UserError(f"least_walls is {least!r}, should be one of {', '.join(WALLS)}")
    walls, problems = standing()
    if walls is None or [*WALLS].index(walls) > [*WALLS].index(least):
        raise UserError(f"programs cannot be run behind the walls {least!r} here{problems}")
    return walls


def described() -> str:
    """Return a sentence about the walls around programs on this machine."""
    walls, problems = standing()
    user = "a user that has none" if os.geteuid() == 0 else "the user"
    how = "cannot be run here" if walls is None else f"run {WALLS[walls].format(user)}"
    return f"programs of the policy {how}{problems}"
