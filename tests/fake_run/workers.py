"""The workers of a fake run: the product's, with fake models, turn by turn.

A worker dies between two messages that it sends, and loses all but these and what is on the disk.
"""

import shutil
from collections import deque
from collections.abc import Collection, Hashable
from itertools import chain
from pathlib import Path

from rhymeflow.config import Config
from rhymeflow.core.events import LearnerReady
from rhymeflow.core.types import Version
from rhymeflow.engine.base import EngineLimits
from rhymeflow.learner.checkpoint import Saved
from rhymeflow.reward.calls import FunctionRewards, RewardTask
from rhymeflow.reward.components import component_names
from rhymeflow.store.checkpoint_dirs import CHECKPOINTS, CheckpointPlace
from rhymeflow.store.reader import TrajectoryReader
from rhymeflow.suites.suite import reward_sections
from rhymeflow.weights.base import SharedMemoryWeightHandle
from rhymeflow.weights.proof import as_text
from rhymeflow.workers.channel import Channel
from rhymeflow.workers.learner import LearnerProcess
from rhymeflow.workers.messages import ConnectWeights, Envelope, send
from rhymeflow.workers.messages import LoadedModel as LoadedModel
from rhymeflow.workers.reward import RewardWorker
from rhymeflow.workers.rollout import RolloutInstance
from tests.fake_run import models
from tests.fake_run.world import World

MAX_LENGTH = 64
BROKEN = 20
"""The gradient of one step in so many is not finite: the same ones, whoever computes them."""
LONG_AGO = -1e9  # when a sign of life was given last: one is due


class FakeLearner(LearnerProcess):
    """A learner of a `models.Model`; `shared` has what learners publish, by name."""

    def __init__(
        self,
        connection: Channel,
        name: str,
        config: Config,
        run_dir: Path,
        shared: dict[str, models.Weights],
        world: World,
    ) -> None:
        self.connection, self.config, self._world = connection, config, world
        self.learner = models.Model()
        place = CheckpointPlace(run_dir / CHECKPOINTS)
        self._saver = FakeSaver(place, world)
        self._reader = TrajectoryReader(run_dir / "events.db")
        self._restore(place)
        self.learner.breaks = self._breaks
        self.weights = shared[name] = models.Weights()
        checksum = as_text(self.weights.publish(self.version, self.learner.rows()))
        handle = SharedMemoryWeightHandle(name, ())
        send(
            connection,
            Envelope(
                LearnerReady(self.version, checksum),
                LoadedModel(handle, "cpu", "float32", MAX_LENGTH, 1),
            ),
        )

    def _breaks(self, digest: int) -> bool:
        is_broken = digest % BROKEN == 0
        self._world.counts["gradient not finite"] += is_broken
        return is_broken

    def close(self) -> None:
        self._reader.close()


class FakeSaver:
    """Stands for `learner.checkpoint.Saver`: a checkpoint is complete some turns later."""

    COMPLETED = 0.5  # probability that one is complete when it is asked for

    def __init__(self, place: CheckpointPlace, world: World) -> None:
        self._place, self._world = place, world
        self._pending: deque[tuple[Version, str, Collection[Version]]] = deque()

    @property
    def is_busy(self) -> bool:
        return bool(self._pending)

    def begin(self, version: Version, snapshot: str, keep: Collection[Version]) -> None:
        self._place.at(version).files.mkdir(parents=True, exist_ok=True)
        self._pending.append((version, snapshot, keep))

    def ended(self) -> list[Saved]:
        found = []
        while self._pending and self._world.chance(self.COMPLETED):
            version, snapshot, keep = self._pending.popleft()
            saved = self._place.at(version)
            saved.files.mkdir(parents=True, exist_ok=True)
            (saved.files / models.STATE_FILE).write_text(snapshot, encoding="utf-8")
            shutil.rmtree(str(saved), ignore_errors=True)
            saved.files.rename(str(saved))
            found.append(Saved(version, str(saved), None))
            if not self._world.chance(0.1):  # else as if it had died meanwhile
                self._place.remove_others({version, *keep})
        return found


class FakeInstance(RolloutInstance):
    """An instance with a `models.Engine`."""

    def __init__(
        self,
        connection: Channel,
        name: str,
        config: Config,
        shared: dict[str, models.Weights],
        world: World,
    ) -> None:
        self._shared, self._world = shared, world
        limits = EngineLimits(
            config.rollout.max_num_seqs, MAX_LENGTH, 10 * MAX_LENGTH, frozenset({models.STOP})
        )
        super().__init__(
            connection, name, config, lambda _, weights, __: models.Engine(weights, limits)
        )

    def open_weights(self, message: ConnectWeights) -> models.Weights:
        return self._shared[message.handle.name]

    def _report_status(self) -> None:
        if self._world.chance(0.4):
            self._last_status = LONG_AGO
            super()._report_status()


class FakeRewards(RewardWorker):
    """A reward worker with a `FakePool`."""

    def __init__(self, connection: Channel, config: Config, world: World, failures: float) -> None:
        self._world = world
        sections = reward_sections(config).values()
        names = list(chain.from_iterable(map(component_names, sections)))
        pool = FakePool(names, world, failures)
        super().__init__(connection, pool, names, lambda tokens: " ".join(map(str, tokens)))


class FakePool:
    """Stands for `rhymeflow.pool.Pool`; so many of the calls fail."""

    def __init__(self, names: list[str], world: World, failures: float) -> None:
        self._names, self._world, self._failures = names, world, failures
        self._active: dict[Hashable, RewardTask] = {}

    def submit(self, task: RewardTask) -> None:
        assert task.key not in self._active, f"{task.key} is being judged already"
        self._active[task.key] = task

    def poll(self, now: float) -> list[RewardTask]:
        return [self._answer(key) for key in list(self._active) if self._world.chance(0.5)]

    def _answer(self, key: Hashable) -> RewardTask:
        task = self._active.pop(key)
        if self._world.chance(self._failures):
            self._world.counts["reward failed"] += 1
            task.error = f"{key}: broken"
            return task
        functions = task.begin(None).functions
        components = [
            {self._names[i]: models.reward(tokens) for i in functions}
            for tokens in task.request.completion_ids
        ]
        task.result = FunctionRewards(components)
        return task
