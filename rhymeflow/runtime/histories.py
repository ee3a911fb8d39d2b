"""What a run drafts from: one index on one machine, one on each node of a cluster.

Knows nothing of how an index is filled or read.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import closing, contextmanager
from pathlib import Path

from rhymeflow.config import Config
from rhymeflow.histospec.index import Index
from rhymeflow.runtime.history_index import Histories, HistoryIndex
from rhymeflow.runtime.node_histories import NodeHistories
from rhymeflow.runtime.supervisor import Supervisor
from rhymeflow.utils import shared_memory
from rhymeflow.workers.history import new_index


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


__all__ = ["histories", "history_index"]
