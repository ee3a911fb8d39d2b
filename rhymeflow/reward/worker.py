"""A process of the executor's: imports the functions once and calls them one at a time.

Holds true: it answers every call it lives through, in order; it ends with its parent, and all it
started with it (`utils/child.py`). Knows nothing of timeouts: a caller that waits too
long kills it.
"""

from __future__ import annotations

import asyncio
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
from rhymeflow.utils.child import detach


def main(connection: Connection, parent: int, config_json: str, log: str | None) -> None:
    """Serve until the parent closes the pipe or dies; what functions print goes to `log`."""
    detach(parent)
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
    logged = judge.logged
    return Value(values, time.perf_counter() - begin, logged.metrics, logged.extra)
