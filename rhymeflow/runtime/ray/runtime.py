"""The runtime of a Ray cluster: every worker is an actor, whose calls carry its messages.

The controller is the driver, so actors end with it. Ray restarts no worker: one that died or cannot
be reached is lost, and its later messages are dropped. An instance or a rank of the learner takes
one CPU for each thread and its GPUs, all on one node; other workers take nothing."""

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
from rhymeflow.runtime.ray.actors import ASKED, Placement, StoreActor, WorkerActor
from rhymeflow.store import handle
from rhymeflow.utils.cores import usable_cores
from rhymeflow.workers.entry import WorkerSetup
from rhymeflow.workers.messages import AnyMessage, Shutdown, decode, encode

CLOSE_SECONDS = 5.0  # time that workers have to end by themselves when the run is over

KILL_SECONDS = 10.0
"""Time that Ray has to kill one that does not; if its node is gone, Ray may never know its end."""

CALL_THREADS = {"in": 1, "out": 1, ASKED: 1}  # threads of an actor by concurrency group

Arrivals = SimpleQueue[tuple[str, Future[Any] | None]]
"""Names of workers, each with the result of a `collect`; None: the worker has been placed."""


class Need(NamedTuple):
    """Ray's logical resources for a worker, or for several."""

    cpus: int
    gpus: int = 0


def need(role: Role, num_threads: int, config: Config, *, has_gpus: bool) -> Need:
    """Return what a worker of this role needs. `has_gpus`: whether the run computes on GPUs."""
    match role:
        case "rollout":
            num_shards = config.rollout.vllm_tensor_parallel_size
            return Need(num_shards * num_threads, has_gpus * num_shards)
        case "learner" | "learner_rank":
            return Need(num_threads, int(has_gpus))
    return Need(0)


def least(config: Config, num_threads: int, *, has_gpus: bool) -> Need:
    """Return the least that a run needs: for its learner and its `rollout.num_instances`, with
    `num_threads` where the configuration does not say it."""
    rollout, learner = config.rollout, config.learner
    one = need("rollout", rollout.num_threads or num_threads, config, has_gpus=has_gpus)
    rank = need("learner", learner.num_threads or num_threads, config, has_gpus=has_gpus)
    instances, ranks = rollout.num_instances, learner.num_ranks
    return Need(one.cpus * instances + rank.cpus * ranks, one.gpus * instances + rank.gpus * ranks)


class RayRuntime:
    """Actors of one run; a context manager that ends them all. `logs` is a path on their nodes."""

    def __init__(self, config: Config, run_dir: Path, logs: Path) -> None:
        self._config, self._run_dir, self._logs = config, run_dir.absolute(), logs.absolute()
        self._workers: dict[str, RayWorker] = {}
        self._arrived: Arrivals = SimpleQueue()
        self._connection = ExitStack()
        self._namespace = f"rhymeflow-{secrets.token_hex(6)}"
        self._has_gpus, self._num_threads = False, 1
        self._ray: Any
        self._placement_group: Any = None
        """The placement group of the current learner, if it has several ranks."""
        self._ranks_have_places: Any = None
        """A reference that Ray resolves once that group has its nodes."""

    def __enter__(self) -> RayRuntime:
        config = self._config
        own = least(config, 1, has_gpus=False).cpus
        connection = library.connected(config.ray.address, num_cpus=max(own, usable_cores()))
        self._ray = self._connection.enter_context(connection)
        total = self._ray.cluster_resources()
        device = config.model.device
        self._has_gpus = device == "cuda" or (device == "auto" and total.get("GPU", 0) > 0)
        if self._has_gpus:
            self._num_threads = library.cores_of_gpu(self._ray)
        self._store = self._start_store()
        return self

    def __exit__(self, *_: object) -> None:
        with self._connection:
            self.close()

    def start(self, role: Role, name: str, resources: Resources) -> RayWorker:
        """Create an actor; see `base.Runtime`."""
        needed = self._need(role, resources)
        log = self._logs / f"{name}.log"
        make = self._ray.remote(
            name=name,
            namespace=self._namespace,
            num_cpus=needed.cpus,
            num_gpus=needed.gpus,
            max_restarts=0,
            max_task_retries=0,
            concurrency_groups=CALL_THREADS,
            scheduling_strategy=self._strategy(role, resources),
        )(WorkerActor)
        config, run_dir = self._config.model_dump_json(), str(self._run_dir)
        num_threads = resources.num_threads or self._num_threads
        setup = WorkerSetup(role, name, config, run_dir, str(log), num_threads)
        # Ray starts an actor when its arguments are there. Instances that came first might leave no
        # node with room for all ranks.
        first = self._ranks_have_places if role == "rollout" else None
        worker = RayWorker(name, make.remote(setup, self._namespace, first), log, self._arrived)
        self._workers[name] = worker
        return worker

    def wait(self, timeout: float, *, for_any_of: Collection[str] | None = None) -> list[News]:
        """Hand over sent messages and take what has arrived; see `base.Runtime`."""
        for worker in self._workers.values():
            worker.hand_over()
        deadline = time.monotonic() + timeout
        news: list[News] = self._unplaced()
        is_enough = bool(news)
        while True:
            rest = 0.0 if is_enough else max(0.0, deadline - time.monotonic())
            try:
                name, result = self._arrived.get(block=rest > 0, timeout=rest)
            except Empty:
                return news
            if name in self._workers and result is None:
                self._workers[name].listen()
            elif name in self._workers and result is not None:
                news += self._read(self._workers[name], result)
                is_enough = is_enough or for_any_of is None or name in for_any_of

    def stop(self, name: str, *, patience: float) -> None:
        """End one actor; see `base.Runtime`."""
        worker = self._workers.pop(name)
        self._end([worker], patience)
        if worker.is_listening:
            worker.ended.wait(KILL_SECONDS)

    def close(self) -> None:
        """End all actors."""
        self._end(list(self._workers.values()), CLOSE_SECONDS)
        self._workers.clear()
        self._remove_placement_group()
        self._ray.kill(self._store)

    def _end(self, workers: list[RayWorker], seconds: float) -> None:
        for worker in workers:
            worker.send(Shutdown())
            worker.hand_over()
        deadline = time.monotonic() + seconds
        for worker in workers:
            if worker.is_listening:
                worker.ended.wait(max(0.0, deadline - time.monotonic()))
        for worker in workers:
            self._ray.kill(worker.actor, no_restart=True)

    def _need(self, role: Role, resources: Resources) -> Need:
        num_threads = resources.num_threads or self._num_threads
        return need(role, num_threads, self._config, has_gpus=self._has_gpus)

    def _strategy(self, role: Role, resources: Resources) -> Any:
        """Return Ray's scheduling strategy for a worker. User code runs on the controller's node,
        whose files it may need; the learner's ranks are packed; instances are spread."""
        if role in ("reward", "environment"):
            return self._controller_node()
        if role in ("learner", "learner_rank") and self._config.learner.num_ranks > 1:
            return self._rank_strategy(role, resources)
        if resources.node is not None:
            return self._node_strategy(resources.node)
        return "SPREAD" if role == "rollout" else "DEFAULT"

    def _controller_node(self) -> Any:
        return self._node_strategy(self._ray.get_runtime_context().get_node_id())

    def _node_strategy(self, node: str) -> Any:
        strategies = self._ray.util.scheduling_strategies
        return strategies.NodeAffinitySchedulingStrategy(node, soft=False)

    def _rank_strategy(self, role: Role, resources: Resources) -> Any:
        """Return a rank's strategy: a bundle of the placement group, which rank 0 creates first."""
        if role == "learner":
            self._remove_placement_group()
            needed = self._need(role, resources)
            bundle = {"CPU": needed.cpus} | ({"GPU": needed.gpus} if needed.gpus else {})
            bundles = [bundle] * self._config.learner.num_ranks
            self._placement_group = self._ray.util.placement_group(bundles, strategy="PACK")
            self._ranks_have_places = self._placement_group.ready()
        return self._ray.util.scheduling_strategies.PlacementGroupSchedulingStrategy(
            self._placement_group, placement_group_bundle_index=resources.number
        )

    def _remove_placement_group(self) -> None:
        if self._placement_group is not None:
            self._ray.util.remove_placement_group(self._placement_group)
            self._placement_group = None

    def _start_store(self) -> Any:
        """Start the actor that reads the run's store for workers; Ray restarts it as needed."""
        make = self._ray.remote(
            name=handle.STORE,
            namespace=self._namespace,
            num_cpus=0,
            max_restarts=-1,
            max_task_retries=-1,
            concurrency_groups={ASKED: 1},
            scheduling_strategy=self._controller_node(),
        )(StoreActor)
        return make.remote(self._namespace)

    def has_room(self, role: Role, resources: Resources) -> bool:
        """Whether a node has room and no worker waits for a place; see `base.Runtime`."""
        if not all(worker.is_placed for worker in self._workers.values()):
            return False
        needed = self._need(role, resources)
        free = self._ray._private.state.available_resources_per_node().values()
        return any(
            node.get("CPU", 0) >= needed.cpus and node.get("GPU", 0) >= needed.gpus for node in free
        )

    def _unplaced(self) -> list[News]:
        """Report workers as lost that have waited for a place too long."""
        patience, now = self._config.ray.wait_seconds, time.monotonic()
        news: list[News] = []
        for worker in self._workers.values():
            if not worker.is_placed and now - worker.requested_at > patience:
                worker.requested_at = math.inf  # report it once
                wanted = least(self._config, self._num_threads, has_gpus=self._has_gpus)
                total = self._ray.cluster_resources()
                reason = (
                    f"{worker.name} found no place for {patience:g} seconds (ray.wait_seconds); "
                    f"the run takes {wanted.cpus} CPUs and {wanted.gpus} GPUs at least, and the "
                    f"cluster has {total.get('CPU', 0):g} and {total.get('GPU', 0):g}"
                )
                news.append(WorkerLost(worker.name, reason))
        return news

    def _is_node_lost(self, worker: RayWorker, error: BaseException | None) -> bool:
        """Whether a worker's node is gone. Before Ray knows that, workers there are unavailable and
        those being placed are cancelled, which only the text of the error says."""
        is_out_of_reach = isinstance(error, self._ray.exceptions.ActorUnavailableError)
        if is_out_of_reach or (error is not None and "The actor never ran" in str(error)):
            return True
        alive = {node["NodeID"] for node in self._ray.nodes() if node["Alive"]}
        return worker.node is not None and worker.node not in alive

    def _read(self, worker: RayWorker, result: Future[Any]) -> list[News]:
        """Return the news of a `collect`, and start the next one unless the worker is lost."""
        error = result.exception()
        if error is not None and not isinstance(error, self._ray.exceptions.RayError):
            raise error
        if error is not None or result.result() is None:
            how = "ended" if error is None else f"died ({cause_of_death(error)})"
            if with_node := self._is_node_lost(worker, error):
                how = "was lost (its node is gone or out of reach)"
            reason = f"{worker.name} {how}; what it printed is in {worker.log}"
            return [WorkerLost(worker.name, reason, with_node=with_node)]
        worker.listen()
        return [Received(worker.name, decode(message)) for message in result.result()]


class RayWorker:
    """The controller's side of one actor, whose news are put into `arrived`.

    The next `hand_over` sends all messages in one call; one call of `collect` is always under way.
    An actor has one thread for each kind of call and is never restarted, and no call is retried, so
    calls of a kind keep their order and none runs twice."""

    def __init__(self, name: str, actor: Any, log: Path, arrived: Arrivals) -> None:
        self.name, self.actor = name, actor
        self._log, self._arrived = log, arrived
        self._sent: list[bytes] = []
        self._deliver = actor.deliver.options(concurrency_group="in")
        self._collect = actor.collect.options(concurrency_group="out")
        self._placed: Future[Placement] = actor.placement.remote().future()
        self._placed.add_done_callback(lambda _: arrived.put((name, None)))
        self.requested_at = time.monotonic()
        self.is_listening = False
        self.ended = threading.Event()
        """Set when it has ended or been killed, or can no longer be reached."""

    @property
    def _placement(self) -> Placement | None:
        has_place = self._placed.done() and self._placed.exception() is None
        return self._placed.result() if has_place else None

    @property
    def log(self) -> str:
        """The file of its output, and its machine."""
        return f"{self._log} on {self._placement.host if self._placement else 'its node'}"

    @property
    def node(self) -> str | None:
        """Ray's id of its node, which is known before its first message."""
        return self._placement.node if self._placement else None

    @property
    def pid(self) -> int:
        """Process id on its node; waits until it runs."""
        return self._placed.result().pid

    @property
    def is_placed(self) -> bool:
        """Whether it has a process, or will never have one."""
        return self._placed.done()

    def send(self, message: AnyMessage) -> None:
        """Send a message with the next `hand_over`; see `base.WorkerHandle`."""
        self._sent.append(encode(message))

    def hand_over(self) -> None:
        """Deliver sent messages, all in one call since each call costs part of a millisecond."""
        if self._sent:
            self._deliver.remote(self._sent)
            self._sent = []

    def listen(self) -> None:
        """Collect its next messages in the background."""
        self.is_listening = True
        self._collect.remote().future().add_done_callback(self._take)

    def _take(self, result: Future[Any]) -> None:
        if result.exception() is not None or result.result() is None:
            self.ended.set()
        self._arrived.put((self.name, result))


def cause_of_death(error: BaseException) -> str:
    """Return the sentence of Ray's message that gives the cause; the others give advice."""
    lines = [line.strip() for line in str(error).splitlines() if line.strip()]
    telling = [line for line in lines if line.startswith(("The actor is dead", "Caused by"))]
    detail = (telling or lines or [type(error).__name__])[-1]
    return detail.partition(". ")[0].rstrip(".")
