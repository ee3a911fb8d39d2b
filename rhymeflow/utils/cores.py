"""The cores of this machine: how many there are to use, and staying on some of them.

Holds true: where the system can say which cores this process may use (Linux), the others are not
counted.
"""

from __future__ import annotations

import os

from rhymeflow.errors import UserError


def usable_cores() -> int:
    """How many cores this process may use."""
    if hasattr(os, "sched_getaffinity"):
        return len(os.sched_getaffinity(0))
    return os.cpu_count() or 1


def stay_on(cpus: tuple[int, ...]) -> None:
    """Keep this process, and those it starts, on these cores.

    Raises:
        UserError: this system cannot do that.
    """
    if not hasattr(os, "sched_setaffinity"):
        raise UserError(
            f"learner.cpus, rollout.cpus: this system cannot keep a process on cores {cpus}; "
            "leave them out"
        )
    os.sched_setaffinity(0, cpus)
