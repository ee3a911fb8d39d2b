"""Decides when a checkpoint is due and which earlier ones to keep: the newest and the best.

The newest complete checkpoint is kept until a newer one is complete."""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable, Mapping

from rhymeflow.config.run import RunConfig
from rhymeflow.core.types import Version


class Checkpoints:
    """The checkpoints of a run. `evaluates` tells whether a version gets `run.best_metric`.
    `existing` are the versions that earlier attempts saved; `metrics` are those that earlier
    attempts recorded, by version."""

    def __init__(
        self,
        config: RunConfig,
        evaluates: Callable[[Version], bool],
        *,
        num_steps: Version,
        existing: Iterable[Version] = (),
        metrics: Mapping[Version, Mapping[str, float]] | None = None,
    ) -> None:
        self._config, self._evaluates, self._num_steps = config, evaluates, num_steps
        self._versions = sorted(existing)
        self._pending: dict[Version, tuple[Version, ...]] = {}
        """Checkpoints being written, each with the earlier versions to keep."""
        self._seconds = 0.0  # of training since the last checkpoint
        self._scores: dict[Version, float] = {}  # `run.best_metric`
        for version, measured in (metrics or {}).items():
            self.evaluated(version, measured)

    @property
    def is_pending(self) -> bool:
        """Whether a checkpoint is being written."""
        return bool(self._pending)

    @property
    def newest(self) -> Version | None:
        """The newest complete checkpoint."""
        return self._versions[-1] if self._versions else None

    @property
    def best(self) -> Version | None:
        """The complete checkpoint with the highest `run.best_metric`; of equals, the newest."""
        scored = [version for version in self._versions if version in self._scores]
        return max(scored, key=lambda version: (self._scores[version], version), default=None)

    def __contains__(self, version: Version) -> bool:
        return version in self._versions or version in self._pending

    def trained(self, seconds: float) -> None:
        """Count the learner's time for a step."""
        self._seconds += seconds

    def restored(self, seconds: float) -> None:
        """Count the time that a restored learner spent on training again: without it, a run whose
        learner dies more often than checkpoints are due would make no progress."""
        self._seconds = seconds

    def evaluated(self, version: Version, metrics: Mapping[str, float]) -> None:
        """Remember `run.best_metric` of a version."""
        if self._config.best_metric in metrics:
            self._scores[version] = metrics[self._config.best_metric]

    def is_due(self, version: Version) -> bool:
        """Whether to save `version`, which is reached next."""
        state = {"is_evaluated": self._evaluates(version), "is_pending": self.is_pending}
        return version == self._num_steps or self._config.saves(version, self._seconds, **state)

    def begin(
        self, version: Version, needed: Collection[Version] | None = None
    ) -> tuple[Version, ...]:
        """Mark the checkpoint as being written; return the earlier versions to keep: among them
        those that a backup names (`needed`), and those that the next one may name."""
        earlier, limit = sorted({*self._versions, *self._pending}), self._config.save_total_limit
        # `version` itself is one of the `limit` checkpoints; 0: there is no limit.
        newest = earlier[1 - limit :] if limit > 1 else earlier if limit == 0 else []
        named = [] if needed is None else [*needed, *self._pending]
        best = [] if self.best is None else [self.best]
        kept = tuple(sorted({*newest, *best, *named}.intersection(earlier)))
        self._pending[version] = kept
        self._seconds = 0.0
        return kept

    def saved(self, version: Version) -> None:
        """Mark the checkpoint as complete: those that were not kept are deleted."""
        self._versions = [*self._pending.pop(version), version]

    def failed(self, version: Version) -> None:
        """Forget a checkpoint that could not be written."""
        del self._pending[version]

    def discard(self, version: Version) -> None:
        """Forget a checkpoint that cannot be restored."""
        self._versions = [each for each in self._versions if each != version]

    def lose_pending(self) -> tuple[Version, ...]:
        """Forget the checkpoints being written; return their versions."""
        lost = tuple(self._pending)
        self._pending.clear()
        return lost
