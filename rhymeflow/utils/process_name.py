"""What `top`, `ps -o comm` and `pkill` call a worker: `rf:learner`, `rf:rollout-0`, ...

Holds true: a name is for people and tools only; where the system takes none, nothing happens.
"""

from __future__ import annotations

import ctypes
import sys

PREFIX = "rf:"
_PR_SET_NAME = 15  # prctl(2)


def set_process_name(name: str) -> None:
    """Give this process the name `rf:NAME`, of which Linux keeps 15 bytes.

    Called in its main thread; threads begun later inherit it.
    """
    if sys.platform == "linux":
        ctypes.CDLL(None).prctl(_PR_SET_NAME, f"{PREFIX}{name}".encode(), 0, 0, 0)
