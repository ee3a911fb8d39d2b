"""Runs compiled loops on several threads."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from concurrent.futures import ThreadPoolExecutor
from functools import cache
from typing import Any


def run(work: Callable[[Any], None], parts: Iterable[Any], num_threads: int) -> None:
    """Call `work` with every part, on `num_threads` threads if there are several."""
    if num_threads > 1:
        for _ in _pool(num_threads).map(work, parts):
            pass
    else:
        for part in parts:
            work(part)


@cache
def _pool(num_threads: int) -> ThreadPoolExecutor:
    return ThreadPoolExecutor(num_threads, "compiled")
