"""A rank of a learner that is many processes: does what `learner.py` does, with the others.

The controller tells every rank the same things in the same order, and every rank reads the same
batch; rank 0 (role `learner`) alone answers, and owns the memory of the weights. The others
(role `learner_rank`) give signs of life (`heartbeat.py`).

Holds true: a rank that fails because another is gone waits to be replaced instead of reporting a
defect; one with a defect of its own reports it. Knows nothing of how ranks are started.
"""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Callable, Iterable
from functools import partial
from pathlib import Path

import torch

from rhymeflow.config import Config
from rhymeflow.learner.fsdp2 import ShardedLearner
from rhymeflow.learner.ranks import LOOPBACK, Ranks, Rendezvous, device_of
from rhymeflow.learner.saver import RankSaver
from rhymeflow.learner.token_details import TokenDetails
from rhymeflow.models.load import load_tokenizer, resolve_device
from rhymeflow.models.rope import settled
from rhymeflow.models.rows import WeightRows
from rhymeflow.utils import objects
from rhymeflow.utils.allocator import keep_freed_memory
from rhymeflow.weights.base import WeightStore
from rhymeflow.weights.handle import SharedMemoryWeightHandle
from rhymeflow.weights.manifest import plan
from rhymeflow.weights.shared_memory import SharedMemoryWeightStore
from rhymeflow.weights.stores import make_store
from rhymeflow.workers.channel import Connection
from rhymeflow.workers.learner import LearnerProcess
from rhymeflow.workers.messages import (
    JoinRanks,
    Message,
    RanksMeet,
    Shutdown,
    encode,
    receive,
    send,
)

PATIENCE = 10.0
"""Seconds that a rank waits to be replaced when a collective has failed."""


def lead(connection: Connection, config: Config, run_dir: Path) -> None:
    """Be rank 0 of the run's learner until `Shutdown`."""
    count = config.learner.num_ranks
    is_local = config.runtime == "local"
    rendezvous = Rendezvous(count, host=LOOPBACK if is_local else objects.here().address)
    send(connection, RanksMeet(rendezvous.address))
    _run(connection, config, run_dir, 0, partial(Ranks.lead, rendezvous))


def main(connection: Connection, name: str, config: Config, run_dir: Path) -> None:
    """Be another rank, once rank 0 is there."""
    keep_freed_memory()
    early: list[Message] = []
    while not isinstance(message := receive(connection), JoinRanks):
        if isinstance(message, Shutdown):
            return
        early.append(message)
    meet = partial(Ranks.join, message.address, message.rank)
    _run(_Delayed(connection, early), config, run_dir, message.rank, meet)


class _Delayed:
    """A connection that first delivers what came before the rank could act on it."""

    def __init__(self, connection: Connection, early: Iterable[Message]) -> None:
        self._connection = connection
        self._early = deque(map(encode, early))

    def poll(self, timeout: float = 0.0) -> bool:
        return bool(self._early) or self._connection.poll(timeout)

    def recv_bytes(self) -> bytes:
        return self._early.popleft() if self._early else self._connection.recv_bytes()

    def send_bytes(self, message: bytes) -> None:
        self._connection.send_bytes(message)

    def fileno(self) -> int:
        return self._connection.fileno()

    def close(self) -> None:
        self._connection.close()


def _run(
    connection: Connection,
    config: Config,
    run_dir: Path,
    rank: int,
    meet: Callable[[int, torch.device, float], Ranks],
) -> None:
    count = config.learner.num_ranks
    device = resolve_device(config.model)
    if config.runtime == "local":
        device = device_of(rank, count, device)
    else:  # of the node's GPUs a rank sees its own alone
        device = device_of(0, 1, device)
    learner = None
    try:
        # Who is silent for longer is replaced before the others' collectives give up.
        ranks = meet(count, device, 2 * config.run.worker_timeout)
        learner = RankProcess(connection, config, run_dir, ranks)
        learner.serve()
        ranks.leave()
    except RuntimeError:
        _wait_to_be_replaced(connection)
        raise
    finally:
        if learner is not None:
            learner.weights.close()


def _wait_to_be_replaced(connection: Connection) -> None:
    """Whoever is the cause is reported first, and this process ended. Or it was this one."""
    deadline = time.monotonic() + PATIENCE
    while (rest := deadline - time.monotonic()) > 0:
        if connection.poll(rest):
            receive(connection)


class RankProcess(LearnerProcess):
    """This rank's part in what the run asks of its learner."""

    learner: ShardedLearner

    def __init__(self, connection: Connection, config: Config, run_dir: Path, ranks: Ranks) -> None:
        self._ranks = ranks
        super().__init__(connection, config, run_dir)

    def _make_learner(self, device: torch.device, dtype: torch.dtype) -> ShardedLearner:
        rows = WeightRows(self.config.model)
        return ShardedLearner(
            lambda: settled(rows.skeleton(), self.config),
            load_tokenizer(self.config.model),
            self.config.learner,
            self.config.rollout,
            dtype,
            self._ranks,
            read=rows.read,
        )

    def _make_saver(self, directory: Path) -> RankSaver:
        return RankSaver(directory, is_lead=self._ranks.is_lead)

    def _make_weights(self, run_dir: Path) -> WeightStore:
        if not self._ranks.is_lead:
            return _NoStore()
        shapes = self.learner.gathering().shapes
        dtype = self.learner.compute_dtype
        manifest = plan({name: (shape, dtype) for name, shape in shapes.items()})
        return make_store(self.config, manifest, run_dir)

    def _publish_weights(self) -> int:
        gathering = self.learner.gathering()
        if not self._ranks.is_lead:
            gathering.serve()
            return 0
        with gathering.on_demand() as tensors:
            return self.weights.publish(self.version, tensors)

    def _checksum(self) -> Callable[[], str] | None:
        return None  # nobody has all of them

    def _whole(self, details: TokenDetails) -> TokenDetails:
        return self.learner.whole_details(details)

    def _say(self, message: Message) -> None:
        if self._ranks.is_lead:
            super()._say(message)


class _NoStore(SharedMemoryWeightStore):
    """Of ranks but 0."""

    def __init__(self) -> None:
        """It has no memory."""

    @property
    def handle(self) -> SharedMemoryWeightHandle:
        """Leads nowhere."""
        return SharedMemoryWeightHandle("", ())

    def close(self) -> None:
        """Nothing to give back."""
