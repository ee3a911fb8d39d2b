"""How glibc's malloc treats a process that needs the same large arrays again in every step.

By default it gives each one back to the system when it is freed, and the next must be cleared and
mapped again, page by page: of a learner's step a twentieth (thousands of page faults). Holds true:
on systems without `mallopt` (macOS, musl) nothing is changed. Knows nothing of what is allocated.
"""

from __future__ import annotations

import ctypes

_TRIM_THRESHOLD, _MMAP_THRESHOLD = -1, -3  # of malloc.h
_LARGEST = 2**31 - 1


def keep_freed_memory() -> None:
    """Have this process keep up to 2 GiB of what it frees, for what it allocates next."""
    libc = ctypes.CDLL(None)
    if hasattr(libc, "mallopt"):
        libc.mallopt(_MMAP_THRESHOLD, 2**30)
        libc.mallopt(_TRIM_THRESHOLD, _LARGEST)


__all__ = ["keep_freed_memory"]
