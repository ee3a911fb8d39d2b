"""The inside of a sandbox: a script that puts up walls, and runs a program in them on each test.

It imports nothing of the package. Standard input has the task as JSON, standard output gets a line
of JSON for each test. Right outputs and results are compared outside, by `programs.py`."""

from __future__ import annotations

import contextlib
import ctypes
import json
import linecache
import os
import resource
import select
import signal
import struct
import sys
import time
import traceback
import types
from typing import Any

# Namespaces of mounts, host names, IPC, processes and networks; and of users (unshare(2)).
OTHERS = 0x20000 | 0x4000000 | 0x8000000 | 0x20000000 | 0x40000000
NEW_USER = 0x10000000
NOSUID, NODEV, BIND, DETACH, REC, PRIVATE = 2, 4, 4096, 2, 16384, 1 << 18  # mount(2)
PDEATHSIG, DUMPABLE, SECCOMP, SUBREAPER, NO_NEW_PRIVS = 1, 4, 22, 36, 38  # prctl(2)
MOUNT_SETATTR, IO_URING_SETUP, LANDLOCK = 442, 425, 444  # numbers of system calls
# By processor: its name in seccomp(2), and the number of socket(2).
SOCKET = {"x86_64": (0xC000003E, 41), "aarch64": (0xC00000B7, 198)}
SECRET, REPORT, PROBLEM = 3, 4, 5
"""Files of a test's process: a word, what it reports, and why walls do not stand."""

libc = ctypes.CDLL(None, use_errno=True)


def call(name: str, *arguments: Any) -> int:
    """Call a function of the C library. Raises `OSError`."""
    wide = [ctypes.c_long(each) if isinstance(each, int) else each for each in arguments]
    result: int = getattr(libc, name)(*wide)
    if result < 0:
        raise OSError(ctypes.get_errno(), f"{name}: {os.strerror(ctypes.get_errno())}")
    return result


def enter_namespaces(task: dict[str, Any]) -> None:
    """Return in the first process of new namespaces, whose files are what the task shows."""
    user, group, root = os.geteuid(), os.getegid(), task["scratch"]
    call("unshare", OTHERS | (NEW_USER if user else 0))
    maps = {"setgroups": "deny", "uid_map": f"{user} {user} 1", "gid_map": f"{group} {group} 1"}
    for name, text in maps.items() if user else ():
        with open(f"/proc/self/{name}", "w") as file:
            file.write(text)
    if child := os.fork():
        os._exit(os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) & 0xFF)
    call("prctl", PDEATHSIG, signal.SIGKILL)
    call("mount", None, b"/", None, REC | PRIVATE, None)
    size = f"size={task['scratch_bytes']},mode=755".encode()
    call("mount", b"none", root.encode(), b"tmpfs", NOSUID | NODEV, size)
    for path in task["shown"]:
        show(path, root + path)
    for path in ("/tmp", "/dev/shm"):
        os.makedirs(root + path, exist_ok=True)
        os.chmod(root + path, 0o1777)
    os.chdir(root)
    call("pivot_root", b".", b".")
    call("umount2", b".", DETACH)
    os.chdir("/tmp")


def show(path: str, target: str) -> None:
    """Make a file or directory visible at `target`, read-only, with what is mounted in it."""
    if os.path.exists(target):
        return  # it is in a directory that is shown
    os.makedirs(target if os.path.isdir(path) else os.path.dirname(target), exist_ok=True)
    if not os.path.isdir(path):
        os.close(os.open(target, os.O_CREAT | os.O_WRONLY))
    call("mount", path.encode(), target.encode(), None, BIND | REC, None)
    read_only, recursive = struct.pack("QQQQ", 1 | NOSUID, 0, 0, 0), 0x8000
    call("syscall", MOUNT_SETATTR, -1, target.encode(), recursive, read_only, len(read_only))


def confine(task: dict[str, Any]) -> None:
    """Put up the walls around this process and those that it will start."""
    if os.geteuid() == 0:
        os.setgroups([])
        os.setresgid(*[task["user"]] * 3)
        os.setresuid(*[task["user"]] * 3)
    else:
        call("capset", struct.pack("Ii", 0x20080522, 0), bytes(24))  # none
    call("prctl", NO_NEW_PRIVS, 1, 0, 0, 0)
    if task["walls"] == "landlock":
        restrict_files(task)
    if task["walls"] != "namespaces":
        forbid_sockets()
    for name, value in task["limits"].items():
        # Of processor time, first a signal that says what is wrong.
        soft = value - (name == "RLIMIT_CPU")
        resource.setrlimit(getattr(resource, name), (soft, value))


def restrict_files(task: dict[str, Any]) -> None:
    """Allow what the task shows, to be read, and its scratch directory (landlock(7))."""
    abi = call("syscall", LANDLOCK, None, 0, 1)
    rights = (1 << (13 + (abi >= 2) + (abi >= 3))) - 1 | (abi >= 5) << 15
    attributes = struct.pack("QQQ", rights, 0, 3)[: 8 if abi < 6 else 24]  # 3: signals, too
    rules = call("syscall", LANDLOCK, attributes, len(attributes), 0)
    execute, write, read, listing = 1, 2, 4, 8
    allowed = dict.fromkeys(task["shown"], execute | read | listing)
    for path, right in (allowed | {task["scratch"]: rights, "/dev/null": write | read}).items():
        place = os.open(path, os.O_PATH)
        right = right if os.path.isdir(path) else right & ~listing
        call("syscall", LANDLOCK + 1, rules, 1, struct.pack("=Qi", right, place), 0)
    call("syscall", LANDLOCK + 2, rules, 0)


def forbid_sockets() -> None:
    """Make every socket(2) fail with EACCES; the last steps allow, kill and refuse (seccomp(2))."""
    processor, number = SOCKET[os.uname().machine]
    load, equal, at_least, give = 0x20, 0x15, 0x35, 0x06
    steps = [
        (load, 0, 0, 4), (equal, 0, 5, processor), (load, 0, 0, 0),
        (at_least, 3, 0, 0x40000000),  # x86's second set of numbers
        (equal, 3, 0, number), (equal, 2, 0, IO_URING_SETUP),
        (give, 0, 0, 0x7FFF0000), (give, 0, 0, 0x80000000), (give, 0, 0, 0x00050000 | 13),
    ]  # fmt: skip
    program = ctypes.create_string_buffer(b"".join(struct.pack("HBBI", *each) for each in steps))
    call("prctl", SECCOMP, 2, struct.pack("HxxxxxxQ", len(steps), ctypes.addressof(program)), 0, 0)


def perform(source: str, test: dict[str, Any]) -> None:
    """Run the program and its test. Ends with `SystemExit`, as a program does."""
    execute, build, read, write, dump = exec, compile, os.read, os.write, json.dumps
    module = types.ModuleType("__main__" if "stdin" in test else "solution")
    sys.modules[module.__name__] = module
    linecache.cache["<program>"] = (len(source), None, source.splitlines(True), "<program>")
    try:
        execute(build(source, "<program>", "exec"), module.__dict__)
        if "assert" in test:
            execute(build(test["assert"], "<test>", "exec"), module.__dict__)
            write(REPORT, read(SECRET, 64))
        elif "call" in test:
            owner = module.Solution() if hasattr(module, "Solution") else module
            write(REPORT, dump(getattr(owner, test["call"])(*test["arguments"])).encode())
    except SystemExit:
        raise
    except BaseException as error:  # noqa: BLE001 - the program may raise anything
        trace = error.__traceback__
        traceback.print_exception(type(error), error, trace and trace.tb_next, -20)
        raise SystemExit(1) from None
    raise SystemExit(0)


def begin(task: dict[str, Any], test: dict[str, Any], files: list[int]) -> None:
    """In the child: take the files as the first ones, put up walls, run the program."""
    signal.signal(signal.SIGTERM, signal.SIG_DFL)
    for place, each in enumerate(files):
        os.dup2(each, 100 + place)  # away from the low numbers, which may be other files'
    for place in range(len(files)):
        os.dup2(100 + place, place)
    os.closerange(len(files), os.sysconf("SC_OPEN_MAX"))
    try:
        confine(task)
    except (OSError, ValueError, KeyError) as error:
        os.write(PROBLEM, f"{type(error).__name__}: {error}".encode())
        os._exit(1)
    os.closerange(PROBLEM, 100)
    perform(task["program"], test)


def descendants(pid: int) -> set[int]:
    """Return the processes that a process, or one of these, has started."""
    found: set[int] = set()
    with contextlib.suppress(OSError):  # it has ended
        for thread in os.listdir(f"/proc/{pid}/task"):
            with open(f"/proc/{pid}/task/{thread}/children") as file:
                found |= set(map(int, file.read().split()))
    return found.union(*map(descendants, found))


def kill_all(is_alone: bool) -> dict[int, int]:
    """Kill every process that the test has left; return exit codes by process id. They are stopped
    first, for a dead one makes room for another one."""
    codes: dict[int, int] = {}
    while True:
        seen: set[int] = set()
        while new := ({-1} if is_alone else descendants(os.getpid())) - seen:
            seen |= new
            for pid in new:
                with contextlib.suppress(ProcessLookupError):
                    os.kill(pid, signal.SIGSTOP)
        for pid in seen:
            with contextlib.suppress(ProcessLookupError):
                os.kill(pid, signal.SIGKILL)
        try:
            while (ended := os.waitpid(-1, 0 if is_alone else os.WNOHANG))[0]:
                codes[ended[0]] = os.waitstatus_to_exitcode(ended[1])
        except ChildProcessError:
            return codes


def run(task: dict[str, Any], test: dict[str, Any], until: float) -> dict[str, Any]:
    """Run one test; return what it printed, how it ended, and what it reported."""
    if (left := min(until - time.monotonic(), task["seconds"])) <= 0:
        return {"ended": "late", "passed": False, "out": "", "err": "", "report": ""}
    files = [os.memfd_create("file") for _ in range(6)]
    os.pwrite(files[SECRET], os.urandom(16).hex().encode(), 0)
    os.pwrite(files[0], test.get("stdin", "").encode("utf-8", "surrogatepass"), 0)
    if not (pid := os.fork()):
        begin(task, test, files)
    handle = os.pidfd_open(pid)
    in_time = select.select([handle], [], [], left)[0]
    code = kill_all(task["walls"] == "namespaces")[pid]
    _, out, err, word, report, problem = (os.pread(n, task["output_bytes"], 0) for n in files)
    for each in (handle, *files):
        os.close(each)
    if problem:
        raise OSError(problem.decode())
    ended = "" if not code else f"exit code {code}" if code > 0 else f"signal {-code}"
    ended = "out of time" if not in_time or code == -signal.SIGXCPU else ended
    texts = [each.decode(errors="replace") for each in (out, err, report)]
    shown = dict(zip(("out", "err", "report"), texts, strict=True))
    return {"ended": ended, "passed": not ended and report == word, **shown}


def main() -> None:
    """Read the task, put up the walls, run the tests."""
    with open(0, "rb", closefd=False) as file:
        task = json.loads(file.read())
    is_alone = task["walls"] == "namespaces"
    task["user"] = 20_000 + os.getpid() % 40_000
    os.umask(0o022)
    call("prctl", PDEATHSIG, signal.SIGKILL if is_alone else signal.SIGTERM)
    if os.getppid() != task["parent"]:
        return
    sys.path += task["packages"]
    with contextlib.suppress(OSError), open("/proc/self/oom_score_adj", "w") as file:
        file.write("1000")  # short of memory, the system ends programs first
    if is_alone:
        enter_namespaces(task)
    else:
        call("prctl", SUBREAPER, 1, 0, 0, 0)
        signal.signal(signal.SIGTERM, lambda *_: (kill_all(False), os._exit(1)))
        os.chdir(task["scratch"])
        if os.geteuid() == 0:
            os.chown(task["scratch"], task["user"], task["user"])
    call("prctl", DUMPABLE, 0, 0, 0, 0)  # no program traces this process
    until = time.monotonic() + task["total_seconds"]
    for test in task["tests"]:
        os.write(1, json.dumps(run(task, test, until)).encode() + b"\n")


if __name__ == "__main__":
    main()
