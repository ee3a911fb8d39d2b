"""Starts, watches and replaces the history workers that instances draft from.

Each node with an instance has one. It fills an index in the node's shared memory from the store. A
history worker that dies, hangs or has a defect costs drafts, never the run."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field

from rhymeflow.config import Config
from rhymeflow.histospec.draft import IndexHandle
from rhymeflow.runtime.base import WorkerHandle, WorkerLost
from rhymeflow.runtime.reporting import Reporter
from rhymeflow.runtime.supervisor import Supervisor
from rhymeflow.workers.messages import HistoryGrew, UseDrafter


@dataclass(slots=True)
class _Node:
    worker: str | None  # the node's history worker; None: it was lost too often
    index: IndexHandle | None = None
    num_tokens: int = 0
    drafting: set[str] = field(default_factory=set)  # instances that have this index


class Histories:
    """The history workers of a run, if it drafts; each node's are counted by themselves for
    `run.instance_restarts`. `free` frees the shared memory of a name on this machine."""

    def __init__(
        self,
        config: Config,
        supervisor: Supervisor,
        reporter: Reporter,
        *,
        free: Callable[[str], None],
    ) -> None:
        self._is_enabled = config.drafting.window != "off"
        self._supervisor, self._warn, self._free = supervisor, reporter.warn, free
        self._nodes: dict[str, _Node] = {}

    def start(self) -> None:
        """Start workers on the nodes of placed instances. The store must be readable by now."""
        if self._is_enabled:
            for instance in self._supervisor.instances.values():
                self.let_draft(instance)

    def metrics(self) -> dict[str, float]:
        """Return the length of the longest history that a node has."""
        tokens = [node.num_tokens for node in self._nodes.values()]
        return {"draft/history_tokens": max(tokens)} if tokens else {}

    def hear(self, worker: str, message: HistoryGrew) -> None:
        """Note that a node's index was created or has grown."""
        node = self._of(worker)
        if node.index != message.index:
            node.index = message.index
            node.drafting.clear()
        node.num_tokens = message.num_tokens

    def let_draft(self, instance: WorkerHandle) -> None:
        """Give an instance the index of its node, if there is one yet; start a worker if needed."""
        if not self._is_enabled or instance.node is None:
            return
        if instance.node not in self._nodes:
            self._nodes[instance.node] = _Node(self._start(instance.node))
        node = self._nodes[instance.node]
        if node.index is not None and instance.name not in node.drafting:
            node.drafting.add(instance.name)
            instance.send(UseDrafter(node.index))

    def lose(self, loss: WorkerLost) -> None:
        """Replace a lost worker, if its node still has instances."""
        node = self._of(loss.worker)
        (name,) = (name for name, candidate in self._nodes.items() if candidate is node)
        self._supervisor.end(loss.worker)
        if node.index is not None:  # on this machine; on others it is freed with the worker
            self._free(node.index.name)
            node.index = None
        if not any(instance.node == name for instance in self._supervisor.instances.values()):
            del self._nodes[name]
            self._warn(f"{loss.reason}; its node has no instances any more")
        elif not self._supervisor.may_replace(f"history of {name}"):
            node.worker = None
            self._warn(
                f"{loss.reason}; it was replaced as often as run.instance_restarts allows; the run "
                "continues and drafts from what history there is"
            )
        else:
            node.worker = self._start(name)
            self._warn(f"{loss.reason}; the run continues, its history is rebuilt from the store")

    def _start(self, node: str) -> str:
        return self._supervisor.start_another("history", node=node).name

    def _of(self, worker: str) -> _Node:
        (node,) = (node for node in self._nodes.values() if node.worker == worker)
        return node
