"""The controller's side of histories where instances are on many nodes: an index on each.

A node has a history worker once it has an instance that joined. The worker makes the index, in its
node's shared memory, and fills it from the run's store; the instances of the node draft from it.

Holds true: as in `history_index.py`, what becomes of a history costs drafts and never the run; a
node has one history worker at a time. Knows nothing of how nodes are reached.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import dataclass, field

from rhymeflow.histospec.handle import IndexHandle
from rhymeflow.runtime.base import WorkerHandle, WorkerLost
from rhymeflow.runtime.supervisor import Supervisor
from rhymeflow.workers import messages


@dataclass(slots=True)
class _Node:
    worker: str | None
    """The history worker of the node; None: it was lost too often."""
    started: int = 1
    index: IndexHandle | None = None
    num_tokens: int = 0
    drafting: set[str] = field(default_factory=set)
    """The instances that have this index."""


class NodeHistories:
    """The histories of a run that drafts; at most `restarts` workers are replaced on each node."""

    def __init__(
        self,
        supervisor: Supervisor,
        warn: Callable[[str], None],
        *,
        is_wanted: bool,
        restarts: int,
    ) -> None:
        self._supervisor, self._warn = supervisor, warn
        self._is_wanted, self._restarts = is_wanted, restarts
        self._nodes: dict[str, _Node] = {}

    def start(self) -> None:
        """Nothing: a node's history begins with its first instance."""

    def metrics(self) -> dict[str, float]:
        """How much there is to draft from, on the node that has most."""
        tokens = [node.num_tokens for node in self._nodes.values()]
        return {"draft/history_tokens": max(tokens)} if tokens else {}

    def hear(self, worker: str, message: messages.HistoryReady | messages.HistoryGrew) -> None:
        """A node's index is there, or has grown."""
        node = self._of(worker)
        match message:
            case messages.HistoryReady(index=index):
                node.index = index
                node.drafting.clear()
            case messages.HistoryGrew(num_tokens=num_tokens):
                node.num_tokens = num_tokens
            case _:
                raise AssertionError(f"unexpected message {message}")

    def let_draft(self, instance: WorkerHandle) -> None:
        """Let an instance draft, once its node has something to draft from."""
        if not self._is_wanted or instance.node is None:
            return
        if instance.node not in self._nodes:
            self._nodes[instance.node] = _Node(self._start(instance.node))
        node = self._nodes[instance.node]
        if node.index is not None and instance.name not in node.drafting:
            node.drafting.add(instance.name)
            instance.send(messages.UseDrafter(node.index))

    def lose(self, loss: WorkerLost) -> None:
        """A worker ended or hangs: put another in its place, if there still are instances."""
        node = self._of(loss.worker)
        (name,) = (name for name, each in self._nodes.items() if each is node)
        self._supervisor.end_history(loss.worker)
        if not any(each.node == name for each in self._instances()):
            del self._nodes[name]
            self._warn(f"{loss.reason}; there is no instance beside it any more")
        elif node.started > self._restarts:
            node.worker = None
            self._warn(
                f"{loss.reason}; it was replaced as often as may be (run.instance_restarts), the "
                "instances beside it draft from what history there is"
            )
        else:
            node.worker, node.started = self._start(name), node.started + 1
            self._warn(f"{loss.reason}; drafts begin anew there from what is stored")

    def _of(self, worker: str) -> _Node:
        (node,) = (each for each in self._nodes.values() if each.worker == worker)
        return node

    def _instances(self) -> Iterable[WorkerHandle]:
        return self._supervisor.instances.values()

    def _start(self, node: str) -> str:
        worker = self._supervisor.start_history(node)
        worker.send(messages.IndexHistory(None))
        return worker.name


__all__ = ["NodeHistories"]
