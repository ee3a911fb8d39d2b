"""The controller's side of the history index: its writer, and the instances that use it.

Holds true: the index stays where it is when its writer is replaced, so readers notice nothing; a
writer that dies, hangs or has a defect costs drafts and never the run. Knows nothing of where the
index is kept.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Protocol

from rhymeflow.histospec.handle import IndexHandle
from rhymeflow.runtime.base import WorkerHandle, WorkerLost
from rhymeflow.runtime.supervisor import Supervisor
from rhymeflow.workers import messages


class Histories(Protocol):
    """The controller's side of what instances draft from. Losing it costs drafts, never the run."""

    def start(self) -> None:
        """The store is there: workers can read it."""

    def metrics(self) -> dict[str, float]:
        """How much there is to draft from."""

    def hear(self, worker: str, message: messages.HistoryReady | messages.HistoryGrew) -> None:
        """A history worker said something."""

    def let_draft(self, instance: WorkerHandle) -> None:
        """Let an instance draft, once there is something to draft from. Later calls do nothing."""

    def lose(self, loss: WorkerLost) -> None:
        """A history worker ended or hangs."""


class OwnedIndex(Protocol):
    """An index that workers reach by its handle; its creator frees it."""

    @property
    def handle(self) -> IndexHandle:
        """Where workers find it."""

    @property
    def num_tokens(self) -> int:
        """Tokens in it."""


class HistoryIndex:
    """The index of a run that drafts; with None, a run that does not. `warn` tells the user."""

    def __init__(
        self, index: OwnedIndex | None, supervisor: Supervisor, warn: Callable[[str], None]
    ) -> None:
        self._index, self._supervisor, self._warn = index, supervisor, warn
        self._is_ready = False
        self._drafting: set[str] = set()

    def start(self) -> None:
        """The store is there: the worker can read it."""
        if self._index is not None:
            self._index_history()

    def metrics(self) -> dict[str, float]:
        """How much there is to draft from."""
        return {} if self._index is None else {"draft/history_tokens": self._index.num_tokens}

    def hear(self, worker: str, message: messages.HistoryReady | messages.HistoryGrew) -> None:
        """The worker has compiled what drafting runs, and says so before anything else."""
        assert isinstance(message, messages.HistoryReady | messages.HistoryGrew), message
        self._is_ready = True

    def let_draft(self, instance: WorkerHandle) -> None:
        """Let an instance draft, once there is something to draft from. Later calls do nothing."""
        if self._is_ready and instance.name not in self._drafting:
            assert self._index is not None
            self._drafting.add(instance.name)
            instance.send(messages.UseDrafter(self._index.handle))

    def lose(self, loss: WorkerLost) -> None:
        """The worker ended or hangs: put another in its place, if that is not the last straw."""
        if self._supervisor.replace_history(loss):
            self._index_history()
            self._warn(f"{loss.reason}; drafts begin anew from what is stored, the run goes on")
        else:
            self._warn(
                f"{loss.reason}; it was replaced as often as may be (run.instance_restarts), the "
                "run goes on and drafts from what history there is"
            )

    def _index_history(self) -> None:
        assert self._index is not None
        assert self._supervisor.history is not None
        self._supervisor.history.send(messages.IndexHistory(self._index.handle))
