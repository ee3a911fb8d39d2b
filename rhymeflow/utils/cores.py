"""How the workers of a run share the cores of this machine."""

from __future__ import annotations

import os


def share_of_cores(num_workers: int) -> int:
    """Threads for each of `num_workers` that compute at once on the cores this process may use."""
    return max(1, len(os.sched_getaffinity(0)) // num_workers)
