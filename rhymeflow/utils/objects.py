"""Buffers and functions that processes of a cluster share.

A process puts a buffer, which never changes; processes that have its reference get the buffer,
which is sent once to each node and mapped there. References travel only in results: a process
`offer`s a function under a name, and others call it with `ask`. `use` sets the implementation.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any, NewType, Protocol

if TYPE_CHECKING:
    import numpy as np

Reference = NewType("Reference", object)
"""Reference to a buffer that was put."""


class OwnerLost(RuntimeError):  # noqa: N818 - it is what happened
    """The process that offers the function or that put the buffer is gone, or its node is."""


class Objects(Protocol):
    """Shares buffers and functions between the processes of one run."""

    @property
    def name(self) -> str:
        """Name by which other processes call `ask` for this one."""

    @property
    def address(self) -> str:
        """IP address of this node for other nodes."""

    @property
    def join(self) -> Callable[[], None]:
        """Function that a process started by this one calls before it can `ask` and `get`."""

    def put(self, data: np.ndarray) -> Reference:
        """Share a copy of these bytes, [n] uint8."""

    def get(self, references: Sequence[Reference]) -> list[np.ndarray]:
        """Wait for the buffers and return them, read-only; raises `OwnerLost` if one is gone."""

    def offer(self, name: str, function: Callable[..., Any]) -> None:
        """Let other processes call `function` by this name; one thread runs their calls."""

    def ask(self, owner: str, name: str, *arguments: Any) -> Any:
        """Return or raise what the function `name` of the process `owner` does. Raises `OwnerLost`
        if that process is gone."""


LOOPBACK = "127.0.0.1"

_here: Objects | None = None


def use(objects: Objects) -> None:
    """Set the implementation for this process."""
    global _here
    _here = objects


def here() -> Objects:
    """Return this process's implementation."""
    assert _here is not None, "this process shares no objects"
    return _here


def address() -> str:
    """Return this node's address for the run's other processes: loopback on a single machine."""
    return _here.address if _here is not None else LOOPBACK


def are_shared() -> bool:
    """Whether `use` was called in this process."""
    return _here is not None
