"""The simulated learner: trains on one batch at a time, publishes, saves, dies and is restored.

It may train on complete groups before their batch is full. After a death it loads the newest
checkpoint, trains again on the stored batches since then, then on the batch that was interrupted.
Each version is published once.
"""

from __future__ import annotations

from dataclasses import dataclass
from math import inf
from typing import TYPE_CHECKING

from rhymeflow.core.cost import CostModel
from rhymeflow.core.types import Version
from rhymeflow.sim.faults import Recovery

if TYPE_CHECKING:
    from rhymeflow.sim.timeline import TimelineRow

_PATIENCE = 1.5
"""How many times `save_seconds` a checkpoint waits for a version that is evaluated."""


@dataclass(slots=True)
class _Batch:
    """The batch that is trained on."""

    version: Version
    token_seconds: float  # of all its tokens
    start: float = inf
    trained: float = inf
    is_saved: bool = False  # whether its version is


class SimulatedLearner:
    """The learner of a run, up and idle at second 0.

    Its driver calls `publish` at the time `next`. Without `recovery` there are no checkpoints.
    """

    def __init__(self, cost: CostModel, recovery: Recovery | None, row: TimelineRow | None) -> None:
        self.next = inf  # the time at which it publishes
        self.is_there = True
        self.busy = 0.0
        """Seconds in which it trained and pushed, also what was lost by a death; training again is
        not counted."""
        self.retrained = 0  # batches that were trained on again
        self._cost, self._recovery, self._row = cost, recovery, row
        self._batch: _Batch | None = None
        self._free = 0.0
        self.accumulated = inf
        """The time at which it has trained on the groups that it was given early."""
        self.parts = 0  # how often it was given groups of the next batch
        self._begun = 0.0  # when it began with the latest
        self._early_version: Version = 0
        self._early = 0.0  # seconds of the next batch's tokens that it has trained on
        self._seconds: list[float] = []  # of training, for each batch
        self._unsaved = 0.0  # seconds of training since the last checkpoint was begun
        self._checkpoints: list[tuple[float, Version]] = []  # (when it is written, version)

    def accumulate(self, version: Version, token_seconds: float, now: float) -> None:
        """Begin batch `version` with groups that take so long; nothing if it is down."""
        if self.is_there:
            self.parts += 1
            self._begun = max(now, self._free)
            self._free = self.accumulated = self._begun + token_seconds
            self._early_version = version

    def end_accumulating(self) -> None:
        """It has trained on the groups that it was given early."""
        self._early += self.accumulated - self._begun
        self._accumulated_until(self.accumulated)

    def train(self, version: Version, token_seconds: float, now: float) -> None:
        """Train on a batch, whose tokens take so long, once it is up and free."""
        assert self._batch is None, "it is trained on a batch already"
        self.parts = 0
        self._batch = _Batch(version, token_seconds)
        if self.is_there:
            self._begin(now)

    def publish(self, now: float) -> Version:
        """Publish the batch's version, and return it."""
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
        """Lose what is not published; also while it is being restored."""
        if self._batch is not None and self._batch.start < now:
            self._end(self._batch, now)
            self._batch.start = inf
        if self.accumulated < inf:
            self._accumulated_until(max(now, self._begun))
        self._early, self.parts = 0.0, 0
        self._checkpoints = [(at, version) for at, version in self._checkpoints if at <= now]
        self.is_there, self.next = False, inf

    def retrain(self) -> float:
        """Seconds it takes to train on what was published since the newest checkpoint again."""
        saved = self._checkpoints[-1][1] if self._checkpoints else 0
        self.retrained += len(self._seconds) - saved
        self._unsaved = sum(self._seconds[saved:])  # again: see `runtime/checkpoints.py`
        return self._unsaved

    def restored(self, died: float, now: float) -> None:
        """It is up, with the version that it published last."""
        self.is_there, self._free = True, now
        if self._row is not None:
            self._row.append("restore", died, now, len(self._seconds))
        if self._batch is not None:
            self._begin(now)

    def _accumulated_until(self, end: float) -> None:
        self.accumulated = inf
        self.busy += end - self._begun
        if self._row is not None and end > self._begun:
            self._row.append("train", self._begun, end, self._early_version)

    def _begin(self, now: float) -> None:
        batch, cost = self._batch, self._cost
        assert batch is not None
        is_at_it = self.accumulated < inf
        batch.start, self.accumulated = self._begun if is_at_it else max(now, self._free), inf
        rest, self._early = batch.token_seconds - self._early, 0.0
        batch.trained = batch.start + cost.train_step + rest
        batch.is_saved = self._is_due(batch.version + 1, now)
        if batch.is_saved:
            self._unsaved = 0.0
        self.next = batch.trained + cost.push

    def _is_due(self, version: Version, now: float) -> bool:
        rule = self._recovery
        if rule is None:
            return False
        if rule.save_steps and version % rule.save_steps == 0:
            return True
        is_pending = any(at > now for at, _ in self._checkpoints)
        if not rule.save_seconds or self._unsaved < rule.save_seconds or is_pending:
            return False
        return rule.evaluates(version) or self._unsaved >= _PATIENCE * rule.save_seconds

    def _end(self, batch: _Batch, now: float) -> None:
        """Count its work on the batch, which ends at `now`."""
        self.busy += now - batch.start
        if self._row is not None:
            trained = min(batch.trained, now)
            self._row.append("train", batch.start, trained, batch.version)
            if now > trained:
                self._row.append("push", trained, now, batch.version)
