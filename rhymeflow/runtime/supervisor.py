"""Starts the run's workers, watches them, and replaces lost ones.

A worker that sends nothing or makes no progress for `run.worker_timeout` seconds is lost, like one
that died. A worker that reports a defect ends the run, except a history worker, which costs drafts.
"""

from __future__ import annotations

from collections import Counter, defaultdict, deque
from collections.abc import Collection, Iterable, Iterator
from dataclasses import dataclass
from itertools import count
from operator import itemgetter

from rhymeflow.config import Config
from rhymeflow.core.types import InstanceId
from rhymeflow.errors import RunError, UserError
from rhymeflow.placement import share_of_cores
from rhymeflow.runtime.base import (
    News,
    Received,
    Resources,
    Role,
    Runtime,
    WorkerHandle,
    WorkerLost,
)
from rhymeflow.suites.suite import uses_environments
from rhymeflow.utils.cores import cores_of_ranks
from rhymeflow.workers.messages import Alive, Failed, JoinRanks, RanksMeet

RESTARTS_WITHIN = 3600.0
"""Seconds in which `run.instance_restarts` are counted: on many machines something always dies in
the end, but what is wrong with a run itself kills its workers one soon after another."""


class WorkerDied(RunError):  # noqa: N818
    """A worker ended by itself, hangs, or has a defect, and the run cannot continue."""


@dataclass(slots=True)
class _Worker:
    """A running worker, with the times of its last messages, in seconds."""

    role: Role
    handle: WorkerHandle
    heard: float | None = None
    """When it last sent a message; None: it is not placed yet, so it is not watched."""
    advanced: float = 0.0  # when it last made progress
    progress: int = -1  # as it last reported


class Supervisor:
    """The workers of a run; `start` starts them."""

    def __init__(
        self, config: Config, runtime: Runtime, *, used_names: Iterable[InstanceId] = ()
    ) -> None:
        """`used_names`: names of instances of earlier attempts at the run."""
        self._config, self._runtime = config, runtime
        # A cluster's nodes say how many cores they have.
        self._share = share_of_cores(config) if config.runtime == "local" else None
        self._workers: dict[str, _Worker] = {}
        self._num_started: Counter[str] = Counter()
        """Workers started, by name without number; instances of earlier attempts count too."""
        for name in used_names:
            stem, _, number = name.partition(".")
            self._num_started[stem] = max(self._num_started[stem], int(number or 0) + 1)
        self._replaced: dict[str, deque[float]] = defaultdict(deque)
        self._now = 0.0
        self.instances: dict[InstanceId, WorkerHandle] = {}
        self.ranks: list[WorkerHandle] = []  # the learner's ranks; only rank 0 answers
        self.rewards: WorkerHandle
        self.environments: WorkerHandle  # set if responses have turns

    def start(self) -> None:
        """Start every worker of the run; does not wait until they have loaded."""
        self._start_learner()
        self.rewards = self.start_another("reward")
        if uses_environments(self._config):
            self.environments = self.start_another("environment")
        for place in range(self._config.rollout.num_instances):
            self._start_instance(place)

    @property
    def learner(self) -> WorkerHandle:
        """The learner's rank 0."""
        return self.ranks[0]

    def role(self, worker: str) -> Role:
        """Return a worker's role."""
        return self._workers[worker].role

    def wait(self, timeout: float, *, for_any_of: Collection[str] | None = None) -> list[News]:
        """Wait for news, as `Runtime.wait` does."""
        return self._runtime.wait(timeout, for_any_of=for_any_of)

    def watch(self, news: Iterable[News], now: float) -> Iterator[News]:
        """Yield the news of running workers but heartbeats, and losses of those that died or hang.

        Raises:
            UserError, WorkerDied: a worker reports a user's mistake, or a defect."""
        self._now = now
        for worker in self._workers.values():
            if worker.heard is None and worker.handle.node is not None:
                worker.heard = worker.advanced = now
        for item in news:
            if (sender := self._workers.get(item.worker)) is None:
                continue  # it has been replaced
            sender.heard = now
            if isinstance(item, Received) and isinstance(item.message, Alive):
                if item.message.progress != sender.progress:
                    sender.progress, sender.advanced = item.message.progress, now
                continue
            sender.advanced = now  # any other message is progress
            match item:
                case Received(message=Failed() as failed):
                    yield self._failure(item.worker, failed)
                case Received(message=RanksMeet(address=address)):
                    for rank, handle in enumerate(self.ranks[1:], start=1):
                        handle.send(JoinRanks(rank, address))
                case _:
                    yield item
        yield from self._hanging(now)

    def _hanging(self, now: float) -> Iterator[WorkerLost]:
        """Yield the workers that hang, the longest silent first: other ranks only wait for it."""
        limit = self._config.run.worker_timeout
        times = [(w.heard, w.advanced, n) for n, w in self._workers.items() if w.heard is not None]
        for heard, advanced, name in sorted(times, key=itemgetter(0)):
            is_silent = now - heard > limit
            # The caller may have ended a worker because of an earlier loss.
            if name in self._workers and (is_silent or now - advanced > limit):
                what = "been silent" if is_silent else "made no progress"
                yield WorkerLost(
                    name, f"{name} has {what} for {limit:g} seconds (run.worker_timeout): it hangs"
                )

    def may_replace(self, what: str) -> bool:
        """Count a worker of this kind that was lost; return whether `run.instance_restarts` lets
        another take its place."""
        times = self._replaced[what]
        while times and times[0] <= self._now - RESTARTS_WITHIN:
            times.popleft()
        times.append(self._now)
        return len(times) <= self._config.run.instance_restarts

    def replace_instance(self, loss: WorkerLost) -> WorkerHandle | None:
        """End a lost instance and start another in its place; return None if there are enough.
        Raises `WorkerDied` after too many losses, not counting those of nodes."""
        if not loss.with_node and not self.may_replace("rollout"):
            raise WorkerDied(loss.reason)
        self.end(loss.worker)
        del self.instances[loss.worker]
        if len(self.instances) >= self._config.rollout.num_instances:
            return None
        return self._start_instance(_place(loss.worker))

    def grow(self) -> WorkerHandle | None:
        """Start one more instance, if the configuration allows it and the runtime has room."""
        rollout = self._config.rollout
        if len(self.instances) >= (rollout.max_instances or rollout.num_instances):
            return None
        resources = Resources(rollout.num_threads or self._share)
        if not self._runtime.has_room("rollout", resources):
            return None
        taken = set(map(_place, self.instances))
        return self._start_instance(next(place for place in count() if place not in taken))

    def replace(self, loss: WorkerLost) -> WorkerHandle:
        """End a lost worker that is no instance, or with one rank all ranks, and start another.
        Raises `WorkerDied` after too many losses of its role."""
        role = self.role(loss.worker)
        if role == "learner_rank":
            role = "learner"
        if not self.may_replace(role):
            raise WorkerDied(loss.reason)
        if role in ("learner", "policy"):
            for worker in self.ranks:
                self.end(worker.name)
            self._start_learner()
            return self.learner
        self.end(loss.worker)
        another = self.start_another(role)
        if role == "reward":
            self.rewards = another
        else:
            self.environments = another
        return another

    def end(self, name: str) -> None:
        """End a worker; it is gone when this returns."""
        self._runtime.stop(name, patience=0.0)
        del self._workers[name]

    def _failure(self, name: str, message: Failed) -> WorkerLost:
        """Return a history worker's failure as a loss; raise any other, which ends the run."""
        if message.user_error:
            raise UserError(message.error)
        if self.role(name) == "history":
            # The last line of the traceback; the worker's log has the rest.
            return WorkerLost(name, f"{name} failed: {message.error.strip().splitlines()[-1]}")
        raise WorkerDied(f"{name} failed:\n{message.error}")

    def _start_instance(self, place: int) -> WorkerHandle:
        rollout = self._config.rollout
        cpus = rollout.cpus[place] if rollout.cpus else None
        threads, stem = rollout.num_threads, f"rollout-{place}"
        worker = self.start_another("rollout", stem, threads, cpus, number=place)
        self.instances[worker.name] = worker
        return worker

    def _start_learner(self) -> None:
        learner = self._config.learner
        if not learner.is_used:
            self.ranks = [self.start_another("policy")]
            return
        own, *others = cores_of_ranks(learner.cpus, learner.num_ranks)
        first = self.start_another("learner", None, learner.num_threads, own)
        self.ranks = [first]
        for rank, cpus in enumerate(others, start=1):
            name = f"{first.name}-rank-{rank}"
            threads = learner.num_threads
            another = self.start_another("learner_rank", name, threads, cpus, number=rank)
            self.ranks.append(another)

    def start_another(
        self,
        role: Role,
        stem: str | None = None,
        num_threads: int | None = 1,
        cpus: tuple[int, ...] | None = None,
        *,
        node: str | None = None,
        number: int = 0,
    ) -> WorkerHandle:
        """Start a worker named `stem`, or after its role, with a suffix if that name was used;
        `number` as in `Resources`."""
        stem = stem or role
        times = self._num_started[stem]
        self._num_started[stem] += 1
        name = f"{stem}.{times}" if times else stem
        threads = num_threads or (len(cpus) if cpus else self._share)
        resources = Resources(threads, cpus, node, number)
        handle = self._runtime.start(role, name, resources)
        self._workers[name] = _Worker(role, handle)
        return handle


def _place(instance: InstanceId) -> int:
    """Return an instance's place in the fleet: its number, which its replacement takes over."""
    return int(instance.removeprefix("rollout-").partition(".")[0])
