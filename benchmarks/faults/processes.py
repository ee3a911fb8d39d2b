"""The processes of a run: found by their workers' names, killed, stopped and slowed.

A signal meets the process that was found, even if its id belongs to another by then (psutil looks).
What is slow runs for one part in so many of the time; what was stopped goes on in the end.
"""

from __future__ import annotations

import re
from collections.abc import Callable

import psutil  # type: ignore[import-untyped]

from rhymeflow.utils.process import PREFIX

SLOWNESS = 5
"""A slow process runs in one of so many turns."""


def family(controller: int) -> list[psutil.Process]:
    """A run's processes that have not ended, the controller's first."""
    try:
        first = psutil.Process(controller)
        found = [] if is_over(first) else [first, *first.children(recursive=True)]
    except psutil.NoSuchProcess:
        found = []
    return [process for process in found if not is_over(process)]


def is_over(process: psutil.Process) -> bool:
    """Whether it has ended, though nobody may have asked how."""
    return not process.is_running() or process.status() == psutil.STATUS_ZOMBIE


def of_kind(processes: list[psutil.Process], kind: str) -> list[psutil.Process]:
    """Those of a kind among a run's, by their ids: `rollout` has `rf:rollout-0.1`, `learner` has
    `rf:learner.2`."""
    if kind == "controller":
        return processes[:1]
    name = re.compile(rf"{PREFIX}{kind}([-.]|$)")
    found = [each for each in processes[1:] if name.match(each.name())]
    return sorted(found, key=lambda each: each.pid)


def done(act: Callable[[], None]) -> bool:
    """Do something to a process; False: there is no such process any more."""
    try:
        act()
    except psutil.NoSuchProcess:
        return False
    return True


class Holds:
    """The processes that are held now, each until a time."""

    def __init__(self) -> None:
        self._stopped: dict[psutil.Process, float] = {}
        self._slowed: dict[psutil.Process, float] = {}
        self._turn = 0

    def hold(self, process: psutil.Process, until: float, *, stops: bool) -> bool:
        """Stop it, or let it run in some turns only. False: there is no such process any more."""
        held = self._stopped if stops else self._slowed
        held[process] = max(until, held.get(process, until))
        return done(process.suspend) if stops else process.is_running()

    def turn(self, now: float) -> None:
        """Let go on what was held for long enough, and give the slow ones their turn or stop them.

        Turns should be equally long.
        """
        self._turn += 1
        for held in (self._stopped, self._slowed):
            for process in [each for each, until in held.items() if until <= now]:
                del held[process]
                if process not in self._stopped and process not in self._slowed:
                    done(process.resume)
        runs = self._turn % SLOWNESS == 0
        for process in self._slowed.keys() - self._stopped.keys():
            done(process.resume if runs else process.suspend)

    def release(self) -> None:
        """Let all go on."""
        self.turn(float("inf"))
