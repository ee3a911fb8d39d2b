"""The processes of a run: found by their workers' names (Linux), killed, stopped and slowed.

A signal meets the process that was found, even if its id belongs to another by then. What is slow
runs for one part in so many of the time; what was stopped goes on in the end.
"""

from __future__ import annotations

import os
import signal
from pathlib import Path
from typing import NamedTuple

from rhymeflow.utils.process import PREFIX


class Process(NamedTuple):
    pid: int
    parent: int
    name: str
    state: str


def parse(stat: str) -> Process:
    """Read a `/proc/PID/stat`; the name in it may hold spaces and brackets."""
    start, _, rest = stat.rpartition(")")
    pid, _, name = start.partition(" (")
    state, parent, *_ = rest.split()
    return Process(int(pid), int(parent), name, state)


def running() -> list[Process]:
    """All processes of this machine that have not ended."""
    found = []
    for path in Path("/proc").glob("[0-9]*/stat"):
        try:
            process = parse(path.read_text(encoding="utf-8", errors="replace"))
        except (FileNotFoundError, ProcessLookupError):
            continue  # it ended meanwhile
        if process.state not in "ZX":
            found.append(process)
    return found


def descendants(processes: list[Process], pid: int) -> list[Process]:
    """Those that descend from `pid`, without itself."""
    children: dict[int, list[Process]] = {}
    for process in processes:
        children.setdefault(process.parent, []).append(process)
    found, next_ones = [], [pid]
    while next_ones:
        found += (new := [child for parent in next_ones for child in children.get(parent, ())])
        next_ones = [child.pid for child in new]
    return found


def of_kind(processes: list[Process], controller: int, kind: str) -> list[int]:
    """Ids of a run's processes of a kind, ascending."""
    if kind == "controller":
        return [process.pid for process in processes if process.pid == controller]
    return sorted(
        process.pid
        for process in descendants(processes, controller)
        if process.name.startswith(PREFIX) and _kind(process.name) == kind
    )


def _kind(name: str) -> str:
    """`rollout` of `rf:rollout-0.1`, `learner` of `rf:learner.2`."""
    return name.removeprefix(PREFIX).partition("-")[0].partition(".")[0]


def open_process(pid: int) -> int | None:
    """A descriptor of the process; `None` if it has ended."""
    try:
        return os.pidfd_open(pid)
    except ProcessLookupError:
        return None


def send(descriptor: int, number: signal.Signals) -> bool:
    try:
        signal.pidfd_send_signal(descriptor, number)
    except ProcessLookupError:
        return False
    return True


def kill(pid: int) -> bool:
    descriptor = open_process(pid)
    if descriptor is None:
        return False
    try:
        return send(descriptor, signal.SIGKILL)
    finally:
        os.close(descriptor)


SLOWNESS = 5
"""A slow process runs in one of so many turns."""


class Holds:
    """The processes that are held now, by their ids."""

    def __init__(self) -> None:
        self._stopped: dict[int, float] = {}  # until when
        self._slowed: dict[int, float] = {}
        self._descriptors: dict[int, int] = {}
        self._turn = 0

    def stop(self, pid: int, until: float) -> bool:
        """Do not let it run. False: there is no such process any more, as with `slow`."""
        return self._hold(self._stopped, pid, until) and self._send(pid, signal.SIGSTOP)

    def slow(self, pid: int, until: float) -> bool:
        """Let it run in some turns only."""
        return self._hold(self._slowed, pid, until)

    def turn(self, now: float) -> None:
        """Let go on what was held for long enough, and give the slow ones their turn or stop them.

        Turns should be equally long.
        """
        self._turn += 1
        for held in (self._stopped, self._slowed):
            for pid in [pid for pid, until in held.items() if until <= now]:
                del held[pid]
                if pid not in self._stopped and pid not in self._slowed:
                    self._send(pid, signal.SIGCONT)
                    os.close(self._descriptors.pop(pid))
        runs = self._turn % SLOWNESS == 0
        for pid in self._slowed.keys() - self._stopped.keys():
            self._send(pid, signal.SIGCONT if runs else signal.SIGSTOP)

    def release(self) -> None:
        """Let all go on."""
        self.turn(float("inf"))

    def _hold(self, held: dict[int, float], pid: int, until: float) -> bool:
        if pid not in self._descriptors:
            descriptor = open_process(pid)
            if descriptor is None:
                return False
            self._descriptors[pid] = descriptor
        held[pid] = max(until, held.get(pid, until))
        return True

    def _send(self, pid: int, number: signal.Signals) -> bool:
        return send(self._descriptors[pid], number)
