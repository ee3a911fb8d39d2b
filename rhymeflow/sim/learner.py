"""The simulated learner: trains on one batch at a time, publishes, saves, dies and is restored.

It may accumulate complete groups before their batch is full. After a death it loads the newest
checkpoint and repeats the batches since then, then the interrupted one. Each version is published
once."""

from __future__ import annotations

from dataclasses import dataclass
from math import inf
from typing import TYPE_CHECKING

from rhymeflow.core.cost import CostModel
from rhymeflow.core.types import Version
from rhymeflow.sim.faults import Recovery

if TYPE_CHECKING:
    from rhymeflow.sim.timeline import TimelineRow


@dataclass(slots=True)
class _Batch:
    """The batch that is trained on; times in virtual seconds."""

    version: Version
    token_seconds: float  # that all its tokens take
    start: float = inf  # when training began; inf: it has not
    trained: float = inf  # when training ends and pushing begins
    is_saved: bool = False  # whether a checkpoint of its version is written


class SimulatedLearner:
    """The learner of a run, up and idle at second 0. Its driver calls `publish` at the time `next`.
    Without `recovery` there are no checkpoints."""

    def __init__(self, cost: CostModel, recovery: Recovery | None, row: TimelineRow | None) -> None:
        self.next = inf  # the time at which it publishes
        self.is_up = True
        self.busy = 0.0
        """Seconds of training and pushing. Work that a death undid counts, but repeating it does
        not."""
        self.retrained = 0  # batches that were trained on again
        self._cost, self._recovery, self._row = cost, recovery, row
        self._batch: _Batch | None = None
        self._free = 0.0  # time from which it can begin something
        self.accumulated = inf  # time at which the current accumulation ends
        self.parts = 0  # accumulations of the next batch
        self._begun = 0.0  # time at which the latest accumulation began
        self._early_version: Version = 0
        self._early = 0.0  # seconds of the next batch that are done
        self._seconds: list[float] = []  # of training, for each batch
        self._unsaved = 0.0  # seconds of training since the last checkpoint was begun
        self._checkpoints: list[tuple[float, Version]] = []  # (time when written, version)

    def accumulate(self, version: Version, token_seconds: float, now: float) -> None:
        """Begin to accumulate groups of batch `version`, unless the learner is down."""
        if self.is_up:
            self.parts += 1
            self._begun = max(now, self._free)
            self._free = self.accumulated = self._begun + token_seconds
            self._early_version = version

    def end_accumulating(self) -> None:
        """End the current accumulation."""
        self._early += self.accumulated - self._begun
        self._count_accumulation(self.accumulated)

    def train(self, version: Version, token_seconds: float, now: float) -> None:
        """Train on a batch, whose tokens take `token_seconds`, once the learner is up and free."""
        assert self._batch is None, "it trains on another batch"
        self.parts = 0
        self._batch = _Batch(version, token_seconds)
        if self.is_up:
            self._begin(now)

    def publish(self, now: float) -> Version:
        """Publish the version that the batch makes, and return it."""
        batch, self._batch, self.next = self._batch, None, inf
        assert batch is not None
        self._end(batch, now)
        self._seconds.append(self._cost.train_step + batch.token_seconds)
        self._unsaved += self._seconds[-1]
        if batch.is_saved:
            assert self._recovery is not None
            self._free = now + self._recovery.checkpoint_copy
            written = self._free + self._recovery.checkpoint_write
            self._checkpoints.append((written, batch.version + 1))
        return batch.version + 1

    def die(self, now: float) -> None:
        """Lose all work that is not published; also called while the learner is being restored."""
        if self._batch is not None and self._batch.start < now:
            self._end(self._batch, now)
            self._batch.start = inf
        if self.accumulated < inf:
            self._count_accumulation(max(now, self._begun))
        self._early, self.parts = 0.0, 0
        self._checkpoints = [(at, version) for at, version in self._checkpoints if at <= now]
        self.is_up, self.next = False, inf

    def retrain(self) -> float:
        """Return the seconds it takes to repeat the batches since the newest checkpoint."""
        saved = self._checkpoints[-1][1] if self._checkpoints else 0
        self.retrained += len(self._seconds) - saved
        self._unsaved = sum(self._seconds[saved:])  # as in `runtime/checkpoints.py`
        return self._unsaved

    def restored(self, died: float, now: float) -> None:
        """Continue with the version that was published last, after a death at `died`."""
        self.is_up, self._free = True, now
        if self._row is not None:
            self._row.append("restore", died, now, len(self._seconds))
        if self._batch is not None:
            self._begin(now)

    def _count_accumulation(self, end: float) -> None:
        """Count the accumulation that began at `_begun` and ended at `end`."""
        self.accumulated = inf
        self.busy += end - self._begun
        if self._row is not None and end > self._begun:
            self._row.append("train", self._begun, end, self._early_version)

    def _begin(self, now: float) -> None:
        batch, cost = self._batch, self._cost
        assert batch is not None
        is_accumulating = self.accumulated < inf
        batch.start = self._begun if is_accumulating else max(now, self._free)
        self.accumulated = inf
        rest, self._early = batch.token_seconds - self._early, 0.0
        batch.trained = batch.start + cost.train_step + rest
        batch.is_saved = self._is_due(batch.version + 1, now)
        if batch.is_saved:
            self._unsaved = 0.0
        self.next = batch.trained + cost.push

    def _is_due(self, version: Version, now: float) -> bool:
        """Whether a checkpoint of `version` is due."""
        rule = self._recovery
        if rule is None:
            return False
        is_pending = any(at > now for at, _ in self._checkpoints)
        state = {"is_evaluated": rule.evaluates(version), "is_pending": is_pending}
        return rule.run.saves(version, self._unsaved, **state)

    def _end(self, batch: _Batch, now: float) -> None:
        """Count the work on the batch, which ends at `now`."""
        self.busy += now - batch.start
        if self._row is not None:
            trained = min(batch.trained, now)
            self._row.append("train", batch.start, trained, batch.version)
            if now > trained:
                self._row.append("push", trained, now, batch.version)
