"""Runs a function on many ranks, in processes of their own, and returns what each returned."""

from __future__ import annotations

import pickle
import time
import traceback
from collections.abc import Callable
from multiprocessing.connection import Connection
from typing import Any

import torch

from rhymeflow.runtime import processes

TIMEOUT = 60.0


def on_ranks(num_ranks: int, job: Callable[..., Any], *args: Any) -> list[Any]:
    """`job(ranks, *args)` on every rank; `job` is at the top level of a module."""
    processes.prepare()
    pipes, workers = [], []
    for rank in range(num_ranks):
        ours, theirs = processes.context().Pipe()
        worker = processes.context().Process(
            target=_enter, args=(theirs, rank, num_ranks, job, args)
        )
        worker.start()
        theirs.close()
        pipes.append(ours)
        workers.append(worker)
    deadline = time.monotonic() + TIMEOUT
    try:
        address = _receive(pipes[0], deadline)
        for pipe in pipes[1:]:
            pipe.send(address)
        answers = [_receive(pipe, deadline) for pipe in pipes]
        for worker in workers:
            worker.join(max(0.0, deadline - time.monotonic()))
        return answers
    finally:
        for worker in workers:
            worker.kill()


def _send(pipe: Connection, kind: str, value: Any) -> None:
    pipe.send_bytes(pickle.dumps((kind, value)))  # `send` would have tensors shared, not copied


def _receive(pipe: Connection, deadline: float) -> Any:
    assert pipe.poll(max(0.0, deadline - time.monotonic())), "the ranks hang"
    kind, value = pickle.loads(pipe.recv_bytes())
    assert kind == "ok", value
    return value


def _enter(pipe: Connection, rank: int, num_ranks: int, job: Callable[..., Any], args: Any) -> None:
    torch.set_num_threads(1)
    from rhymeflow.learner.ranks import Ranks, Rendezvous

    try:
        device = torch.device("cpu")
        if rank == 0:
            rendezvous = Rendezvous(num_ranks)
            _send(pipe, "ok", rendezvous.address)
            ranks = Ranks.lead(rendezvous, num_ranks, device, TIMEOUT)
        else:
            ranks = Ranks.join(pipe.recv(), rank, num_ranks, device, TIMEOUT)
        _send(pipe, "ok", job(ranks, *args))
    except BaseException:  # noqa: BLE001 - the test is to say what it was
        _send(pipe, "error", traceback.format_exc())
