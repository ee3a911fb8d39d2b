"""The arrays an index is made of, in this process's memory or in memory that others can map.

All lie in one piece, in an order that follows from three numbers, so a handle of a name and those
numbers is all that another process needs. Zeros everywhere are an empty index.
"""

from __future__ import annotations

import mmap
from typing import NamedTuple

import numpy as np

from rhymeflow.histospec import kernels
from rhymeflow.histospec.handle import IndexHandle
from rhymeflow.utils import shared_memory


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


def create(
    num_blocks: int, num_heads: int, max_responses: int, prefix: str
) -> tuple[IndexHandle, Arrays]:
    """Make an empty index in shared memory, whose name begins with the prefix.

    Raises:
        UserError: the machine's shared memory is too small.
    """
    name = shared_memory.new_name(prefix)
    handle = IndexHandle(name, num_blocks, num_heads, max_responses)
    buffer = shared_memory.create(
        name,
        _num_bytes(handle),
        what="the history index",
        advice="drafting.history_tokens sets its size, for a container --shm-size that of the "
        "memory",
    )
    return handle, _carve(handle, buffer)


def attach(handle: IndexHandle, *, writable: bool) -> Arrays:
    """Map an index that another process created.

    Raises:
        FileNotFoundError: the creator is gone.
    """
    return _carve(handle, shared_memory.attach(handle.name, writable=writable))


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
        start += shared_memory.whole_lines(count * np.dtype(dtype).itemsize)
    return Arrays(*arrays)


def _num_bytes(handle: IndexHandle) -> int:
    shapes = _shapes(handle.num_blocks, handle.num_heads, handle.max_responses)
    return sum(
        shared_memory.whole_lines(int(np.prod(shape)) * np.dtype(dtype).itemsize)
        for shape, dtype in shapes
    )


def _power_of_two(number: int) -> int:
    return 1 << (number - 1).bit_length()
