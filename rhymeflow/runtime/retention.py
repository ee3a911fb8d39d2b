"""Which tokens of the log a run needs no more (`run.keep_tokens`), and when they are deleted.

A learner that is restored trains again on the batches since the newest checkpoint; responses in
flight go on from their tokens; drafts begin with the tokens stored last. If the log's end is lost
with the power, the newest checkpoint may be ahead of it, and what was pruned since is lost with
it, for the store prunes within its transactions.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from rhymeflow.config import Config
from rhymeflow.runtime.training import Training

if TYPE_CHECKING:
    from rhymeflow.store.writer import SqliteTrajectoryStore


class Retention:
    """Has `store` prune as `config` says."""

    def __init__(self, config: Config, training: Training, store: SqliteTrajectoryStore) -> None:
        self._keep, self._training, self._store = config.run.keep_tokens, training, store
        drafting = config.drafting
        self._history_tokens = 0 if drafting.window == "off" else drafting.history_tokens

    def prune(self) -> None:
        """Delete some of what is not needed, within the next commit."""
        newest = self._training.checkpoints.newest
        if self._keep is None or newest is None:
            return
        before = min(newest, self._training.published - self._keep)
        if before > 0:
            self._store.prune(before=before, history_tokens=self._history_tokens)
