"""The run's workers: starts them, watches over them, and puts others in the place of lost ones.

A worker that is silent for `run.worker_timeout` seconds, or whose work stands still for so long, is
ended and reported lost, as one that died is. It is replaced under a new name, so it can say nothing
any more; the ranks of a learner together. A worker that reports a defect ends the run, but for
history, without which it drafts less.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable, Iterator
from dataclasses import dataclass
from itertools import count

from rhymeflow.config import Config
from rhymeflow.core.types import InstanceId
from rhymeflow.errors import RunError, UserError
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
from rhymeflow.utils.cores import cores_of_ranks, usable_cores
from rhymeflow.workers.messages import Alive, Failed, JoinRanks, RanksMeet


class WorkerDied(RunError):  # noqa: N818 - it is what happened
    """A worker ended by itself, hangs, or has a defect, and the run cannot go on."""


@dataclass
class _Signs:
    """Of a worker: when it was heard last, when its work advanced, and to what."""

    heard: float
    advanced: float
    progress: int = -1


class Supervisor:
    """Workers by role; `start` begins them."""

    def __init__(
        self, config: Config, runtime: Runtime, *, used_names: Iterable[InstanceId] = ()
    ) -> None:
        """`used_names`: of instances of earlier attempts at the run."""
        self._config, self._runtime = config, runtime
        self._share = share_of_cores(num_computing(config))
        self._roles: dict[str, Role] = {}
        self._workers: dict[str, WorkerHandle] = {}
        self._signs: dict[str, _Signs] = {}
        """Of those that are watched."""
        self._places: dict[InstanceId, int] = {}
        """The place of each instance; another in the same place has another name."""
        self._last_number: dict[int, int] = {}
        """Of the last instance in each place, if it is known: of one that died before it had joined
        nobody has heard."""
        for name in used_names:
            place, _, number = name.removeprefix("rollout-").partition(".")
            last = self._last_number.get(int(place), 0)
            self._last_number[int(place)] = max(last, int(number or 0))
        self._restarts_left = config.run.instance_restarts
        self._num_started: dict[Role, int] = {}
        self.instances: dict[InstanceId, WorkerHandle] = {}
        self.ranks: list[WorkerHandle] = []
        """The learner's; rank 0 answers."""
        self.rewards: WorkerHandle
        self.environments: WorkerHandle
        """If responses have turns."""

    def start(self) -> None:
        """Start every worker of the run. They load while the caller goes on."""
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
        """What a worker does."""
        return self._roles[worker]

    def wait(self, timeout: float, *, for_any_of: Collection[str] | None = None) -> list[News]:
        """Wait for news, as `Runtime.wait` does."""
        return self._runtime.wait(timeout, for_any_of=for_any_of)

    def watch(self, news: Iterable[News], now: float) -> Iterator[News]:
        """Pass on news of workers that are there, and losses: of the dead and of the silent.

        Raises:
            UserError: a worker says that the user must change something.
            WorkerDied: a worker reports a defect.
        """
        for name, handle in self._workers.items():
            if name not in self._signs and handle.node is not None:
                self._signs[name] = _Signs(now, now)
        for item in news:
            if item.worker not in self._roles:
                continue  # it was replaced meanwhile
            signs = self._signs.setdefault(item.worker, _Signs(now, now))
            signs.heard = now
            if isinstance(item, Received) and isinstance(item.message, Alive):
                if item.message.progress != signs.progress:
                    signs.progress, signs.advanced = item.message.progress, now
                continue
            signs.advanced = now  # who says anything else has worked
            match item:
                case Received(message=Failed() as failed):
                    yield self._failure(item.worker, failed)
                case Received(message=RanksMeet(address=address)):
                    for rank, worker in enumerate(self.ranks[1:], start=1):
                        worker.send(JoinRanks(rank, address))
                case _:
                    yield item
        yield from self._hanging(now)

    def _hanging(self, now: float) -> Iterator[WorkerLost]:
        """Who was not heard for longest comes first: other ranks stand still because of it."""
        limit = self._config.run.worker_timeout
        for name, signs in sorted(self._signs.items(), key=lambda item: item[1].heard):
            is_silent = now - signs.heard > limit
            if name in self._roles and (is_silent or now - signs.advanced > limit):
                what = "been silent" if is_silent else "made no progress"
                yield WorkerLost(
                    name, f"{name} has {what} for {limit:g} seconds (run.worker_timeout): it hangs"
                )

    def replace_instance(self, loss: WorkerLost) -> WorkerHandle | None:
        """Make sure that a lost instance is gone and start another in its place.

        None: there are enough without it, until `grow` finds room.

        Raises:
            WorkerDied: as many were replaced as may be; those that went with their node do not
                count.
        """
        if not loss.with_node:
            if self._restarts_left == 0:
                raise WorkerDied(loss.reason)
            self._restarts_left -= 1
        self.end(loss.worker)
        del self.instances[loss.worker]
        place = self._places.pop(loss.worker)
        if len(self.instances) >= self._config.rollout.num_instances:
            return None
        return self._start_instance(place)

    def grow(self) -> WorkerHandle | None:
        """Start one more instance, if there may be more and the runtime has room."""
        rollout = self._config.rollout
        if len(self.instances) >= (rollout.max_instances or rollout.num_instances):
            return None
        resources = Resources(rollout.num_threads or self._share)
        if not self._runtime.has_room("rollout", resources):
            return None
        taken = set(self._places.values())
        return self._start_instance(next(place for place in count() if place not in taken))

    def replace(self, loss: WorkerLost) -> WorkerHandle:
        """Make sure that the lost learner, of which it may be a rank, or reward or environment
        worker is gone; start another.

        Raises:
            WorkerDied: as many were replaced as may be.
        """
        role = self.role(loss.worker)
        if role == "learner_rank":
            role = "learner"
        if self._num_started[role] > self._config.run.instance_restarts:
            raise WorkerDied(loss.reason)
        if role in ("learner", "policy"):
            for worker in self.ranks:
                self.end(worker.name)
            self._start_learner()
            return self.learner
        self.end(loss.worker)
        if role == "reward":
            self.rewards = self.start_another("reward")
            return self.rewards
        self.environments = self.start_another("environment")
        return self.environments

    def end(self, name: str) -> None:
        """Make sure that a worker is gone."""
        self._runtime.stop(name, patience=0.0)
        del self._roles[name], self._workers[name]
        self._signs.pop(name, None)

    def _failure(self, name: str, message: Failed) -> WorkerLost:
        """A defect of history as a loss; any other failure ends the run."""
        if message.user_error:
            raise UserError(message.error)
        if self._roles[name] == "history":
            # Of a traceback, what it ends in: its log has it all.
            return WorkerLost(name, f"{name} failed: {message.error.strip().splitlines()[-1]}")
        raise WorkerDied(f"{name} failed:\n{message.error}")

    def _start_instance(self, place: int) -> WorkerHandle:
        number = self._last_number.get(place, -1) + 1
        self._last_number[place] = number
        name = f"rollout-{place}.{number}" if number else f"rollout-{place}"
        rollout = self._config.rollout
        cpus = rollout.cpus[place] if rollout.cpus else None
        worker = self._start("rollout", name, rollout.num_threads, cpus)
        self.instances[name], self._places[name] = worker, place
        return worker

    def _start_learner(self) -> None:
        learner = self._config.learner
        if not learner.is_used:
            self.ranks = [self.start_another("policy")]
            return
        cpus = cores_of_ranks(learner.cpus, learner.num_ranks)
        first = self.start_another("learner", learner.num_threads, cpus[0])
        self.ranks = [first]
        for rank, own in enumerate(cpus[1:], start=1):
            name = f"{first.name}-rank-{rank}"
            self.ranks.append(self._start("learner_rank", name, learner.num_threads, own))

    def start_another(
        self,
        role: Role,
        num_threads: int | None = 1,
        cpus: tuple[int, ...] | None = None,
        node: str | None = None,
    ) -> WorkerHandle:
        """Start a worker of this role, perhaps after others."""
        number = self._num_started.get(role, 0)
        self._num_started[role] = number + 1
        name = f"{role}.{number}" if number else role
        return self._start(role, name, num_threads, cpus, node)

    def _start(
        self,
        role: Role,
        name: str,
        num_threads: int | None,
        cpus: tuple[int, ...] | None,
        node: str | None = None,
    ) -> WorkerHandle:
        resources = Resources(num_threads or (len(cpus) if cpus else self._share), cpus, node)
        self._roles[name] = role
        self._workers[name] = self._runtime.start(role, name, resources)
        return self._workers[name]


def num_computing(config: Config) -> int:
    """Workers that compute at once."""
    ranks = config.learner.num_ranks if config.learner.is_used else 0
    return ranks + config.rollout.num_instances


def share_of_cores(num_workers: int) -> int:
    """Threads for each of `num_workers` that compute at once on the cores this process may use."""
    return max(1, usable_cores() // num_workers)
