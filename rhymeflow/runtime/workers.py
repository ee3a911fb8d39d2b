"""The run's worker processes: the learner, history, and the instances while they come and go.

Holds true: from `with` to its end; an instance that is lost can be replaced by another under a new
name (`rollout-0`, then `rollout-0.1`, ...), on the same cores, `run.instance_restarts` times in
all, and history as often; a replaced one is dead, so it can say nothing any more. Knows nothing of
what workers do.
"""

from __future__ import annotations

from pathlib import Path

from rhymeflow.config import Config
from rhymeflow.core.types import InstanceId
from rhymeflow.runtime.process import Worker, WorkerLost, share_of_cores

PATIENCE = 2.0
"""Seconds a worker is given to end by itself."""


class Workers:
    """Processes by name."""

    def __init__(self, config: Config, run_dir: Path) -> None:
        self._config, self._run_dir = config, run_dir
        self._share = share_of_cores(1 + config.rollout.num_instances)
        self._places: dict[InstanceId, tuple[int, int]] = {}  # index, and how often replaced
        self._restarts_left = config.run.instance_restarts
        self._num_histories = 0
        self.instances: dict[InstanceId, Worker] = {}
        self.learner: Worker
        self.history: Worker | None = None
        """If the run drafts, and it was not lost too often."""

    def __enter__(self) -> Workers:
        learner = self._config.learner
        self.learner = self._start(
            "learner", "rhymeflow.workers.learner", learner.num_threads, learner.cpus
        )
        for index in range(self._config.rollout.num_instances):
            self._start_instance(index, 0)
        if self._config.drafting.window != "off":
            self._start_history()
        return self

    def __exit__(self, *_: object) -> None:
        for worker in self.all():
            worker.stop(PATIENCE)

    def all(self) -> list[Worker]:
        """The learner, the instances and history."""
        history = [] if self.history is None else [self.history]
        return [self.learner, *self.instances.values(), *history]

    def replace(self, name: InstanceId, loss: WorkerLost) -> Worker:
        """Make sure that an instance is dead and start another in its place.

        Raises:
            WorkerLost: `loss`, if as many were replaced as may be.
        """
        if self._restarts_left == 0:
            raise loss
        self._restarts_left -= 1
        self.instances.pop(name).stop(patience=0.0)
        index, replaced = self._places.pop(name)
        return self._start_instance(index, replaced + 1)

    def replace_history(self) -> bool:
        """Make sure that history is dead; start another, if as many were not replaced before."""
        assert self.history is not None
        self.history.stop(patience=0.0)
        self.history = None
        if self._num_histories > self._config.run.instance_restarts:
            return False
        self._start_history()
        return True

    def _start_history(self) -> None:
        name = f"history.{self._num_histories}" if self._num_histories else "history"
        self._num_histories += 1
        self.history = self._start(name, "rhymeflow.workers.history", 1, None)

    def _start_instance(self, index: int, replaced: int) -> Worker:
        rollout = self._config.rollout
        name = f"rollout-{index}.{replaced}" if replaced else f"rollout-{index}"
        cpus = rollout.cpus[index] if rollout.cpus else None
        worker = self._start(name, "rhymeflow.workers.rollout", rollout.num_threads, cpus)
        self.instances[name], self._places[name] = worker, (index, replaced)
        return worker

    def _start(
        self, name: str, entry: str, num_threads: int | None, cpus: tuple[int, ...] | None
    ) -> Worker:
        count = num_threads or (len(cpus) if cpus else self._share)
        return Worker(name, entry, self._config, str(self._run_dir), num_threads=count, cpus=cpus)
