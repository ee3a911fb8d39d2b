"""How far this worker's process has come: a number that grows with what it does.

Whoever does a piece of work calls `advance` after it: a micro-batch, an optimizer step, an
iteration of an engine, a tensor that is published or pulled; and waiting with nothing to do is
work, too. So a number that stands still is a process that hangs, or one whose next piece takes
long.
"""

pieces = 0
has_started = False
"""Whether work comes in pieces yet; until then the process loads and compiles, in one."""


def advance() -> None:
    """A piece of work is done."""
    global pieces
    pieces += 1
