"""A process of the executor's: imports the functions once and calls them one at a time.

Holds true: it answers every call it lives through, in order; it ignores Ctrl-C; it dies with its
parent, even inside a call that never returns. Knows nothing of timeouts: a caller that waits too
long kills it, together with what it started (it leads a session and process group of its own), and
however it ends, its group ends with it (Linux).
"""

from __future__ import annotations

import asyncio
import contextlib
import ctypes
import os
import select
import signal
import sys
import time
from multiprocessing.connection import Connection
from pathlib import Path

from rhymeflow.config import RewardConfig
from rhymeflow.errors import UserError
from rhymeflow.reward.functions import Judge, NoReward
from rhymeflow.reward.messages import (
    Failure,
    Ready,
    Reply,
    RewardRequest,
    Unusable,
    Value,
    clipped,
    decode_request,
    decode_work,
    encode,
)
from rhymeflow.utils import output

_PR_SET_PDEATHSIG = 1  # prctl(2)


def main(connection: Connection, config_json: str, parent: int, log: str | None) -> None:
    """Serve until the parent closes the pipe or dies; what functions print goes to `log`."""
    _detach(parent)
    if log is not None:
        output.redirect(Path(log))
    config = RewardConfig.model_validate_json(config_json)
    try:
        try:
            judges = [Judge(function) for function in config.functions]
        except UserError as error:
            connection.send_bytes(encode(Unusable(clipped(str(error)))))
            return
        connection.send_bytes(encode(Ready()))
        with asyncio.Runner() as runner:  # one loop for life, so that its clients stay connected
            _serve(connection, judges, runner)
    except (EOFError, BrokenPipeError, ConnectionResetError):
        return  # the parent is gone, or wants no more


def _serve(connection: Connection, judges: list[Judge], runner: asyncio.Runner) -> None:
    while True:
        for task in decode_work(connection.recv_bytes()).tasks:
            request = decode_request(task.request)
            for index in task.functions:
                connection.send_bytes(encode(_judged(judges[index], request, runner)))


def _judged(judge: Judge, request: RewardRequest, runner: asyncio.Runner) -> Reply:
    begin = time.perf_counter()
    try:
        values = judge(request, runner)
    except NoReward as what:
        return Failure(clipped(str(what)), time.perf_counter() - begin)
    return Value(values, time.perf_counter() - begin)


def _detach(parent: int) -> None:
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    os.setsid()
    for name in ("OMP_NUM_THREADS", "MKL_NUM_THREADS", "OPENBLAS_NUM_THREADS"):
        os.environ[name] = "1"  # the parallelism is that of the workers
    if sys.platform == "linux":
        # The pipe's end is only seen between calls.
        ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)
        if os.getppid() != parent:
            sys.exit()  # it died before the line above
        _guard()


def _guard() -> None:
    """Start a process that kills this one's group when this one ends, however that comes about.

    It is no child of this one (a function may wait for all it has), and holds none of its files.
    """
    worker = os.getpid()
    try:
        ended = os.pidfd_open(worker)
    except OSError:  # before Linux 5.3; the executor still kills the group when it ends a worker
        return
    middle = os.fork()
    if middle:
        os.waitpid(middle, 0)
        os.close(ended)
        return
    if os.fork():
        os._exit(0)
    try:
        for descriptor in map(int, os.listdir("/proc/self/fd")):
            if descriptor != ended:
                with contextlib.suppress(OSError):  # that of the list itself
                    os.close(descriptor)
        poll = select.poll()
        poll.register(ended, select.POLLIN)
        poll.poll()
    finally:
        os.killpg(worker, signal.SIGKILL)  # this process is in it
