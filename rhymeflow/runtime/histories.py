"""What a run drafts from: one index on one machine, one on each node of a cluster.

Knows nothing of how an index is filled or read.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import closing, contextmanager
from pathlib import Path
from typing import Protocol

from rhymeflow.config import Config
from rhymeflow.histospec.index import Index
from rhymeflow.runtime.base import WorkerHandle, WorkerLost
from rhymeflow.runtime.history_index import HistoryIndex
from rhymeflow.runtime.node_histories import NodeHistories
from rhymeflow.runtime.supervisor import Supervisor
from rhymeflow.utils import shared_memory
from rhymeflow.workers.history import new_index
from rhymeflow.workers.messages import HistoryGrew, HistoryReady


class Histories(Protocol):
    """The controller's side of what instances draft from. Losing it costs drafts, never the run."""

    def start(self) -> None:
        """The store is there: workers can read it."""

    def metrics(self) -> dict[str, float]:
        """How much there is to draft from."""

    def hear(self, worker: str, message: HistoryReady | HistoryGrew) -> None:
        """A history worker said something."""

    def let_draft(self, instance: WorkerHandle) -> None:
        """Let an instance draft, once there is something to draft from. Later calls do nothing."""

    def lose(self, loss: WorkerLost) -> None:
        """A history worker ended or hangs."""


def histories(
    config: Config, index: Index | None, supervisor: Supervisor, warn: Callable[[str], None]
) -> Histories:
    """The controller's side: of `index`, or of one on each node. `warn` tells the user."""
    if config.runtime == "local":
        return HistoryIndex(index, supervisor, warn)
    return NodeHistories(
        supervisor,
        warn,
        is_wanted=config.drafting.window != "off",
        restarts=config.run.instance_restarts,
    )


@contextmanager
def history_index(config: Config, run_dir: Path) -> Iterator[Index | None]:
    """The shared index of a run that drafts on one machine; else None.

    Its memory is given back at the end; if this process is killed, by its resource tracker; if that
    is killed too, by the next attempt at the run.
    """
    if config.drafting.window == "off" or config.runtime != "local":
        yield None
        return
    index = new_index(config.drafting, shared_memory.prefix_for(run_dir, "h"))
    with closing(index):
        yield index


__all__ = ["Histories", "histories", "history_index"]
