"""What the executor knows of its processes, of what it asked them, and of what waits in them."""

from __future__ import annotations

from dataclasses import dataclass, field

from rhymeflow.environments.process import EnvironmentProcess
from rhymeflow.environments.requests import Request


@dataclass(slots=True, eq=False)
class Task:
    """A request in progress: which environment serves it, and how far that is."""

    request: Request
    id: int = -1
    stepped: int = 0
    """Turns that the environment has answered."""
    doing: str = ""
    """What was asked last, for messages."""
    deadline: float = 0.0
    """Of that."""
    is_begun: bool = False
    """Whether the process has begun with it."""
    is_cancelled: bool = False
    """Whether it was told to end it."""
    is_suspect: bool = False
    """Whether it may have ended a process, and so is tried alone."""
    failures: list[str] = field(default_factory=list)


@dataclass(slots=True, eq=False)
class Slot:
    """The executor's record of one process: the calls in it, by id of the environment."""

    process: EnvironmentProcess
    deadline: float | None
    """Of its start."""
    is_ready: bool = False
    tasks: dict[int, Task] = field(default_factory=dict)

    @property
    def is_for_one(self) -> bool:
        """Whether a suspect is alone in it."""
        return any(task.is_suspect for task in self.tasks.values())


@dataclass(frozen=True, slots=True)
class Live:
    """An environment that is asked nothing at the moment."""

    slot: Slot
    id: int
    stepped: int
