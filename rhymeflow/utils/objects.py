"""Objects that processes of a cluster share by reference, and questions that they ask each other.

A process puts a buffer, which never changes; whoever it hands the reference to gets it, fetched
once to each node and mapped there. A reference travels only in an answer: a process `offers` a
function under a name, and others `ask` for it. Who carries this (Ray) says so by `use`.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, NewType, Protocol

import numpy as np

Reference = NewType("Reference", object)
"""Names a buffer that was put."""


class OwnerLost(RuntimeError):  # noqa: N818 - it is what happened
    """The process that was asked, or that had put what was wanted, is gone, or its node is."""


class Objects(Protocol):
    """What carries objects and questions between the processes of one run."""

    @property
    def name(self) -> str:
        """Under which others ask this process."""

    @property
    def address(self) -> str:
        """IP address by which other nodes reach this one."""

    @property
    def join(self) -> Callable[[], None]:
        """For a process that this one starts: to be called there, so that it can ask and get."""

    def put(self, data: np.ndarray) -> Reference:
        """Keep a copy of these bytes, [n] uint8."""

    def get(self, references: Sequence[Reference]) -> list[np.ndarray]:
        """The buffers, read-only, when they are on this node; `OwnerLost` if one is gone."""

    def offer(self, what: str, answer: Callable[..., Any]) -> None:
        """Answer questions of this name, from now on, in a thread of their own."""

    def ask(self, whom: str, what: str, *arguments: Any) -> Any:
        """What the process `whom` answers, or raises; `OwnerLost` if it is gone."""


_here: Objects | None = None


def use(objects: Objects) -> None:
    """Have this process share objects this way."""
    global _here
    _here = objects


def here() -> Objects:
    """How this process shares objects."""
    assert _here is not None, "this process shares no objects"
    return _here


def are_shared() -> bool:
    """Whether this process shares objects."""
    return _here is not None
