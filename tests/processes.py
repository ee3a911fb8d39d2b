"""What tests ask of processes of the operating system."""

import gc
import itertools
import os
import runpy
import signal
import sys
import threading
from multiprocessing import forkserver, resource_tracker, util
from pathlib import Path

from rhymeflow.runtime import processes


def is_running(pid: int) -> bool:
    """Whether the process runs: a zombie does not, for nobody may have asked how it ended."""
    try:
        stat = Path(f"/proc/{pid}/stat").read_text()
    except FileNotFoundError:
        return False
    return stat.rpartition(")")[2].split()[0] != "Z"


class Command:
    """`rhymeflow ...`, or another module, in a process of its own that need not import, which takes
    a new interpreter five seconds: this process's server of workers forks it, and it forks its own.
    """

    def __init__(self, *arguments: str, cwd: Path, module: str = "rhymeflow") -> None:
        self._output = cwd / f"output-{next(_numbers)}"
        self._process = processes.context().Process(
            target=_become, args=(module, arguments, cwd, self._output)
        )
        processes.prepare()
        self._process.start()
        self.pid = self._process.pid
        assert self.pid is not None

    @property
    def output(self) -> str:
        """All that it has printed, on stdout and stderr."""
        return self._output.read_text() if self._output.exists() else ""

    def send_signal(self, number: int) -> None:
        os.kill(self.pid, number)

    def wait(self, timeout: float = 120) -> int:
        """Its exit code, or less than 0: the signal that ended it."""
        self._process.join(timeout)
        code = self._process.exitcode
        assert code is not None, f"it runs after {timeout} s: {self.output}"
        return code

    def kill(self) -> None:
        """End it, if it has not ended."""
        self._process.kill()
        self._process.join()


_numbers = itertools.count()
_spawn = util.spawnv_passfds


def _become(module: str, arguments: tuple[str, ...], cwd: Path, output: Path) -> None:
    """In the new process: be as a program is that a shell has started."""
    os.chdir(cwd)
    file = os.open(output, os.O_CREAT | os.O_WRONLY | os.O_APPEND)
    for stream in (1, 2):
        os.dup2(file, stream)
    os.close(file)
    sys.stdout.reconfigure(line_buffering=True)
    signal.signal(signal.SIGINT, signal.default_int_handler)
    gc.enable()
    resource_tracker._resource_tracker._fd = None  # what it leaves is its own tracker's
    util.spawnv_passfds = _fork
    sys.argv = [module, *arguments]
    runpy.run_module(module, run_name="__main__")


def _fork(path: bytes, arguments: list[str], descriptors: list[int]) -> int:
    """Begin a server of workers by a fork of this process, with no descriptors but these."""
    if "forkserver" not in arguments[-1]:
        return _spawn(path, arguments, descriptors)
    pid = os.fork()
    if pid:
        return pid
    first = 3
    for kept in (*sorted(map(int, descriptors)), os.sysconf("SC_OPEN_MAX")):
        os.closerange(first, kept)
        first = kept + 1
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    gc.disable()
    forkserver._forkserver._lock = threading.Lock()  # which the other process holds
    try:
        exec(arguments[-1], {})
    finally:
        os._exit(0)
