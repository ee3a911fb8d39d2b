"""When a checkpoint is due, and which of those there are stay.

The newest complete checkpoint is never given up before a newer one is complete; the best by
`run.best_metric` of those that were evaluated stays.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping

from rhymeflow.config.run import RunConfig
from rhymeflow.core.types import Version

EARLY = 2 / 3
"""Of `run.save_seconds`: from then on a version that is evaluated is saved."""


class Checkpoints:
    """The checkpoints of a run.

    `evaluates` says whether `run.best_metric` is found of a version; `there` are the versions of
    checkpoints that an earlier attempt wrote, and `known` what it found of versions, by the names
    of metrics.
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
        """Being written, with the earlier versions that stay when it is complete."""
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
        """The complete one with most of `run.best_metric`, if any has it."""
        known = [version for version in self._versions if version in self._found]
        return max(known, key=lambda version: (self._found[version], version), default=None)

    def __contains__(self, version: Version) -> bool:
        """Whether there is one of this version, or one is being written."""
        return version in self._versions or version in self._pending

    def trained(self, seconds: float) -> None:
        """A step is over, which took the learner so long."""
        self._seconds += seconds

    def restored(self, seconds: float) -> None:
        """A learner was restored, and trained so long again. That counts: else a run whose learner
        dies more often than checkpoints are due would never get on."""
        self._seconds = seconds

    def evaluated(self, version: Version, metrics: Mapping[str, float]) -> None:
        """These were found of a version."""
        if self._config.best_metric in metrics:
            self._found[version] = metrics[self._config.best_metric]

    def is_due(self, version: Version) -> bool:
        """Whether the version that is reached next is to be saved."""
        run = self._config
        if version == self._num_steps or (run.save_steps and version % run.save_steps == 0):
            return True
        if not run.save_seconds or self._seconds < run.save_seconds * EARLY or self.is_pending:
            return False
        # A little early where the version is evaluated: so the best is among the checkpoints.
        return self._seconds >= run.save_seconds or self._evaluates(version)

    def begin(self, version: Version) -> tuple[Version, ...]:
        """It is being written; return the earlier versions that are to stay then."""
        there, limit = sorted({*self._versions, *self._pending}), self._config.save_total_limit
        newest = there[1 - limit :] if limit > 1 else there if limit == 0 else []
        kept = tuple(sorted({*newest, *([] if self.best is None else [self.best])}))
        self._pending[version] = kept
        self._seconds = 0.0
        return kept

    def saved(self, version: Version) -> None:
        """It is complete, and what was not to stay is gone."""
        self._versions = [*self._pending.pop(version), version]

    def failed(self, version: Version) -> None:
        """It could not be written."""
        del self._pending[version]

    def is_damaged(self, version: Version) -> None:
        """It turns out that it is none."""
        self._versions = [each for each in self._versions if each != version]

    def lose_pending(self) -> tuple[Version, ...]:
        """Those that were being written will not be; return their versions."""
        lost = tuple(self._pending)
        self._pending.clear()
        return lost
