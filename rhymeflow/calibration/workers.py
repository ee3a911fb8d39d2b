"""Workers that are measured at the same time, each in a process of its own, as in a run.

Holds true: processes are started by `spawn`; their threads are set before torch can be imported,
their cores before anything else; nothing is timed before all are ready, and one that is done goes
on working, untimed, until all are. So the memory and the cores are as contended as in a run whose
workers do not wait for each other. Knows nothing of what is measured.
"""

from __future__ import annotations

import multiprocessing
import os
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from multiprocessing.connection import Connection
from multiprocessing.process import BaseProcess
from typing import Any, NamedTuple, Protocol

from rhymeflow.errors import UserError
from rhymeflow.utils.cores import stay_on

PATIENCE = 10.0
"""Seconds in which a worker may end what it is at."""


class Bench(Protocol):
    """What a worker does once it is ready."""

    def measure(self) -> Any:
        """Take timings; what is returned can be pickled."""

    def work(self) -> None:
        """Do a little of the same, untimed."""


class Job(NamedTuple):
    """One worker."""

    make: Callable[[str], Bench]
    """The top of a module's: a class or a function."""
    argument: str
    num_threads: int
    cpus: tuple[int, ...] | None
    """Cores to pin it to; None pins nothing."""


def together(jobs: Sequence[Job]) -> list[Any]:
    """Return what each job's `measure` returned, all having run at the same time.

    Raises:
        UserError: what a job raised.
        RuntimeError: a worker died; what it died of is on the standard error.
    """
    workers = [_start(job) for job in jobs]
    try:
        for process, connection in workers:
            _answer(process, connection)
        for _, connection in workers:
            connection.send("measure")
        return [_answer(process, connection) for process, connection in workers]
    finally:
        for _, connection in workers:
            connection.close()  # which ends the worker
        for process, _ in workers:
            process.join(PATIENCE)
            process.kill()  # one that still measures, when another has failed


def _start(job: Job) -> tuple[BaseProcess, Connection]:
    context = multiprocessing.get_context("spawn")
    ours, theirs = context.Pipe()
    process = context.Process(target=_serve, args=(theirs, job), daemon=True)
    with _threads(job.num_threads):
        process.start()
    theirs.close()  # so that the end of the child is the end of the pipe
    return process, ours


def _answer(process: BaseProcess, connection: Connection) -> Any:
    try:
        answer = connection.recv()
    except EOFError:
        process.join()
        raise RuntimeError(f"a measured process died (exit code {process.exitcode})") from None
    if isinstance(answer, UserError):
        raise answer
    return answer


def _serve(connection: Connection, job: Job) -> None:
    """The worker's side: be ready, measure on request, work until the pipe is closed."""
    try:
        if job.cpus is not None:
            stay_on(job.cpus)
        bench = job.make(job.argument)
        connection.send("ready")
        connection.recv()
        connection.send(bench.measure())
        while not connection.poll():
            bench.work()
    except UserError as error:
        connection.send(error)
    except (EOFError, BrokenPipeError, ConnectionResetError):
        return  # another worker failed, and no process waits for this one


@contextmanager
def _threads(number: int) -> Iterator[None]:
    """Set the number of threads for processes started in the block."""
    before = os.environ.get("OMP_NUM_THREADS")
    os.environ["OMP_NUM_THREADS"] = str(number)
    try:
        yield
    finally:
        if before is None:
            del os.environ["OMP_NUM_THREADS"]
        else:
            os.environ["OMP_NUM_THREADS"] = before


__all__ = ["Bench", "Job", "together"]
