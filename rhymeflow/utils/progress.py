"""How far this worker's process has come: a number that grows with what it does.

Whoever does a piece of work calls `advance` after it: a micro-batch, an optimizer step, an
iteration of an engine, a tensor that is published or pulled; and waiting with nothing to do is
work, too. So a number that stands still is a process that hangs, or one whose next piece takes
long. Knows nothing of who looks at it.
"""

from __future__ import annotations

_pieces = 0
_has_started = False


def advance() -> None:
    """A piece of work is done."""
    global _pieces
    _pieces += 1


def so_far() -> int:
    """The number."""
    return _pieces


def start() -> None:
    """From now on work comes in pieces; until then it loads and compiles, in one."""
    global _has_started
    _has_started = True


def has_started() -> bool:
    """Whether `start` was called."""
    return _has_started


__all__ = ["advance", "has_started", "so_far", "start"]
