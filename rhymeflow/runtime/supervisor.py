"""The run's workers: starts them, watches over them, and puts others in the place of lost ones.

Holds true:
- a worker that was heard once and is then silent for `run.worker_timeout` seconds is ended and
  reported lost, as one that died is;
- an instance that is lost can be replaced under a new name (`rollout-0`, then `rollout-0.1`, ...),
  on the same cores, `run.instance_restarts` times in all, and so can learner, history and rewards,
  each as often; a replaced one is gone, so it can say nothing any more;
- the ranks of a learner are replaced together, for one alone can do nothing;
- a worker that reports a defect ends the run; without the history worker the run continues, with
  fewer drafts.

Knows nothing of processes (that is the runtime's) or of what workers do.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator

from rhymeflow.config import Config
from rhymeflow.core.types import InstanceId
from rhymeflow.errors import UserError
from rhymeflow.runtime.base import (
    News,
    Received,
    Resources,
    Role,
    Runtime,
    WorkerHandle,
    WorkerLost,
)
from rhymeflow.utils.cores import cores_of_ranks, usable_cores
from rhymeflow.workers.messages import Failed, JoinRanks, RanksMeet


class WorkerDied(RuntimeError):  # noqa: N818 - it is what happened
    """A worker ended by itself, hangs, or has a defect, and the run cannot go on."""


class Supervisor:
    """Workers by role; `start` begins them."""

    def __init__(
        self, config: Config, runtime: Runtime, *, used_names: Iterable[InstanceId] = ()
    ) -> None:
        """`used_names`: of instances of earlier attempts at the run."""
        self._config, self._runtime, self._used = config, runtime, frozenset(used_names)
        self._share = share_of_cores(config.learner.num_ranks + config.rollout.num_instances)
        self._roles: dict[str, Role] = {}
        self._last_heard: dict[str, float] = {}
        self._places: dict[InstanceId, tuple[int, int]] = {}  # index, and how often replaced
        self._restarts_left = config.run.instance_restarts
        self._num_started: dict[Role, int] = {}
        self.instances: dict[InstanceId, WorkerHandle] = {}
        self.learner: WorkerHandle
        self.other_ranks: list[WorkerHandle] = []
        """The learner's ranks from 1 on."""
        self.rewards: WorkerHandle
        self.history: WorkerHandle | None = None
        """If the run drafts, and it was not lost too often."""

    def start(self) -> None:
        """Start every worker of the run. They load while the caller goes on."""
        self._start_learner()
        self.rewards = self._start_another("reward")
        for index in range(self._config.rollout.num_instances):
            self._start_instance(index, self._first_unused(index))
        if self._config.drafting.window != "off":
            self.history = self._start_another("history")

    def role(self, worker: str) -> Role:
        """What a worker does."""
        return self._roles[worker]

    def wait(self, timeout: float, *, for_any_of: Iterable[str] | None = None) -> list[News]:
        """Wait for news, as `Runtime.wait` does."""
        names = None if for_any_of is None else tuple(for_any_of)
        return self._runtime.wait(timeout, for_any_of=names)

    def watch(self, news: Iterable[News], now: float) -> Iterator[News]:
        """Pass on the news of workers that are there, and losses: of the dead and of the silent.

        Raises:
            UserError: a worker says that the user must change something.
            WorkerDied: a worker reports a defect.
        """
        for item in news:
            if item.worker not in self._roles:
                continue  # it was replaced meanwhile
            self._last_heard[item.worker] = now
            match item:
                case Received(message=Failed() as failed):
                    yield self._failure(item.worker, failed)
                case Received(message=RanksMeet(address=address)):
                    del self._last_heard[item.worker]  # loading may take longer than a step
                    for rank, worker in enumerate(self.other_ranks, start=1):
                        worker.send(JoinRanks(rank, address))
                case _:
                    yield item
        limit = self._config.run.worker_timeout
        for name, heard in tuple(self._last_heard.items()):
            if name in self._roles and now - heard > limit:
                yield WorkerLost(
                    name,
                    f"{name} has been silent for {limit:g} seconds (run.worker_timeout): it hangs",
                )

    def replace_instance(self, loss: WorkerLost) -> WorkerHandle:
        """Make sure that a lost instance is gone and start another in its place.

        Raises:
            WorkerDied: as many were replaced as may be.
        """
        if self._restarts_left == 0:
            raise WorkerDied(loss.reason)
        self._restarts_left -= 1
        self._end(loss.worker)
        del self.instances[loss.worker]
        index, replaced = self._places.pop(loss.worker)
        return self._start_instance(index, replaced + 1)

    def replace_learner(self, loss: WorkerLost) -> None:
        """Make sure that the learner, of which a rank was lost, is gone; start another.

        Raises:
            WorkerDied: as many were replaced as may be.
        """
        self._may_replace("learner", loss)
        for worker in (self.learner, *self.other_ranks):
            self._end(worker.name)
        self._start_learner()

    def replace_rewards(self, loss: WorkerLost) -> None:
        """Make sure that the lost reward worker is gone and start another.

        Raises:
            WorkerDied: as many were replaced as may be.
        """
        self._make_way("reward", loss)
        self.rewards = self._start_another("reward")

    def replace_history(self, loss: WorkerLost) -> bool:
        """Make sure that history is gone; start another, if as many were not replaced before."""
        self._end(loss.worker)
        self.history = None
        if self._num_started["history"] > self._config.run.instance_restarts:
            return False
        self.history = self._start_another("history")
        return True

    def _failure(self, name: str, message: Failed) -> WorkerLost:
        """History's failure as a loss; any other ends the run."""
        if self._roles[name] == "history":
            # Of a traceback, what it ends in: its log has it all.
            return WorkerLost(name, f"{name} failed: {message.error.strip().splitlines()[-1]}")
        if message.user_error:
            raise UserError(message.error)
        raise WorkerDied(f"{name} failed:\n{message.error}")

    def _make_way(self, role: Role, loss: WorkerLost) -> None:
        """End the lost one, or the run, if as many were replaced as may be."""
        self._may_replace(role, loss)
        self._end(loss.worker)

    def _may_replace(self, role: Role, loss: WorkerLost) -> None:
        if self._num_started[role] > self._config.run.instance_restarts:
            raise WorkerDied(loss.reason)

    def _end(self, name: str) -> None:
        self._runtime.stop(name, patience=0.0)
        del self._roles[name]
        self._last_heard.pop(name, None)

    def _start_instance(self, index: int, replaced: int) -> WorkerHandle:
        rollout = self._config.rollout
        name = f"rollout-{index}.{replaced}" if replaced else f"rollout-{index}"
        cpus = rollout.cpus[index] if rollout.cpus else None
        worker = self._start("rollout", name, rollout.num_threads, cpus)
        self.instances[name], self._places[name] = worker, (index, replaced)
        return worker

    def _first_unused(self, index: int) -> int:
        """The number after the last that an instance of an earlier attempt had in this place.

        Some numbers may be missing: of instances that died before they had joined.
        """
        parts = (used.partition(".") for used in self._used)
        numbers = (int(number or 0) for name, _, number in parts if name == f"rollout-{index}")
        return max(numbers, default=-1) + 1

    def _start_learner(self) -> None:
        learner = self._config.learner
        cpus = cores_of_ranks(learner.cpus, learner.num_ranks)
        self.learner = self._start_another("learner", learner.num_threads, cpus[0])
        self.other_ranks = [
            self._start(
                "learner_rank", f"{self.learner.name}-rank-{rank}", learner.num_threads, own
            )
            for rank, own in enumerate(cpus[1:], start=1)
        ]

    def _start_another(
        self, role: Role, num_threads: int | None = 1, cpus: tuple[int, ...] | None = None
    ) -> WorkerHandle:
        number = self._num_started.get(role, 0)
        self._num_started[role] = number + 1
        return self._start(role, f"{role}.{number}" if number else role, num_threads, cpus)

    def _start(
        self, role: Role, name: str, num_threads: int | None, cpus: tuple[int, ...] | None
    ) -> WorkerHandle:
        count = num_threads or (len(cpus) if cpus else self._share)
        self._roles[name] = role
        return self._runtime.start(role, name, Resources(count, cpus))


def share_of_cores(num_workers: int) -> int:
    """Threads for each of `num_workers` that compute at once on the cores this process may use."""
    return max(1, usable_cores() // num_workers)
