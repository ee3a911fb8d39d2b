"""The seam between a run and its machines: starting workers, carrying messages.

In every implementation a name is used once, so what a stopped worker still says is dropped;
messages of one worker keep their order and arrive once; `send` never waits; a worker that ends is
reported as `WorkerLost` exactly once, after all it had said.
"""

from __future__ import annotations

from collections.abc import Collection
from dataclasses import dataclass
from typing import Any, Literal, NamedTuple, Protocol

from rhymeflow.workers.messages import Sent

Role = Literal["learner", "learner_rank", "policy", "rollout", "history", "reward", "environment"]
"""The module of `rhymeflow.workers` that a worker runs. `learner` is the learner's rank 0,
`learner_rank` another of its ranks; `policy` stands in its place where nothing is trained."""


@dataclass(frozen=True, slots=True)
class Resources:
    """What a worker is given of the machine."""

    num_threads: int
    cpus: tuple[int, ...] | None = None
    """Cores it is pinned to; None: any."""
    node: str | None = None
    """The node that it has to be on, as `WorkerHandle.node` says it; None: any."""


class Received(NamedTuple):
    """A message from a worker."""

    worker: str
    message: Any


class WorkerLost(NamedTuple):
    """A worker ended without saying why: killed, out of memory, or its node is gone."""

    worker: str
    reason: str
    """For the user: how it ended, as far as is known, and where its output is."""
    with_node: bool = False
    """Its node is gone or out of reach."""


News = Received | WorkerLost


class WorkerHandle(Protocol):
    """The sender's side of a worker."""

    name: str

    @property
    def node(self) -> str | None:
        """The node that it is on; None: not known yet, and it has said nothing."""

    @property
    def log(self) -> str:
        """Where what it prints can be read."""

    def send(self, message: Sent) -> None:
        """Send a message, at the latest with the runtime's next `wait`. Never waits."""


class Runtime(Protocol):
    """Starts workers and carries messages."""

    def start(self, role: Role, name: str, resources: Resources) -> WorkerHandle:
        """Start a worker under a name that was never used before. Does not wait until it is up."""

    def wait(self, timeout: float, *, for_any_of: Collection[str] | None = None) -> list[News]:
        """Everything that has arrived; waits for something `timeout` seconds at most.

        With `for_any_of`, only news of these workers ends the wait.
        """

    def has_room(self, role: Role, resources: Resources) -> bool:
        """Whether there is probably room for one more such worker."""

    def stop(self, name: str, *, patience: float) -> None:
        """Ask a worker to end, and kill it after `patience` seconds; returns when it is gone."""
