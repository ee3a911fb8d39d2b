"""The runtime of a Ray cluster: every worker is an actor, whose calls carry its messages.

The controller is the driver, so actors end with it. Ray restarts none: one that died or cannot be
reached is lost, and what it says later is dropped. An instance and a learner's rank take a CPU a
thread and GPUs of their own, an instance's all on one node; other workers take nothing.
"""

from __future__ import annotations

import math
import secrets
import threading
import time
from collections.abc import Collection
from concurrent.futures import Future
from contextlib import ExitStack
from pathlib import Path
from queue import Empty, SimpleQueue
from typing import Any, NamedTuple

from rhymeflow.config import Config
from rhymeflow.runtime.base import News, Received, Resources, Role, WorkerLost
from rhymeflow.runtime.ray import library
from rhymeflow.runtime.ray.actors import ASKED, StoreActor, Whereabouts, WorkerActor
from rhymeflow.store import handle
from rhymeflow.utils.cores import usable_cores
from rhymeflow.workers.entry import Given
from rhymeflow.workers.messages import Sent, Shutdown, decode, encode

CLOSE_SECONDS = 5.0
"""What workers are given to end by themselves when the run is over."""

KILL_SECONDS = 10.0
"""What Ray is given to end one that does not; of one whose node is gone it may never know."""

GROUPS = {"in": 1, "out": 1, ASKED: 1}
"""Threads of an actor for each kind of call."""

Arrived = SimpleQueue[tuple[str, Future[Any] | None]]
"""Names of workers, with what a call of `collect` came to; None: now it is known where it is."""


class Need(NamedTuple):
    """Logical resources of one worker."""

    cpus: int
    gpus: int = 0


def need(role: Role, num_threads: int, config: Config, *, has_gpus: bool) -> Need:
    """What a worker of this role takes. `has_gpus`: whether the run computes on GPUs."""
    match role:
        case "rollout":
            parts = config.rollout.vllm_tensor_parallel_size
            return Need(parts * num_threads, has_gpus * parts)
        case "learner" | "learner_rank":
            return Need(num_threads, int(has_gpus))
    return Need(0)


def least(config: Config, *, has_gpus: bool) -> Need:
    """What a run takes at least: its learner, and all of its first instances."""
    rollout, learner = config.rollout, config.learner
    one = need("rollout", rollout.num_threads or 1, config, has_gpus=has_gpus)
    rank = need("learner", learner.num_threads or 1, config, has_gpus=has_gpus)
    instances, ranks = rollout.num_instances, learner.num_ranks
    return Need(one.cpus * instances + rank.cpus * ranks, one.gpus * instances + rank.gpus * ranks)


class RayRuntime:
    """Actors of one run; a context manager that ends them all. `logs`: on each one's node."""

    def __init__(self, config: Config, run_dir: Path, logs: Path) -> None:
        self._config, self._run_dir, self._logs = config, run_dir.absolute(), logs.absolute()
        self._workers: dict[str, RayWorker] = {}
        self._arrived: Arrived = SimpleQueue()
        self._connection = ExitStack()
        self._namespace = f"rhymeflow-{secrets.token_hex(6)}"
        self._has_gpus = False
        self._ray: Any
        self._ranks: Any = None
        """The placement group of the learner that there is, if it has many ranks."""
        self._num_placed = 0

    def __enter__(self) -> RayRuntime:
        config = self._config
        own = least(config, has_gpus=False).cpus
        connection = library.connected(config.ray.address, num_cpus=max(own, usable_cores()))
        self._ray = self._connection.enter_context(connection)
        total = self._ray.cluster_resources()
        device = config.model.device
        self._has_gpus = device == "cuda" or (device == "auto" and total.get("GPU", 0) > 0)
        self._store = self._start_store()
        return self

    def __exit__(self, *_: object) -> None:
        with self._connection:
            self.close()

    def start(self, role: Role, name: str, resources: Resources) -> RayWorker:
        """Create an actor; see `base.Runtime`."""
        takes = self._need(role, resources)
        log = self._logs / f"{name}.log"
        make = self._ray.remote(
            name=name,
            namespace=self._namespace,
            num_cpus=takes.cpus,
            num_gpus=takes.gpus,
            max_restarts=0,
            max_task_retries=0,
            concurrency_groups=GROUPS,
            scheduling_strategy=self._strategy(role, resources),
        )(WorkerActor)
        config, run_dir = self._config.model_dump_json(), str(self._run_dir)
        given = Given(role, name, config, run_dir, str(log), resources.num_threads)
        worker = RayWorker(name, make.remote(given, self._namespace), log, self._arrived)
        self._workers[name] = worker
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
            elif name in self._workers and said is not None:
                news += self._read(self._workers[name], said)
                is_enough = is_enough or for_any_of is None or name in for_any_of

    def stop(self, name: str, *, patience: float) -> None:
        """End one actor; see `base.Runtime`."""
        worker = self._workers.pop(name)
        self._end([worker], patience)
        if worker.is_heard:
            worker.ended.wait(KILL_SECONDS)

    def close(self) -> None:
        """End all actors."""
        self._end(list(self._workers.values()), CLOSE_SECONDS)
        self._workers.clear()
        self._forget_ranks()
        self._ray.kill(self._store)

    def _end(self, workers: list[RayWorker], seconds: float) -> None:
        for worker in workers:
            worker.send(Shutdown())
            worker.hand_over()
        deadline = time.monotonic() + seconds
        for worker in workers:
            if worker.is_heard:
                worker.ended.wait(max(0.0, deadline - time.monotonic()))
        for worker in workers:
            self._ray.kill(worker.actor, no_restart=True)

    def _need(self, role: Role, resources: Resources) -> Need:
        return need(role, resources.num_threads, self._config, has_gpus=self._has_gpus)

    def _strategy(self, role: Role, resources: Resources) -> Any:
        """Ray's scheduling strategy for a worker. User code may be files of the controller's node,
        so it runs there; a learner's ranks are packed; instances spread."""
        if role in ("reward", "environment"):
            return self._own_node()
        if role in ("learner", "learner_rank") and self._config.learner.num_ranks > 1:
            return self._of_rank(role, resources)
        if resources.node is not None:
            return self._on(resources.node)
        return "SPREAD" if role == "rollout" else "DEFAULT"

    def _own_node(self) -> Any:
        """The strategy of what has to be on the controller's node."""
        return self._on(self._ray.get_runtime_context().get_node_id())

    def _on(self, node: str) -> Any:
        strategies = self._ray.util.scheduling_strategies
        return strategies.NodeAffinitySchedulingStrategy(node, soft=False)

    def _of_rank(self, role: Role, resources: Resources) -> Any:
        """A bundle of the group of all ranks; rank 0, which is started first, makes a new group."""
        if role == "learner":
            self._forget_ranks()
            each = self._need(role, resources)
            bundle = {"CPU": each.cpus} | ({"GPU": each.gpus} if each.gpus else {})
            bundles = [bundle] * self._config.learner.num_ranks
            self._ranks = self._ray.util.placement_group(bundles, strategy="PACK")
            self._num_placed = 0
        self._num_placed += 1
        return self._ray.util.scheduling_strategies.PlacementGroupSchedulingStrategy(
            self._ranks, placement_group_bundle_index=self._num_placed - 1
        )

    def _forget_ranks(self) -> None:
        """Give back what is set aside for the learner's ranks; they are gone."""
        if self._ranks is not None:
            self._ray.util.remove_placement_group(self._ranks)
            self._ranks = None

    def _start_store(self) -> Any:
        """The actor that reads the run's store for workers; Ray starts it anew as often as due."""
        make = self._ray.remote(
            name=handle.STORE,
            namespace=self._namespace,
            num_cpus=0,
            max_restarts=-1,
            max_task_retries=-1,
            concurrency_groups={ASKED: 1},
            scheduling_strategy=self._own_node(),
        )(StoreActor)
        return make.remote(self._namespace)

    def has_room(self, role: Role, resources: Resources) -> bool:
        """Whether a node has room, and nobody waits for it; see `base.Runtime`."""
        if not all(worker.is_placed for worker in self._workers.values()):
            return False
        takes = self._need(role, resources)
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
                wanted = least(self._config, has_gpus=self._has_gpus)
                total = self._ray.cluster_resources()
                reason = (
                    f"{worker.name} found no place for {patience:g} seconds (ray.wait_seconds); "
                    f"the run takes {wanted.cpus} CPUs and {wanted.gpus} GPUs at least, and the "
                    f"cluster has {total.get('CPU', 0):g} and {total.get('GPU', 0):g}"
                )
                news.append(WorkerLost(worker.name, reason))
        return news

    def _lost_its_node(self, worker: RayWorker, error: BaseException | None) -> bool:
        """Ray may not know yet that a node is gone: then its workers cannot be reached, and those
        being placed there are cancelled (the error has no field that says so)."""
        is_out_of_reach = isinstance(error, self._ray.exceptions.ActorUnavailableError)
        if is_out_of_reach or (error is not None and "The actor never ran" in str(error)):
            return True
        alive = {node["NodeID"] for node in self._ray.nodes() if node["Alive"]}
        return worker.node is not None and worker.node not in alive

    def _read(self, worker: RayWorker, said: Future[Any]) -> list[News]:
        """What a call of `collect` brought; go on listening unless the worker is lost."""
        error = said.exception()
        if error is not None and not isinstance(error, self._ray.exceptions.RayError):
            raise error
        if error is not None or said.result() is None:
            how = "ended" if error is None else f"died ({how_it_ended(error)})"
            if with_node := self._lost_its_node(worker, error):
                how = "was lost (its node is gone or out of reach)"
            reason = f"{worker.name} {how}; what it printed is in {worker.log}"
            return [WorkerLost(worker.name, reason, with_node=with_node)]
        worker.listen()
        return [Received(worker.name, decode(message)) for message in said.result()]


class RayWorker:
    """The controller's side of one actor; all that is heard of it comes into `arrived`.

    Messages go with the next `hand_over`, in one call; one call of `collect` is always under way.
    An actor has one thread for each kind of call and is never restarted, and no call is retried, so
    calls of a kind keep their order and none is carried out twice.
    """

    def __init__(self, name: str, actor: Any, log: Path, arrived: Arrived) -> None:
        self.name, self.actor = name, actor
        self._log, self._arrived = log, arrived
        self._sent: list[bytes] = []
        self._deliver = actor.deliver.options(concurrency_group="in")
        self._collect = actor.collect.options(concurrency_group="out")
        self._where: Future[Whereabouts] = actor.where.remote().future()
        self._where.add_done_callback(lambda _: arrived.put((name, None)))
        self.asked_for = time.monotonic()
        self.is_heard = False
        self.ended = threading.Event()
        """It has ended, by itself or by force, or nothing is known of it any more."""

    @property
    def _known(self) -> Whereabouts | None:
        is_known = self._where.done() and self._where.exception() is None
        return self._where.result() if is_known else None

    @property
    def log(self) -> str:
        """The file that has what it prints, and on which machine."""
        return f"{self._log} on {self._known.host if self._known else 'its node'}"

    @property
    def node(self) -> str | None:
        """Ray's id of its node; known before anything is heard of it."""
        return self._known.node if self._known else None

    @property
    def pid(self) -> int:
        """Process id on its node; waits until it runs."""
        return self._where.result().pid

    @property
    def is_placed(self) -> bool:
        """Whether it has a process, or never will have."""
        return self._where.done()

    def send(self, message: Sent) -> None:
        """Send a message with the next `hand_over`; see `base.WorkerHandle`."""
        self._sent.append(encode(message))

    def hand_over(self) -> None:
        """Let what was sent go. All of a turn at once: a call costs a part of a millisecond."""
        if self._sent:
            self._deliver.remote(self._sent)
            self._sent = []

    def listen(self) -> None:
        """Wait for what it says next, in the background."""
        self.is_heard = True
        self._collect.remote().future().add_done_callback(self._take)

    def _take(self, said: Future[Any]) -> None:
        if said.exception() is not None or said.result() is None:
            self.ended.set()
        self._arrived.put((self.name, said))


def how_it_ended(error: BaseException) -> str:
    """The sentence of Ray's message that says why, of the many that say what to do."""
    lines = [line.strip() for line in str(error).splitlines() if line.strip()]
    telling = [line for line in lines if line.startswith(("The actor is dead", "Caused by"))]
    detail = (telling or lines or [type(error).__name__])[-1]
    return detail.partition(". ")[0].rstrip(".")
