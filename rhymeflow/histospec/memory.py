"""The arrays an index is made of, in this process's memory or in memory that others can map.

Holds true:
- all arrays lie in one piece, in an order that follows from three numbers, so a handle of a name
  and those numbers is all that another process needs;
- zeros everywhere are an empty index;
- a reader's arrays cannot be written;
- shared memory belongs to the process that created it: it is freed when that process says so, or by
  the interpreter's resource tracker when that process dies. It is mapped directly, for the reason
  that `servers/memory.py` gives.

Knows nothing of what the arrays mean; `kernels.py` says that.
"""

from __future__ import annotations

import mmap
import os
import secrets
from multiprocessing import resource_tracker
from pathlib import Path
from typing import NamedTuple

import numpy as np

from rhymeflow.errors import UserError
from rhymeflow.histospec import kernels
from rhymeflow.histospec.handle import IndexHandle

_DIRECTORY = Path("/dev/shm")  # where Linux shows POSIX shared memory as files
_TRACKED_AS = "shared_memory"  # the resource tracker's word for it
_LINE = 64


class Arrays(NamedTuple):
    """The index as compiled code sees it. L levels, B blocks, R responses."""

    header: np.ndarray
    """int64 [16]: counters, see `kernels`."""
    words: np.ndarray
    """int32 [B * 32]: blocks of text, each a few words about it and then its tokens."""
    links: np.ndarray
    """uint32 [L, B * 32]: for the position of a token the position before it in its chain."""
    heads: np.ndarray
    """uint32 [L, power of two]: the newest position of each chain."""
    prompts: np.ndarray
    """int64 [power of two]: the newest response of each bucket of prompts."""
    records: np.ndarray
    """int64 [R, 12]: what is known of a response."""
    rewards: np.ndarray
    """float32 [R], not a number: unknown."""
    merits: np.ndarray
    """float32 [R]: the weight that follows from the reward, 1 where nothing is known."""


def sizes(max_tokens: int, max_responses: int) -> tuple[int, int]:
    """Blocks and heads for so much text: each response may leave its last block half empty."""
    # A chain's newest block may be overwritten while it grows: never fewer than a few blocks.
    blocks = max(8, -(-max_tokens // kernels.BLOCK_TOKENS) + min(max_responses, max_tokens) // 2)
    return blocks, _power_of_two(max(1024, max_tokens))


def private(num_blocks: int, num_heads: int, max_responses: int) -> Arrays:
    """Return an empty index in this process's memory."""
    shapes = _shapes(num_blocks, num_heads, max_responses)
    return Arrays(*(np.zeros(shape, dtype) for shape, dtype in shapes))


def create(num_blocks: int, num_heads: int, max_responses: int) -> tuple[IndexHandle, Arrays]:
    """Make an empty index in shared memory.

    Raises:
        UserError: the machine's shared memory is too small. Were it not reserved here, the first
            write past its end would kill the process with SIGBUS.
    """
    name = f"rhymeflow-history-{os.getpid()}-{secrets.token_hex(4)}"
    handle = IndexHandle(name, num_blocks, num_heads, max_responses)
    size = _num_bytes(handle)
    descriptor = os.open(path_of(handle), os.O_RDWR | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, 0o600)
    try:
        resource_tracker.register(f"/{name}", _TRACKED_AS)
        os.posix_fallocate(descriptor, 0, size)
        return handle, _carve(handle, mmap.mmap(descriptor, size, mmap.MAP_SHARED))
    except OSError as error:
        free(handle)
        raise UserError(
            f"{_DIRECTORY} has no room for the history index ({size / 2**20:.0f} MiB): "
            f"{error.strerror}; drafting.history_tokens sets its size, for a container --shm-size"
            " that of the memory"
        ) from error
    finally:
        os.close(descriptor)


def attach(handle: IndexHandle, *, writable: bool) -> Arrays:
    """Map an index that another process created.

    Raises:
        FileNotFoundError: the creator is gone.
    """
    descriptor = os.open(path_of(handle), os.O_RDWR if writable else os.O_RDONLY)
    try:
        protection = mmap.PROT_READ | (mmap.PROT_WRITE if writable else 0)
        buffer = mmap.mmap(descriptor, 0, mmap.MAP_SHARED, protection)
    finally:
        os.close(descriptor)
    return _carve(handle, buffer)


def free(handle: IndexHandle) -> None:
    """Remove the name; the memory goes when the last process that mapped it does."""
    path_of(handle).unlink()
    resource_tracker.unregister(f"/{handle.name}", _TRACKED_AS)


def path_of(handle: IndexHandle) -> Path:
    """The file that stands for the memory."""
    return _DIRECTORY / handle.name


def readable(arrays: Arrays) -> Arrays:
    """Return views that cannot be written, so that compiled readers see one type of array."""
    views = Arrays(*(array.view() for array in arrays))
    for view in views:
        view.flags.writeable = False
    return views


def _shapes(num_blocks: int, num_heads: int, max_responses: int) -> list[tuple[tuple, type]]:
    num_words = num_blocks * kernels.BLOCK_WORDS
    return [
        ((16,), np.int64),
        ((num_words,), np.int32),
        ((kernels.NUM_LEVELS, num_words), np.uint32),
        ((kernels.NUM_LEVELS, num_heads), np.uint32),
        ((_power_of_two(max_responses),), np.int64),
        ((max_responses, kernels.RECORD_WORDS), np.int64),
        ((max_responses,), np.float32),
        ((max_responses,), np.float32),
    ]


def _carve(handle: IndexHandle, buffer: mmap.mmap) -> Arrays:
    arrays, start = [], 0
    for shape, dtype in _shapes(handle.num_blocks, handle.num_heads, handle.max_responses):
        count = int(np.prod(shape))
        arrays.append(np.frombuffer(buffer, dtype, count, start).reshape(shape))
        start += _lines(count * np.dtype(dtype).itemsize)
    return Arrays(*arrays)


def _num_bytes(handle: IndexHandle) -> int:
    shapes = _shapes(handle.num_blocks, handle.num_heads, handle.max_responses)
    return sum(_lines(int(np.prod(shape)) * np.dtype(dtype).itemsize) for shape, dtype in shapes)


def _lines(num_bytes: int) -> int:
    return -(-num_bytes // _LINE) * _LINE


def _power_of_two(number: int) -> int:
    return 1 << (number - 1).bit_length()


__all__ = ["Arrays", "attach", "create", "free", "path_of", "private", "readable"]
