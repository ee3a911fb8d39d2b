"""The GPUs that this process may use, by NVIDIA's driver (NVML): CUDA is not initialised.

A process that has initialised CUDA keeps memory of a GPU, and cannot be forked."""

from __future__ import annotations

import ctypes
import os
from functools import cache

VISIBLE = "CUDA_VISIBLE_DEVICES"
"""The environment variable that CUDA reads once, when a process first uses it."""

_LIBRARY = "libnvidia-ml.so.1"


@cache
def installed() -> int:
    """Return the number of GPUs of this machine; 0: it has none, or no driver for them."""
    count = ctypes.c_int(0)
    try:
        nvml = ctypes.CDLL(_LIBRARY)
    except OSError:
        return 0
    if nvml.nvmlInit_v2() or nvml.nvmlDeviceGetCount_v2(ctypes.byref(count)):
        return 0  # an error's number
    return count.value


def visible() -> tuple[str, ...]:
    """Return the GPUs that CUDA would find here, each as `CUDA_VISIBLE_DEVICES` names it."""
    count, named = installed(), os.environ.get(VISIBLE)
    if named is None or count == 0:
        return tuple(map(str, range(count)))
    found: list[str] = []
    for name in map(str.strip, named.split(",")):
        if not name.startswith(("GPU-", "MIG-")) and not (name.isdigit() and int(name) < count):
            break  # CUDA ignores the rest too
        found.append(name)
    return tuple(found)
