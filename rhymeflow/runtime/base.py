"""The seam between a run and its machines: starting workers, carrying messages.

In every implementation a name is used once, so late messages of a stopped worker are dropped; the
messages of one worker arrive once and in order; `send` never waits; a worker that ends is reported
as `WorkerLost` exactly once, after its last message."""

from __future__ import annotations

from collections.abc import Collection
from dataclasses import dataclass
from typing import Any, Literal, NamedTuple, Protocol

from rhymeflow.workers.messages import AnyMessage

Role = Literal["learner", "learner_rank", "policy", "rollout", "history", "reward", "environment"]
"""The module of `rhymeflow.workers` that a worker runs. `learner` is the learner's rank 0, and
`learner_rank` each other rank; where nothing is trained, `policy` takes the place of `learner`."""


@dataclass(frozen=True, slots=True)
class Resources:
    """The part of a machine that a worker gets."""

    num_threads: int | None  # none: as many as the nodes have cores for a GPU, with `runtime: ray`
    cpus: tuple[int, ...] | None = None  # cores that it is pinned to; None: any
    node: str | None = None  # the node that it must run on, as in `WorkerHandle.node`; None: any
    number: int = 0  # its rank, or the instance's place in the fleet


class Received(NamedTuple):
    """A message from a worker."""

    worker: str
    message: Any


class WorkerLost(NamedTuple):
    """A worker ended without reporting a failure: killed, out of memory, or its node is gone."""

    worker: str
    reason: str  # for the user: how it ended, if known, and where its output is
    with_node: bool = False  # its node is gone or out of reach


News = Received | WorkerLost


class WorkerHandle(Protocol):
    """The controller's side of a worker."""

    name: str

    @property
    def node(self) -> str | None:
        """The node that it runs on; None: not placed yet, so it has sent nothing."""

    @property
    def log(self) -> str:
        """Where its output is, for the user."""

    def send(self, message: AnyMessage) -> None:
        """Send a message, at the latest in the runtime's next `wait`. Never waits."""


class Runtime(Protocol):
    """Starts workers and carries messages."""

    def start(self, role: Role, name: str, resources: Resources) -> WorkerHandle:
        """Start a worker under a name that was never used before. Does not wait for it."""

    def wait(self, timeout: float, *, for_any_of: Collection[str] | None = None) -> list[News]:
        """Return everything that has arrived, after a wait of at most `timeout` seconds. With
        `for_any_of`, only news from these workers ends the wait early."""

    def has_room(self, role: Role, resources: Resources) -> bool:
        """Whether one more such worker probably fits."""

    def stop(self, name: str, *, patience: float) -> None:
        """Ask a worker to end, kill it after `patience` seconds, and return when it is gone."""
