"""The cores of this machine: how many are usable, and pinning processes to them."""

from __future__ import annotations

import os
from itertools import pairwise

from rhymeflow.errors import UserError


def usable_cores() -> int:
    """Return how many cores this process may use, or all of them if the system does not say."""
    if hasattr(os, "sched_getaffinity"):
        return len(os.sched_getaffinity(0))
    return os.cpu_count() or 1


def can_stay_on(cpus: tuple[int, ...], field: str) -> None:
    """Check that a process can be pinned to these cores, the value of `field`. Raises `UserError`
    if this system cannot pin processes, a core does not exist, or `cpus` is empty."""
    if not hasattr(os, "sched_setaffinity"):
        raise UserError(f"{field}: this system cannot pin a process to cores; leave it out")
    # A process may leave the cores that it was started on, so all cores of the machine count.
    count = max(os.cpu_count() or 1, max(os.sched_getaffinity(0)) + 1)
    missing = [cpu for cpu in cpus if cpu >= count]
    if missing:
        raise UserError(f"{field}: there is no core {missing[0]}; cores are 0 to {count - 1}")
    if not cpus:
        raise UserError(f"{field}: names no core; null pins nothing")


def cores_of_ranks(cpus: tuple[int, ...] | None, num_ranks: int) -> list[tuple[int, ...] | None]:
    """Divide cores among ranks, in order and as evenly as possible; None pins nothing."""
    if cpus is None:
        return [None] * num_ranks
    ends = [len(cpus) * rank // num_ranks for rank in range(num_ranks + 1)]
    return [cpus[start:end] for start, end in pairwise(ends)]
