"""Processes that are stopped for a while, or slow: they run for one part in so many of the time.

Holds true: a process that is stopped does not run, though it be slow as well; after its end, or
`release`, it runs. Time is an argument.
"""

from __future__ import annotations

import os
import signal

from benchmarks.faults import processes

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
            descriptor = processes.open_process(pid)
            if descriptor is None:
                return False
            self._descriptors[pid] = descriptor
        held[pid] = max(until, held.get(pid, until))
        return True

    def _send(self, pid: int, number: signal.Signals) -> bool:
        return processes.send(self._descriptors[pid], number)
