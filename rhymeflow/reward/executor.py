"""Judging responses in worker processes: in parallel, with a timeout, and no invented rewards.

A request is judged as a whole: one response, or several to the same prompt, in one call of each
function that is asked for. A timeout and a retry are those of a call.

Holds true: every submitted key comes back exactly once, as a `RewardDone` or a `RewardError`; a
function that raises, hangs, kills its process or returns something else than a reward is tried
again as configured and then named in the error; it is never charged with another's failure. A
worker that hangs, in C code too, is killed and replaced. `poll` never waits for user code.

Time is an argument: the caller waits on `connections()` until `next_deadline()` at the latest, then
calls `poll`. A deadline counts from the poll that saw the call begin, so a caller that is late is
never taken for a function that hangs.
"""

from __future__ import annotations

import atexit
import math
import multiprocessing.connection
from collections import deque
from collections.abc import Hashable, Sequence
from dataclasses import dataclass, field
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

import msgspec

from rhymeflow.config import RewardConfig
from rhymeflow.errors import UserError
from rhymeflow.reward.components import component_names
from rhymeflow.reward.messages import (
    Failure,
    Ready,
    Reply,
    RewardRequest,
    Task,
    Unusable,
    Value,
    Work,
    encode,
)
from rhymeflow.reward.process import WorkerProcess

BATCH_SECONDS = 0.01
"""Calls are sent together as long as they are expected to take no longer than this in all."""

LARGEST_BATCH = 32
"""Requests sent together at most."""

SHORTEST = 1e-6
"""Seconds of a call below which the clock means nothing."""

MEAN_WEIGHT = 0.1
"""Weight of the latest call in the running mean of durations."""

FAILED_STARTS = 3
"""Workers in a row that end without having answered a call, before the run is given up."""


@dataclass(frozen=True, slots=True)
class RewardDone:
    """For each response, the reward of each function by name (of those that applied to it)."""

    key: Hashable
    components: tuple[dict[str, float], ...]
    noted: tuple[tuple[str, float], ...] = ()
    """What the functions logged (`reward/logged.py`)."""
    extra: dict[str, list[Any]] = field(default_factory=dict)


@dataclass(frozen=True, slots=True)
class RewardError:
    """No reward could be had: which function did what, asked under which key."""

    key: Hashable
    message: str


Outcome = RewardDone | RewardError


@dataclass(slots=True, eq=False)
class _Request:
    """One submitted request: what is known of its rewards, by index of the function."""

    key: Hashable
    encoded: msgspec.Raw
    size: int
    missing: list[int]
    values: dict[int, list[float | None]] = field(default_factory=dict)
    failures: dict[int, list[str]] = field(default_factory=dict)
    noted: list[tuple[str, float]] = field(default_factory=list)
    extra: dict[str, list[Any]] = field(default_factory=dict)


@dataclass(slots=True, eq=False)
class _Worker:
    """The executor's record of one process: what it was sent and has not answered, in order."""

    process: WorkerProcess
    deadline: float | None
    is_ready: bool = False
    calls: deque[tuple[_Request, int]] = field(default_factory=deque)

    @property
    def is_free(self) -> bool:
        """Whether it can be sent a call."""
        return self.is_ready and not self.calls


class RewardExecutor:
    """Runs the configured reward functions in `config.num_workers` processes.

    `names` are the components' names, in the order of `config.functions`; where functions are of
    several sections, two may be equal. What functions print is appended to the file `log`; without
    one it goes where this process prints.
    """

    def __init__(
        self, config: RewardConfig, log: Path | None = None, names: Sequence[str] | None = None
    ) -> None:
        self._log = str(log) if log else None
        self.names = component_names(config.functions) if names is None else tuple(names)
        self._config = config
        self._workers: list[_Worker] = []
        self._queue: deque[_Request] = deque()
        self._outcomes: list[Outcome] = []
        self._active: set[Hashable] = set()
        self._mean_seconds = BATCH_SECONDS  # of a call; until some are measured, send them singly
        self._failed_starts = 0

    def start(self) -> None:
        """Start the workers and wait until each has imported the functions.

        Raises:
            UserError: a function cannot be imported, or importing takes longer than
                `reward.start_timeout`.
        """
        assert not self._workers, "started twice"
        atexit.register(self.close)
        try:
            for _ in range(self._config.num_workers):
                self._workers.append(self._new_worker(deadline=None))
            for worker in self._workers:
                if not worker.process.connection.poll(self._config.start_timeout):
                    raise UserError(self._slow_start())
                self._started(worker, worker.process.receive())
        except BaseException:
            self.close()
            raise

    def close(self) -> None:
        """End all workers at once; what was submitted is forgotten."""
        atexit.unregister(self.close)
        for worker in self._workers:
            worker.process.kill()
        self._workers.clear()
        self._queue.clear()
        self._active.clear()

    def __len__(self) -> int:
        """Return the number of requests submitted and not yet reported."""
        return len(self._active)

    def submit(self, key: Hashable, request: RewardRequest, functions: Sequence[int]) -> None:
        """Queue responses for these functions (by index); the next `poll` sends them.

        `key`, as text, says in errors what was judged.
        """
        assert functions, f"{key}: no function is asked for"
        assert self._workers, "not started"
        assert key not in self._active, f"{key} is being judged already"
        self._active.add(key)
        self._queue.append(
            _Request(key, msgspec.Raw(encode(request)), len(request.completions), list(functions))
        )

    def connections(self) -> list[Connection]:
        """What to wait on (`multiprocessing.connection.wait`); changes when workers do."""
        return [worker.process.connection for worker in self._workers]

    def next_deadline(self) -> float | None:
        """When to call `poll` at the latest; in the past if something can be sent."""
        if self._queue and any(worker.is_free for worker in self._workers):
            return -math.inf
        deadlines = [each.deadline for each in self._workers if each.deadline is not None]
        return min(deadlines, default=None)

    def poll(self, now: float) -> list[Outcome]:
        """Receive answers, end calls that are overdue, send what is queued. Never waits.

        Raises:
            UserError: workers end again and again without answering a call.
        """
        ready = multiprocessing.connection.wait(self.connections(), timeout=0)
        for index, worker in enumerate(self._workers):
            end = self._receive(worker, now) if worker.process.connection in ready else None
            if end is None and worker.deadline is not None and worker.deadline <= now:
                took = f"took longer than reward.timeout = {self._config.timeout:g} seconds"
                end = took if worker.is_ready else self._slow_start()
            if end is not None:
                self._workers[index] = self._replaced(worker, end, now)
        self._dispatch(now)
        outcomes, self._outcomes = self._outcomes, []
        return outcomes

    def _receive(self, worker: _Worker, now: float) -> str | None:
        """Read all that a worker has sent; return what it did last if it ended."""
        for reply in worker.process.replies():
            if not worker.is_ready and reply is not None:
                self._started(worker, reply)
            elif reply is None:
                return f"ended its process ({worker.process.how_it_ended()})"
            else:
                assert isinstance(reply, Value | Failure)
                self._answered(worker, reply)
                worker.deadline = now + self._config.timeout if worker.calls else None
        return None

    def _answered(self, worker: _Worker, reply: Value | Failure) -> None:
        request, function = worker.calls.popleft()
        self._failed_starts = 0
        self._mean_seconds += (reply.seconds - self._mean_seconds) * MEAN_WEIGHT
        if isinstance(reply, Value):
            request.missing.remove(function)
            request.values[function] = reply.values
            request.noted += reply.noted
            request.extra |= reply.extra
        else:
            request.failures.setdefault(function, []).append(reply.error)
        if not worker.calls or worker.calls[0][0] is not request:
            self._settle(request)

    def _settle(self, request: _Request) -> None:
        """All calls that were sent are answered: report the request, or queue it again."""
        for function, errors in request.failures.items():
            if function in request.missing and len(errors) > self._config.retries:
                tries = f" (tried {len(errors)} times)" if len(errors) > 1 else ""
                message = f"reward function {self.names[function]!r}, {request.key}: "
                self._active.remove(request.key)
                self._outcomes.append(RewardError(request.key, message + errors[-1] + tries))
                return
        if request.missing:
            self._queue.appendleft(request)  # at once: what fails always is not to wait its turn
            return
        components = tuple(
            {
                self.names[function]: value
                for function, values in sorted(request.values.items())
                if (value := values[response]) is not None
            }
            for response in range(request.size)
        )
        self._active.remove(request.key)
        noted = tuple(request.noted)
        self._outcomes.append(RewardDone(request.key, components, noted, request.extra))

    def _replaced(self, worker: _Worker, end: str, now: float) -> _Worker:
        """Kill a worker; charge the call it was in; queue the rest again; start another."""
        worker.process.kill()
        if not worker.calls:
            self._failed_starts += 1
            if self._failed_starts == FAILED_STARTS:
                raise UserError(
                    f"reward workers: {FAILED_STARTS} ended in a row; the last one {end}"
                )
        else:
            request, function = worker.calls[0]
            request.failures.setdefault(function, []).append(end)
            # Each once, in order; the later ones were not begun, and go first.
            first, *rest = dict.fromkeys(request for request, _ in worker.calls)
            self._queue.extendleft(reversed(rest))
            self._settle(first)
        return self._new_worker(now + self._config.start_timeout)

    def _dispatch(self, now: float) -> None:
        """Send queued requests to free workers, several at a time if calls are short."""
        free = [worker for worker in self._workers if worker.is_free]
        short = int(BATCH_SECONDS / max(self._mean_seconds * len(self.names), SHORTEST))
        for number, worker in enumerate(free):
            share = -(-len(self._queue) // (len(free) - number))
            batch = [self._queue.popleft() for _ in range(min(share, max(short, 1), LARGEST_BATCH))]
            if not batch:
                return
            if not worker.process.send(Work([Task(each.encoded, each.missing) for each in batch])):
                self._queue.extendleft(reversed(batch))  # gone: its end is seen by the next poll
                continue
            worker.calls.extend((each, function) for each in batch for function in each.missing)
            worker.deadline = now + self._config.timeout

    def _new_worker(self, deadline: float | None) -> _Worker:
        return _Worker(WorkerProcess(self._config.model_dump_json(), self._log), deadline)

    def _started(self, worker: _Worker, reply: Reply | None) -> None:
        if isinstance(reply, Unusable):
            raise UserError(reply.error)
        if reply is None:
            functions = ", ".join(function.function for function in self._config.functions)
            raise UserError(
                f"reward functions {functions}: importing them ended the process "
                f"({worker.process.how_it_ended()})"
            )
        assert isinstance(reply, Ready)
        worker.is_ready, worker.deadline = True, None

    def _slow_start(self) -> str:
        functions = ", ".join(function.function for function in self._config.functions)
        return (
            f"reward functions {functions}: importing them took longer than reward.start_timeout "
            f"= {self._config.start_timeout:g} seconds"
        )
