"""The runtime of a Ray cluster: every worker is an actor, whose calls carry its messages.

Holds true: the controller is the driver, so actors end with it; an actor is never restarted by Ray
(it would come back empty): one that died and one that cannot be reached are both lost, and the
supervisor starts another under a new name; whatever a lost one says later is dropped by its name.
Knows nothing of what workers do or say, except `Shutdown`.
"""

from __future__ import annotations

import math
import secrets
import time
from collections.abc import Collection
from concurrent.futures import Future
from contextlib import ExitStack
from pathlib import Path
from queue import Empty, SimpleQueue
from typing import Any

from rhymeflow.config import Config
from rhymeflow.runtime.base import News, Received, Resources, Role, WorkerLost
from rhymeflow.runtime.ray import library, placement
from rhymeflow.runtime.ray.actor import Given, WorkerActor
from rhymeflow.runtime.ray.objects import ASKED
from rhymeflow.runtime.ray.store import StoreActor
from rhymeflow.runtime.ray.worker import GROUPS, Arrived, RayWorker
from rhymeflow.store import remote
from rhymeflow.utils.cores import usable_cores
from rhymeflow.workers.messages import Shutdown, decode

CLOSE_SECONDS = 5.0
"""What workers are given to end by themselves when the run is over."""

KILL_SECONDS = 10.0
"""What Ray is given to end one that does not; of one whose node is gone it may never know."""


class RayRuntime:
    """Actors of one run; a context manager that ends them all."""

    def __init__(self, config: Config, run_dir: Path, logs: Path) -> None:
        """`logs` is where what workers print goes, on each one's node."""
        self._config, self._run_dir, self._logs = config, run_dir.absolute(), logs.absolute()
        self._workers: dict[str, RayWorker] = {}
        self._arrived: Arrived = SimpleQueue()
        self._connection = ExitStack()
        self._namespace = f"rhymeflow-{secrets.token_hex(6)}"
        self._has_gpus = False
        self._ray: Any
        self._store: Any
        self._places: placement.Places

    def __enter__(self) -> RayRuntime:
        config = self._config
        own = placement.least(config, has_gpus=False).cpus
        connection = library.connected(config.ray.address, num_cpus=max(own, usable_cores()))
        self._ray = self._connection.enter_context(connection)
        total = self._ray.cluster_resources()
        self._has_gpus = config.model.device == "cuda" or (
            config.model.device == "auto" and total.get("GPU", 0) > 0
        )
        self._places = placement.Places(self._ray, config, has_gpus=self._has_gpus)
        self._store = self._start_store()
        return self

    def __exit__(self, *_: object) -> None:
        with self._connection:
            self.close()

    def start(self, role: Role, name: str, resources: Resources) -> RayWorker:
        """Create an actor; see `base.Runtime`."""
        takes = placement.need(role, resources.num_threads, self._config, has_gpus=self._has_gpus)
        log = self._logs / f"{name}.log"
        make = self._ray.remote(
            name=name,
            namespace=self._namespace,
            num_cpus=takes.cpus,
            num_gpus=takes.gpus,
            max_restarts=0,
            max_task_retries=0,
            concurrency_groups=GROUPS,
            scheduling_strategy=self._places.strategy(role, resources),
        )(WorkerActor)
        given = Given(
            role,
            name,
            self._namespace,
            resources.num_threads,
            self._config.model_dump_json(),
            str(self._run_dir),
            str(log),
        )
        worker = RayWorker(name, make.remote(given), log, self._arrived)
        self._workers[name] = worker
        worker.begin()
        return worker

    def wait(self, timeout: float, *, for_any_of: Collection[str] | None = None) -> list[News]:
        """Hand over what was sent, and take what has arrived; see `base.Runtime`."""
        for worker in self._workers.values():
            worker.hand_over()
        deadline = time.monotonic() + timeout
        news: list[News] = self._without_room()
        is_enough = bool(news)
        while True:
            rest = 0.0 if is_enough else max(0.0, deadline - time.monotonic())
            try:
                name, said = self._arrived.get(timeout=rest) if rest else self._arrived.get_nowait()
            except Empty:
                return news
            if name in self._workers and said is None:
                self._workers[name].listen()
            elif name in self._workers:
                news += self._read(self._workers[name], said)
                is_enough = is_enough or for_any_of is None or name in for_any_of

    def stop(self, name: str, *, patience: float) -> None:
        """End one actor; see `base.Runtime`."""
        worker = self._workers.pop(name)
        worker.send(Shutdown())
        worker.hand_over()
        if worker.is_heard:
            worker.ended.wait(patience)
        self._kill(worker)
        if worker.is_heard:
            worker.ended.wait(KILL_SECONDS)

    def close(self) -> None:
        """End all actors."""
        for worker in self._workers.values():
            worker.send(Shutdown())
            worker.hand_over()
        deadline = time.monotonic() + CLOSE_SECONDS
        for worker in self._workers.values():
            if worker.is_heard:
                worker.ended.wait(max(0.0, deadline - time.monotonic()))
        for worker in self._workers.values():
            self._kill(worker)
        self._workers.clear()
        self._places.close()
        self._ray.kill(self._store)

    def _start_store(self) -> Any:
        """The actor that reads the run's store for workers; Ray starts it anew as often as due."""
        make = self._ray.remote(
            name=remote.STORE,
            namespace=self._namespace,
            num_cpus=0,
            max_restarts=-1,
            max_task_retries=-1,
            concurrency_groups={ASKED: 1},
            scheduling_strategy=self._places.own_node(),
        )(StoreActor)
        return make.remote(self._namespace)

    def _kill(self, worker: RayWorker) -> None:
        self._ray.kill(worker.actor, no_restart=True)

    def has_room(self, role: Role, resources: Resources) -> bool:
        """Whether a node has room, and nobody waits for it; see `base.Runtime`."""
        if not all(worker.is_placed for worker in self._workers.values()):
            return False
        takes = placement.need(role, resources.num_threads, self._config, has_gpus=self._has_gpus)
        free = self._ray._private.state.available_resources_per_node().values()
        return any(
            node.get("CPU", 0) >= takes.cpus and node.get("GPU", 0) >= takes.gpus for node in free
        )

    def _without_room(self) -> list[News]:
        """Workers that have waited for a place too long."""
        patience, now = self._config.ray.wait_seconds, time.monotonic()
        news: list[News] = []
        for worker in self._workers.values():
            if not worker.is_placed and now - worker.asked_for > patience:
                worker.asked_for = math.inf  # it is told once
                reason = f"{worker.name} found no place for {patience:g} seconds (ray.wait_seconds)"
                news.append(WorkerLost(worker.name, f"{reason}; {self._what_there_is()}"))
        return news

    def _what_there_is(self) -> str:
        least = placement.least(self._config, has_gpus=self._has_gpus)
        total = self._ray.cluster_resources()
        return (
            f"the run takes {least.cpus} CPUs and {least.gpus} GPUs at least, and the cluster has "
            f"{total.get('CPU', 0):g} and {total.get('GPU', 0):g}"
        )

    def _lost_its_node(self, worker: RayWorker, error: BaseException | None) -> bool:
        """Ray may not know yet that a node is gone: its workers cannot be reached then, and what
        it had begun to place there is cancelled (the error has no field that says so).
        """
        if isinstance(error, self._ray.exceptions.ActorUnavailableError):
            return True
        if error is not None and "The actor never ran" in str(error):
            return True
        alive = {node["NodeID"] for node in self._ray.nodes() if node["Alive"]}
        return worker.node is not None and worker.node not in alive

    def _read(self, worker: RayWorker, said: Future[Any]) -> list[News]:
        """What a call of `collect` brought; go on listening unless the worker is lost."""
        error = said.exception()
        if error is not None and not isinstance(error, self._ray.exceptions.RayError):
            raise error
        if error is not None or said.result() is None:
            with_node = self._lost_its_node(worker, error)
            if with_node:
                how = "was lost (its node is gone or out of reach)"
            else:
                how = "ended" if error is None else f"died ({how_it_ended(error)})"
            reason = f"{worker.name} {how}; what it printed is in {worker.log}"
            return [WorkerLost(worker.name, reason, with_node=with_node)]
        worker.listen()
        return [Received(worker.name, decode(message)) for message in said.result()]


def how_it_ended(error: BaseException) -> str:
    """The sentence of Ray's message that says why, of the many that say what to do."""
    lines = [line.strip() for line in str(error).splitlines() if line.strip()]
    telling = [line for line in lines if line.startswith(("The actor is dead", "Caused by"))]
    detail = (telling or lines or [type(error).__name__])[-1]
    return detail.partition(". ")[0].rstrip(".")


__all__ = ["RayRuntime", "how_it_ended"]
