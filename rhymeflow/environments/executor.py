"""Environments in processes of their own: asked many at once, with a timeout, and rebuilt if lost.

A request says all that an episode was told so far. If its environment is there, at the turn before,
only the rest is asked; else one is opened and all turns are stepped, and what it answers to those
that were answered before is looked at by the request (`accepts`).

Holds true: every submitted key comes back exactly once, as what was asked for or an `EpisodeError`,
unless it is closed before; a call that raises, hangs or ends its process is
tried again as configured, with a new environment, and then named in the error; it is never charged
with another's failure. `poll` never waits for user code.

Who is to blame where a process ends with several calls in it: nobody yet. They are suspects; each
is tried again alone in a process, so the end of that process is its own. It is the same where a
process does not answer at all, for any of its calls may block it. A call that hangs in a thread is
told from the others by the process itself (`Stuck`).

Time is an argument: the caller waits on `connections()` until `next_deadline()` at the latest, then
calls `poll`. A call that is overdue is first told to end, and its process is killed only if a later
poll finds no word of it, so a caller that is late is never taken for an environment that hangs.
"""

from __future__ import annotations

import atexit
import itertools
import json
import multiprocessing.connection
from collections import deque
from collections.abc import Iterable, Sequence
from multiprocessing.connection import Connection
from pathlib import Path

from rhymeflow.config import EnvironmentConfig
from rhymeflow.environments.messages import (
    GRACE_SECONDS,
    Answered,
    Begun,
    Cancel,
    Close,
    Failure,
    Judge,
    Open,
    Opened,
    Question,
    Ready,
    Reply,
    Rewarded,
    Step,
    Stuck,
    Unusable,
)
from rhymeflow.environments.process import EnvironmentProcess
from rhymeflow.environments.records import Live, Slot, Task
from rhymeflow.environments.requests import (
    EpisodeAnswer,
    EpisodeError,
    EpisodeOpening,
    EpisodeReward,
    Outcome,
    Request,
)
from rhymeflow.environments.tools import Schema
from rhymeflow.errors import UserError
from rhymeflow.utils.reward_number import shown

FAILED_STARTS = 3
"""Processes in a row that end without having answered a call, before the run is given up."""


class EnvironmentExecutor:
    """Runs environments in `config.num_workers` processes.

    `others`: sections whose classes and tools are kinds too, after those of `config`; else they
    say nothing. `schemas`: of the tools of each kind. What environments print is appended to the
    file `log`; without one it goes where this process prints.
    """

    def __init__(
        self,
        config: EnvironmentConfig,
        schemas: Sequence[list[Schema]],
        log: Path | None = None,
        others: Sequence[EnvironmentConfig] = (),
    ) -> None:
        self._config, self._sections = config, (config, *others)
        sections = [each.model_dump(mode="json") for each in self._sections]
        self._arguments = (
            json.dumps(sections), json.dumps(list(schemas)), str(log) if log else None
        )  # fmt: skip
        self._slots: list[Slot] = []
        self._queue: deque[Task] = deque()
        self._live: dict[str, Live] = {}
        self._active: dict[str, Task] = {}
        self._outcomes: list[Outcome] = []
        self._ids = itertools.count()
        self._failed_starts = 0

    def start(self) -> None:
        """Start the processes and wait until each has imported classes and tools.

        Raises:
            UserError: one cannot be imported, or importing takes longer than
                `environment.start_timeout`.
        """
        assert not self._slots, "started twice"
        atexit.register(self.close)
        try:
            for _ in range(self._config.num_workers):
                self._slots.append(self._new_slot(deadline=None))
            for slot in self._slots:
                if not slot.process.connection.poll(self._config.start_timeout):
                    raise UserError(self._slow_start())
                for reply in slot.process.replies():
                    self._started(slot, reply)
        except BaseException:
            self.close()
            raise

    def close(self) -> None:
        """End all processes at once; what was submitted is forgotten."""
        atexit.unregister(self.close)
        for slot in self._slots:
            slot.process.kill()
        for kept in (self._slots, self._queue, self._live, self._active):
            kept.clear()

    def __len__(self) -> int:
        """Return the number of requests submitted and not yet reported."""
        return len(self._active)

    def submit(self, request: Request) -> None:
        """Queue a request; the next `poll` sends it."""
        assert self._slots, "not started"
        assert request.key not in self._active, f"{request.key} is being asked already"
        task = self._active[request.key] = Task(request)
        self._queue.append(task)

    def close_episodes(self, keys: Iterable[str]) -> None:
        """Close the environments of these; what was asked of them is not answered."""
        for key in keys:
            if (live := self._live.pop(key, None)) is not None:
                live.slot.process.send(Close(live.id))
            if (task := self._active.pop(key, None)) is None:
                continue
            if task in self._queue:
                self._queue.remove(task)
            for slot in self._slots:
                if slot.tasks.get(task.id) is task:
                    self._release(slot, task)

    def connections(self) -> list[Connection]:
        """What to wait on (`multiprocessing.connection.wait`); changes when processes do."""
        return [slot.process.connection for slot in self._slots]

    def next_deadline(self) -> float | None:
        """When to call `poll` at the latest."""
        starts = [slot.deadline for slot in self._slots if slot.deadline is not None]
        calls = [task.deadline for slot in self._slots for task in slot.tasks.values()]
        return min(starts + calls, default=None)

    def poll(self, now: float) -> list[Outcome]:
        """Receive answers, end calls that are overdue, send what is queued. Never waits.

        Raises:
            UserError: processes end again and again without answering a call.
        """
        ready = multiprocessing.connection.wait(self.connections(), timeout=0)
        for index, slot in enumerate(list(self._slots)):
            if slot.process.connection in ready:
                for reply in slot.process.replies():
                    if self._slots[index] is slot:  # else it was replaced by what came before
                        self._take(index, reply, now)
            if self._slots[index] is slot:
                self._look_at_deadlines(index, now)
        self._dispatch(now)
        outcomes, self._outcomes = self._outcomes, []
        return outcomes

    # -- what a process says ------------------------------------------------------------------

    def _take(self, index: int, reply: Reply | None, now: float) -> None:
        slot = self._slots[index]
        if reply is None:
            self._replace(index, f"ended its process ({slot.process.how_it_ended()})", now)
            return
        if isinstance(reply, Ready | Unusable):
            self._started(slot, reply)
            return
        task = slot.tasks.get(reply.id)
        if task is None:
            return  # closed meanwhile
        match reply:
            case Begun():
                task.is_begun = True
            case Opened(text=text):
                self._failed_starts = 0
                self._opened(slot, task, text, now)
            case Answered():
                self._answered(slot, task, reply, now)
            case Rewarded(value=value):
                self._release(slot, task)
                self._report(task, EpisodeReward(task.request.key, value))
            case Failure(error=error):
                self._failed(slot, task, self._slow_call() if task.is_cancelled else error)
            case Stuck():
                self._replace(index, self._slow_call(), now, charged=task)

    def _opened(self, slot: Slot, task: Task, text: str, now: float) -> None:
        request = task.request
        if request.opens:
            self._done(slot, task, EpisodeOpening(request.key, text))
        elif text == request.opening.text:
            self._go_on(slot, task, now)
        elif request.opening.text:
            self._failed(slot, task, "is not reproducible: it returned other text the first time")
        else:
            self._failed(slot, task, f"returned {shown(text)}, which is not in the prompt")

    def _answered(self, slot: Slot, task: Task, reply: Answered, now: float) -> None:
        turn, request = task.stepped, task.request
        task.stepped += 1
        if request.judges or task.stepped < len(request.turns):
            wrong = request.accepts(turn, reply.answer)
            if wrong is None:
                self._go_on(slot, task, now)
            else:
                self._failed(slot, task, wrong)
            return
        self._done(slot, task, EpisodeAnswer(request.key, reply))

    def _done(self, slot: Slot, task: Task, outcome: Outcome) -> None:
        """Report what was asked for; the environment stays."""
        del slot.tasks[task.id]
        self._live[task.request.key] = Live(slot, task.id, task.stepped)
        self._report(task, outcome)

    def _go_on(self, slot: Slot, task: Task, now: float) -> None:
        """Ask the next thing of an environment that is open."""
        turns = task.request.turns
        if task.stepped < len(turns):
            step = Step(task.id, turns[task.stepped])
            self._ask(slot, task, step, f"turn {task.stepped + 1}", now)
        else:
            self._ask(slot, task, Judge(task.id), "reward", now)

    def _ask(self, slot: Slot, task: Task, question: Question, doing: str, now: float) -> None:
        task.doing = doing
        task.is_begun = task.is_cancelled = False
        task.deadline = now + self._config.timeout
        slot.tasks[task.id] = task
        slot.process.send(question)

    def _report(self, task: Task, outcome: Outcome) -> None:
        del self._active[task.request.key]
        self._outcomes.append(outcome)

    def _release(self, slot: Slot, task: Task) -> None:
        """Nothing more is asked of the environment."""
        del slot.tasks[task.id]
        slot.process.send(Close(task.id))

    # -- what goes wrong ----------------------------------------------------------------------

    def _failed(self, slot: Slot, task: Task, error: str) -> None:
        self._release(slot, task)
        self._charge(task, error)

    def _charge(self, task: Task, error: str) -> None:
        """One try is used up: the next, or the end."""
        task.failures.append(error)
        if len(task.failures) <= self._config.retries:
            self._queue.appendleft(task)
            return
        tries = f" (tried {len(task.failures)} times)" if len(task.failures) > 1 else ""
        key = task.request.key
        message = f"environment of {key}, {task.doing}: {error}{tries}"
        self._report(task, EpisodeError(key, message))

    def _look_at_deadlines(self, index: int, now: float) -> None:
        slot = self._slots[index]
        if slot.deadline is not None and slot.deadline <= now:
            self._replace(index, self._slow_start(), now)
            return
        for task in slot.tasks.values():
            if task.deadline > now:
                continue
            if task.is_cancelled:
                self._replace(index, self._slow_call(), now)
                return
            task.is_cancelled = True
            task.deadline = now + GRACE_SECONDS
            slot.process.send(Cancel(task.id))

    def _replace(self, index: int, end: str, now: float, charged: Task | None = None) -> None:
        """Kill a process and start another; charge one call, or find out which one to charge."""
        slot = self._slots[index]
        slot.process.kill()
        self._slots[index] = self._new_slot(now + self._config.start_timeout)
        self._live = {key: live for key, live in self._live.items() if live.slot is not slot}
        begun = [task for task in slot.tasks.values() if task.is_begun]
        if not begun:
            self._failed_starts += 1
            if self._failed_starts == FAILED_STARTS:
                raise UserError(
                    f"environment processes: {FAILED_STARTS} ended in a row; the last one {end}"
                )
        if charged is None and len(begun) == 1:
            [charged] = begun
        for task in reversed(slot.tasks.values()):
            if task is charged:
                continue
            task.is_suspect = charged is None and task.is_begun
            self._queue.appendleft(task)
        if charged is not None:
            self._charge(charged, end)

    # -- what is sent -------------------------------------------------------------------------

    def _dispatch(self, now: float) -> None:
        """Send what is queued to where it can be served."""
        waiting, self._queue = self._queue, deque()
        reserved = self._slots[0] if any(task.is_suspect for task in waiting) else None
        for task in waiting:
            slot = self._place(task, reserved)
            if slot is None:
                self._queue.append(task)
                continue
            live = self._live.pop(task.request.key, None)
            if live is not None and self._serves(live, task):
                task.id, task.stepped = live.id, live.stepped
                self._go_on(slot, task, now)
                continue
            if live is not None:
                live.slot.process.send(Close(live.id))
            task.id, task.stepped = next(self._ids), 0
            self._ask(slot, task, Open(task.id, task.request.opening), "reset", now)

    def _place(self, task: Task, reserved: Slot | None) -> Slot | None:
        """The process for a task: where its environment is, or the one with the fewest calls."""
        if task.is_suspect:
            return next((slot for slot in self._slots if slot.is_ready and not slot.tasks), None)
        free = [
            slot
            for slot in self._slots
            if slot.is_ready
            and slot is not reserved
            and len(slot.tasks) < self._config.max_concurrent
            and not slot.is_for_one
        ]
        live = self._live.get(task.request.key)
        if live is not None and self._serves(live, task):
            return live.slot if live.slot in free else None
        return min(free, key=lambda slot: len(slot.tasks), default=None)

    @staticmethod
    def _serves(live: Live, task: Task) -> bool:
        """Whether the environment is where the request wants it: at the turn before, or judged."""
        missing = len(task.request.turns) - live.stepped
        return missing in (0, 1) if task.request.judges else missing == 1

    # -- processes ----------------------------------------------------------------------------

    def _new_slot(self, deadline: float | None) -> Slot:
        return Slot(EnvironmentProcess(*self._arguments), deadline)

    def _started(self, slot: Slot, reply: Reply | None) -> None:
        if isinstance(reply, Unusable):
            raise UserError(reply.error)
        if reply is None:
            raise UserError(
                f"{self._named()}: importing them ended the process ({slot.process.how_it_ended()})"
            )
        assert isinstance(reply, Ready)
        slot.is_ready, slot.deadline = True, None

    def _named(self) -> str:
        names = [each.environment for section in self._sections for each in section.classes]
        names += self._config.tools
        return f"environments {', '.join(names)}"

    def _slow_start(self) -> str:
        return (
            f"{self._named()}: importing them took longer than environment.start_timeout = "
            f"{self._config.start_timeout:g} seconds"
        )

    def _slow_call(self) -> str:
        return f"took longer than environment.timeout = {self._config.timeout:g} seconds"
