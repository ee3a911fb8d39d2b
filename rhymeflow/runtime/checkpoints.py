"""When a checkpoint is due, and which earlier ones stay: the newest and the best.

The newest complete checkpoint stays until a newer one is complete.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping

from rhymeflow.config.run import RunConfig
from rhymeflow.core.types import Version

EARLY = 2 / 3
"""Of `run.save_seconds`: an evaluated version is saved from then on."""


class Checkpoints:
    """The checkpoints of a run.

    `evaluates` says whether a version gets `run.best_metric`; `there` are the versions that earlier
    attempts saved, and `known` the metrics they found, by version.
    """

    def __init__(
        self,
        config: RunConfig,
        evaluates: Callable[[Version], bool],
        *,
        num_steps: Version,
        there: Iterable[Version] = (),
        known: Mapping[Version, Mapping[str, float]] | None = None,
    ) -> None:
        self._config, self._evaluates, self._num_steps = config, evaluates, num_steps
        self._versions = sorted(there)
        self._pending: dict[Version, tuple[Version, ...]] = {}
        """Being written, each with the earlier versions that stay then."""
        self._seconds = 0.0
        self._found: dict[Version, float] = {}  # `run.best_metric`
        for version, metrics in (known or {}).items():
            self.evaluated(version, metrics)

    @property
    def is_pending(self) -> bool:
        """Whether one is being written."""
        return bool(self._pending)

    @property
    def newest(self) -> Version | None:
        """The newest that is complete."""
        return self._versions[-1] if self._versions else None

    @property
    def best(self) -> Version | None:
        """The complete one with the highest `run.best_metric`, the newest of equals."""
        known = [version for version in self._versions if version in self._found]
        return max(known, key=lambda version: (self._found[version], version), default=None)

    def __contains__(self, version: Version) -> bool:
        """Whether this version is saved or being saved."""
        return version in self._versions or version in self._pending

    def trained(self, seconds: float) -> None:
        """A step took the learner so long."""
        self._seconds += seconds

    def restored(self, seconds: float) -> None:
        """A restored learner trained so long again. It counts: else a run whose learner dies more
        often than checkpoints are due would make no progress."""
        self._seconds = seconds

    def evaluated(self, version: Version, metrics: Mapping[str, float]) -> None:
        """These are the metrics of a version."""
        if self._config.best_metric in metrics:
            self._found[version] = metrics[self._config.best_metric]

    def is_due(self, version: Version) -> bool:
        """Whether to save the version that is reached next."""
        run = self._config
        if version == self._num_steps or (run.save_steps and version % run.save_steps == 0):
            return True
        if not run.save_seconds or self._seconds < run.save_seconds * EARLY or self.is_pending:
            return False
        # Evaluated versions are saved early, so that the best is among the checkpoints.
        return self._seconds >= run.save_seconds or self._evaluates(version)

    def begin(self, version: Version) -> tuple[Version, ...]:
        """It is being written; return the earlier versions that stay."""
        there, limit = sorted({*self._versions, *self._pending}), self._config.save_total_limit
        newest = there[1 - limit :] if limit > 1 else there if limit == 0 else []
        kept = tuple(sorted({*newest, *([] if self.best is None else [self.best])}))
        self._pending[version] = kept
        self._seconds = 0.0
        return kept

    def saved(self, version: Version) -> None:
        """It is complete, and those that were not to stay are deleted."""
        self._versions = [*self._pending.pop(version), version]

    def failed(self, version: Version) -> None:
        """It could not be written."""
        del self._pending[version]

    def is_damaged(self, version: Version) -> None:
        """It cannot be restored."""
        self._versions = [each for each in self._versions if each != version]

    def lose_pending(self) -> tuple[Version, ...]:
        """Those being written are lost; return their versions."""
        lost = tuple(self._pending)
        self._pending.clear()
        return lost
