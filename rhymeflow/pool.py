"""A pool of processes that run a user's code: reward functions, environments and tools.

Every task is returned once, with a result or an error. A call that raises, hangs or ends its
process is retried as configured; then the task's error names it. No call is blamed for another's
failure. `poll` never waits for user code, and time is its argument: the caller waits on
`connections()` until `next_deadline()` at the latest, then polls."""

from __future__ import annotations

import atexit
import contextlib
import itertools
import math
import multiprocessing
import os
import signal
import struct
import time
from collections import Counter, deque
from collections.abc import Callable, Hashable, Iterable, Iterator
from io import FileIO
from multiprocessing.connection import Connection, wait
from pathlib import Path
from typing import Any, dataclass_transform

import msgspec

from rhymeflow.config import EnvironmentConfig, RewardConfig
from rhymeflow.errors import UserError
from rhymeflow.utils import child
from rhymeflow.utils.child import descendants, detach
from rhymeflow.utils.process import redirect_output

FAILED_STARTS = 3
"""The run fails when this many processes in a row have ended without a reply to a call."""

GRACE_SECONDS = 2.0
"""Time beyond the timeout for a process that times its own calls to cancel a late one."""

RESEND_SECONDS = 0.001  # time until the rest of a message is sent to a process whose pipe was full

LONGEST_TEXT = 1000  # most characters of an error's text that are kept

_LENGTH = struct.Struct("!i")
"""Length of the message that follows, as `multiprocessing.connection` writes it."""


@dataclass_transform(frozen_default=True)
class PoolMessage(msgspec.Struct, frozen=True, tag=True):
    """A message about session `id`, never reused: what a process keeps for tasks of one key."""

    id: int


class Close(PoolMessage):
    """Ends the session; there is no reply."""


class Imported(msgspec.Struct, frozen=True, tag=True):
    """The user's code was imported; with `error`: it could not be, and the process ends."""

    error: str | None = None


class Begun(PoolMessage):
    """The call's user code has started."""


class Failure(PoolMessage):
    """The call failed; `error` says how."""

    error: str


class Late(PoolMessage):
    """The call took longer than the configured time; `is_stuck`: it cannot be cancelled."""

    is_stuck: bool


encode = msgspec.msgpack.Encoder().encode


def encodable(text: str) -> str:
    """Return the text with lone surrogates escaped, so that it can be encoded as UTF-8."""
    return text.encode("utf-8", "backslashreplace").decode()


def clipped(text: str) -> str:
    """Return the text for an error: encodable, and at most `LONGEST_TEXT` characters."""
    text = encodable(text)
    return text if len(text) <= LONGEST_TEXT else text[: LONGEST_TEXT - 3] + "..."


class Refused(Exception):  # noqa: N818 - the reply is refused; the call itself has not failed
    """What user code returned is wrong, or cannot be encoded; the text says why."""


class Task:
    """Work for one process: one call or several, in order; ends with `result` or `error`."""

    def __init__(self, key: Hashable) -> None:
        self.key = key  # its name in errors, unique among the tasks in a pool
        self.result: Any = None
        self.error: str | None = None
        self.id = -1  # its session
        self.submitted = 0.0  # by its submitter's clock
        self.process: _Process | None = None
        self.stays = False  # whether its session is kept for the next task of this key
        self.part = 0  # number of the current call
        self.deadline = math.inf
        self.is_begun = self.is_suspect = False
        self.failures: Counter[int] = Counter()  # by number of the call

    def begin(self, earlier: Any) -> PoolMessage:
        """Return the first call's message. `earlier`: the task whose session continues, if any."""
        raise NotImplementedError

    def take(self, reply: Any) -> PoolMessage | None:
        """Take a reply; return the next call's message; None: `result` is set, or replies follow.
        Raises `Refused` if the reply is wrong, which counts as a failure."""
        raise NotImplementedError

    def where(self) -> str:
        """Describe the current call, for errors."""
        raise NotImplementedError

    def continues(self, earlier: Any) -> bool:
        """Whether the session of an earlier task of this key can serve it."""
        return False


class Pool:
    """Runs tasks in `config.num_workers` processes; what their code prints is appended to `log`.

    In each process, `setup(*arguments)` imports the user's code, which errors call `named`, and
    returns a function that serves a connection; `replies` is the union of its reply types. With
    `max_concurrent`, a process serves up to that many tasks at once, reports which calls have
    begun, and times and cancels calls. Without it, a process serves one task at a time, the pool
    times calls, and sessions end with tasks."""

    def __init__(
        self,
        config: RewardConfig | EnvironmentConfig,
        named: str,
        setup: Callable[..., Callable[[Connection], None]],
        arguments: tuple[str, ...],
        replies: Any,
        log: Path | None = None,
        max_concurrent: int | None = None,
    ) -> None:
        self._config, self._named, self._max_concurrent = config, named, max_concurrent
        self._section = "reward" if isinstance(config, RewardConfig) else "environment"
        self._arguments = (str(log) if log else None, setup, *arguments)
        self._patience = config.timeout + (0.0 if max_concurrent is None else GRACE_SECONDS)
        self._decode = msgspec.msgpack.Decoder(Imported | Begun | Failure | Late | replies).decode
        self._processes: list[_Process] = []
        self._log = log
        self._output: FileIO | None = None
        """The log as it grows, open until the user's code has printed something."""
        self._queue: deque[Task] = deque()
        self._suspects: deque[Task] = deque()
        """Tasks with a call that ran when their process ended: each is retried alone, to find out
        which of them ends processes."""
        self._active: dict[Hashable, Task] = {}
        self._live: dict[Hashable, Task] = {}
        """The latest task of each session that is kept and has no current call."""
        self._finished: list[Task] = []
        self._has_new = False
        self._polled_at = 0.0
        self._ids = itertools.count()
        self._failed_starts = 0

    def start(self) -> None:
        """Start the processes and wait until each has imported the user's code. Raises `UserError`
        if it cannot be imported, or that takes too long."""
        assert not self._processes, "started twice"
        if self._log is not None:
            self._output = self._log.open("a+b", buffering=0)  # reads from what is there on
        atexit.register(self.close)
        try:
            for _ in range(self._config.num_workers):
                self._processes.append(_Process(self._arguments, self._section, math.inf))
            for process in self._processes:
                while not process.is_ready:
                    if not process.connection.poll(child.START_SECONDS):
                        raise UserError(self._slow_start())
                    for reply in process.replies():
                        if reply is None:
                            how = process.how_it_ended()
                            raise UserError(
                                f"{self._named}: importing them ended the process {how}"
                            )
                        self._take(process, self._decode(reply), 0.0)
        except BaseException:
            self.close()
            raise

    def close(self) -> None:
        """Kill all processes; unfinished tasks are dropped."""
        atexit.unregister(self.close)
        if self._output is not None:
            self._output.close()
        for process in self._processes:
            process.kill()
        for records in (self._processes, self._queue, self._suspects, self._live, self._active):
            records.clear()

    def __len__(self) -> int:
        """Return the number of tasks submitted and not yet returned."""
        return len(self._active)

    def submit(self, task: Task) -> None:
        """Queue a task; the next `poll` sends it."""
        assert self._processes, "not started"
        assert task.key not in self._active, f"{task.key} is being asked already"
        self._active[task.key] = task
        self._queue.append(task)
        self._has_new = True

    def drop(self, keys: Iterable[Hashable]) -> None:
        """End the sessions of these keys; `poll` will not return their tasks."""
        for key in keys:
            for task in filter(None, (self._live.pop(key, None), self._active.pop(key, None))):
                if task.process is not None:
                    self._release(task)
                else:
                    (self._suspects if task.is_suspect else self._queue).remove(task)
        for process in self._processes:
            process.flush()

    def first_print(self) -> str | None:
        """Return the first line that the user's code has printed since the start, once; None:
        nothing was printed, or it was returned before."""
        if self._output is None:
            return None
        lines = self._output.read(LONGEST_TEXT).decode(errors="replace").strip().splitlines()
        if not lines:
            return None
        self._output.close()
        self._output = None
        return lines[0]

    def connections(self) -> list[Connection]:
        """Return what to wait on (`multiprocessing.connection.wait`) until the next `poll`."""
        return [process.connection for process in self._processes]

    def next_deadline(self) -> float | None:
        """Return when to `poll` at the latest: at once (-inf) for a new task; None: no limit."""
        if self._has_new:
            return -math.inf
        deadlines = [process.deadline for process in self._processes]
        deadlines += [each.deadline for p in self._processes for each in p.tasks.values()]
        if any(process.unsent for process in self._processes):
            deadlines.append(self._polled_at + RESEND_SECONDS)
        first = min(deadlines, default=math.inf)
        return None if first == math.inf else first

    def wait(self, seconds: float, *others: Any) -> None:
        """Wait up to `seconds` until a `poll` is due or one of `others` is readable."""
        if (deadline := self.next_deadline()) is not None:
            seconds = min(seconds, max(0.0, deadline - time.monotonic()))
        wait([*others, *self.connections()], seconds)

    def poll(self, now: float) -> list[Any]:
        """Receive replies, end overdue calls, send queued tasks; return the finished ones. Raises
        `UserError` if processes end again and again without answering a call."""
        self._polled_at, self._has_new = now, False
        for process in list(self._processes):
            for reply in process.replies():
                if process not in self._processes:
                    break  # it was replaced because of an earlier reply
                if reply is None:
                    self._replace(process, f"ended its process {process.how_it_ended()}", now)
                else:
                    self._take(process, self._decode(reply), now)
            if process not in self._processes:
                continue
            # Checked after its replies, so a late `poll` is not taken for a call that hangs.
            if process.deadline <= now:
                self._replace(process, self._slow_start(), now)
            elif any(task.deadline <= now for task in process.tasks.values()):
                self._replace(process, self._slow_call(), now)
        self._dispatch(now)
        for process in self._processes:
            if process.flush() and self._max_concurrent is None:
                for task in process.tasks.values():
                    task.is_begun = True
        finished, self._finished = self._finished, []
        for task in finished:
            del self._active[task.key]
        return finished

    # -- replies ----------------------------------------------------------------------------------

    def _take(self, process: _Process, reply: Any, now: float) -> None:
        if isinstance(reply, Imported):
            if reply.error is not None:
                raise UserError(reply.error)
            process.is_ready, process.deadline = True, math.inf
            return
        task = process.tasks.get(reply.id)
        if task is None:
            return  # it was dropped
        match reply:
            case Begun():
                task.is_begun = True
            case Late(is_stuck=True):
                self._replace(process, self._slow_call(), now, at_fault=task)
            case Late():
                self._failed_starts = 0
                self._count_failure(task, self._slow_call())
            case Failure(error=error):
                self._failed_starts = 0
                self._count_failure(task, error)
            case _:
                self._failed_starts = 0
                self._continue(task, reply, now)

    def _continue(self, task: Task, reply: Any, now: float) -> None:
        try:
            question = task.take(reply)
        except Refused as wrong:
            self._count_failure(task, str(wrong))
            return
        if question is not None:
            self._ask(task, question, now)
        elif task.result is None:
            task.deadline = now + self._patience  # of the next call
        else:
            if task.stays:
                assert task.process is not None
                del task.process.tasks[task.id]
                self._live[task.key] = task
            else:
                self._release(task)
            self._finished.append(task)

    def _ask(self, task: Task, question: PoolMessage, now: float) -> None:
        assert task.process is not None
        task.is_begun = False
        task.deadline = now + self._patience
        task.process.tasks[task.id] = task
        task.process.send(question)

    def _release(self, task: Task) -> None:
        """End the task's session, if it has one."""
        if task.process is None:
            return
        task.process.tasks.pop(task.id, None)
        if self._max_concurrent is not None:
            task.process.send(Close(task.id))
        task.process = None

    # -- failures ---------------------------------------------------------------------------------

    def _count_failure(self, task: Task, error: str) -> None:
        """Count a failed call: its task is retried or, after `retries`, ends with an error."""
        self._release(task)
        task.failures[task.part] += 1
        count = task.failures[task.part]
        if count <= self._config.retries:
            self._requeue(task)
            return
        tries = f" (tried {count} times)" if count > 1 else ""
        task.error = f"{task.where()}: {error}{tries}"
        self._finished.append(task)

    def _requeue(self, task: Task) -> None:
        (self._suspects if task.is_suspect else self._queue).appendleft(task)

    def _replace(
        self, process: _Process, end: str, now: float, at_fault: Task | None = None
    ) -> None:
        """Kill a process and start another. Its `end` counts as a failure of `at_fault`, or of the
        only call that had begun; if several had begun, their tasks become suspects."""
        process.kill()
        index = self._processes.index(process)
        self._processes[index] = _Process(self._arguments, self._section, now + child.START_SECONDS)
        self._live = {k: task for k, task in self._live.items() if task.process is not process}
        begun = [task for task in process.tasks.values() if task.is_begun]
        if not begun:
            self._failed_starts += 1
            if self._failed_starts == FAILED_STARTS:
                raise UserError(
                    f"{self._section} processes: {FAILED_STARTS} ended in a row; the last one {end}"
                )
        if at_fault is None and len(begun) == 1:
            [at_fault] = begun
        for task in reversed(process.tasks.values()):
            task.process = None
            if task is not at_fault:
                task.is_suspect = at_fault is None and task.is_begun
                self._requeue(task)
        if at_fault is not None:
            self._count_failure(at_fault, end)

    # -- sending ----------------------------------------------------------------------------------

    def _dispatch(self, now: float) -> None:
        """Send queued tasks to processes that have room, suspects first."""
        while self._suspects:
            empty = next((p for p in self._processes if p.is_ready and not p.tasks), None)
            if empty is None:
                break
            self._send(self._suspects.popleft(), empty, now)
        room = {process: self._room(process) for process in self._processes}
        if self._suspects:
            room[self._processes[0]] = 0  # so that it becomes free for a suspect
        waiting = []
        while self._queue and max(room.values()) > 0:
            task = self._queue.popleft()
            live = self._live.get(task.key)
            if live is not None and live.process is not None and task.continues(live):
                process = live.process
            else:
                free = (each for each in self._processes if room[each] > 0)
                process = min(free, key=lambda each: len(each.tasks))
            if room[process] > 0:
                self._send(task, process, now)
                room[process] -= 1
            else:
                waiting.append(task)
        self._queue.extendleft(reversed(waiting))

    def _room(self, process: _Process) -> int:
        """Return how many more tasks a process can be sent."""
        if not process.is_ready or any(task.is_suspect for task in process.tasks.values()):
            return 0
        return (self._max_concurrent or 1) - len(process.tasks)

    def _send(self, task: Task, process: _Process, now: float) -> None:
        live = self._live.pop(task.key, None)
        if live is not None and not task.continues(live):
            self._release(live)
            live = None
        task.id = next(self._ids) if live is None else live.id
        task.process = process
        self._ask(task, task.begin(live), now)

    def _slow_start(self) -> str:
        return f"{self._named}: importing them took longer than {child.START_SECONDS:g} seconds"

    def _slow_call(self) -> str:
        return f"took longer than {self._section}.timeout = {self._config.timeout:g} seconds"


class _Process:
    """A spawned process that runs `_main`, and its tasks; sending and receiving never wait."""

    def __init__(self, arguments: tuple[Any, ...], name: str, deadline: float) -> None:
        context = multiprocessing.get_context("spawn")
        self.connection, theirs = context.Pipe()
        # Not a daemon: user code may start processes of its own.
        arguments = (theirs, os.getpid(), *arguments)
        self._process = context.Process(target=_main, args=arguments, name=name, daemon=False)
        with child.without_main_file():
            self._process.start()
        theirs.close()  # so that the pipe closes when the process ends
        os.set_blocking(self.connection.fileno(), False)
        self.unsent, self._received = bytearray(), bytearray()
        self.deadline = deadline
        """Time, on the clock of `poll`, by which it must have imported the user's code."""
        self.is_ready = False
        self.tasks: dict[int, Task] = {}
        """Tasks that it has not answered, by session, in the order they were asked."""

    def send(self, question: PoolMessage) -> None:
        message = encode(question)
        self.unsent += _LENGTH.pack(len(message)) + message

    def flush(self) -> bool:
        """Send what the pipe has room for; return False if the process has ended."""
        try:
            while self.unsent:
                del self.unsent[: os.write(self.connection.fileno(), self.unsent)]
        except BlockingIOError:
            pass
        except OSError:
            self.unsent.clear()
            return False
        return True

    def replies(self) -> Iterator[bytes | None]:
        """Yield the replies that have arrived, then None if the process has ended."""
        has_ended = True
        try:
            while data := os.read(self.connection.fileno(), 1 << 16):
                self._received += data
        except BlockingIOError:
            has_ended = False
        except OSError:
            pass
        received, self._received, offset = bytes(self._received), bytearray(), 0
        while len(received) >= (begin := offset + _LENGTH.size):
            end = begin + _LENGTH.unpack_from(received, offset)[0]
            if end > len(received):
                break
            yield received[begin:end]
            offset = end
        self._received += received[offset:]
        if has_ended:
            yield None

    def how_it_ended(self) -> str:
        """Return, for errors, how a process that closed its pipe ended."""
        self._process.join(timeout=5)  # the pipe closes a little before the process ends
        return child.how_it_ended(self._process.exitcode)

    def kill(self) -> None:
        """Kill the process and those it started, even in sessions of their own, and wait for it."""
        assert self._process.pid is not None
        for pid in descendants(self._process.pid):
            with contextlib.suppress(ProcessLookupError):
                os.kill(pid, signal.SIGKILL)
        with contextlib.suppress(ProcessLookupError):  # its group is empty, or does not exist yet
            os.killpg(self._process.pid, signal.SIGKILL)
        self._process.kill()
        self._process.join()
        self.connection.close()


def _main(
    connection: Connection,
    parent: int,
    log: str | None,
    setup: Callable[..., Callable[[Connection], None]],
    *arguments: str,
) -> None:
    """Serve until the pool closes the pipe or its process dies."""
    detach(parent)
    if log is not None:
        redirect_output(Path(log))
    # If the pipe is closed, the parent has ended or closed the pool.
    with contextlib.suppress(EOFError, BrokenPipeError, ConnectionResetError):
        try:
            serve = setup(*arguments)
        except UserError as error:
            connection.send_bytes(encode(Imported(clipped(str(error)))))
            return
        connection.send_bytes(encode(Imported()))
        serve(connection)
