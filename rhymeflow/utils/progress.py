"""Counts the work of a worker's process, so that a hang can be noticed.

`advance` is called after each piece of work: a micro-batch, an optimizer step, an iteration of an
engine, a tensor published or pulled, and also while the worker is idle. If the count stands still,
the process hangs, or one piece takes long."""

pieces = 0
has_started = False
"""Whether the process has finished loading and compiling, which are not counted in pieces."""


def advance() -> None:
    """Count a piece of work."""
    global pieces
    pieces += 1
