"""A function in a process of its own, as a worker of the run would have it.

Holds true: started by `spawn`; its threads are set before torch can be imported, its cores before
it runs. What it raises is raised here. Knows nothing of what is measured.
"""

from __future__ import annotations

import multiprocessing
import os
from collections.abc import Callable
from concurrent.futures import ProcessPoolExecutor
from typing import TypeVar

Result = TypeVar("Result")


def isolated(
    function: Callable[[str], Result], argument: str, num_threads: int, cpus: tuple[int, ...] | None
) -> Result:
    """Return what `function`, the top of a module's, makes of `argument` in a new process."""
    before = os.environ.get("OMP_NUM_THREADS")
    os.environ["OMP_NUM_THREADS"] = str(num_threads)
    try:
        with ProcessPoolExecutor(
            1, multiprocessing.get_context("spawn"), _prepare, (cpus,)
        ) as process:
            return process.submit(function, argument).result()
    finally:
        if before is None:
            del os.environ["OMP_NUM_THREADS"]
        else:
            os.environ["OMP_NUM_THREADS"] = before


def _prepare(cpus: tuple[int, ...] | None) -> None:
    if cpus is not None:
        os.sched_setaffinity(0, cpus)


__all__ = ["isolated"]
