"""The coordinator's state as bytes, so that the log of a long run need not be replayed whole.

Pickle keeps the state exactly as it is. Reading allows the coordinator's own classes and plain
containers only, so that a run directory of another's cannot run code.

Holds true: a coordinator that is read back gives the commands that the one written would give.
Knows nothing of where snapshots are kept.
"""

from __future__ import annotations

import io
import pickle
from typing import Any, NamedTuple

from rhymeflow.core.commands import Train
from rhymeflow.core.state import State

_ALLOWED = {
    ("builtins", "set"),
    ("builtins", "frozenset"),
    ("collections", "deque"),
    ("collections", "defaultdict"),
    ("collections", "OrderedDict"),
}


class Snapshot(NamedTuple):
    """What a replay would have found by then."""

    state: State
    """Without its plan and schedule; see `State.restore`."""
    num_drawn: int
    """Groups whose prompt was taken from the data."""
    training: Train | None
    """The batch that is being trained on."""


def write(snapshot: Snapshot) -> bytes:
    """The snapshot as bytes."""
    return pickle.dumps(tuple(snapshot), protocol=5)


def read(blob: bytes) -> Snapshot:
    """What `write` was given.

    Raises:
        pickle.UnpicklingError, AttributeError: the bytes are no snapshot of this version.
    """
    return Snapshot(*_Reader(io.BytesIO(blob)).load())


class _Reader(pickle.Unpickler):
    def find_class(self, module: str, name: str) -> Any:
        if module.startswith("rhymeflow.core.") or (module, name) in _ALLOWED:
            return super().find_class(module, name)
        raise pickle.UnpicklingError(f"{module}.{name} is no part of a coordinator's state")
