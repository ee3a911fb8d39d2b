"""The history index: earlier responses, searched by the tokens that precede a position.

One process writes; others may read the same shared memory at the same time without locks: reads may
be torn, but never out of bounds. New text overwrites the oldest. Chains through flat arrays take
about a tenth of the memory of the suffix trees of RhymeRL (arXiv 2508.18588) and SuffixDecoding
(arXiv 2411.04975), and a token is added in constant time."""

from __future__ import annotations

import hashlib
import math
import mmap
from collections.abc import Sequence
from typing import NamedTuple

import numpy as np

from rhymeflow.histospec import kernels
from rhymeflow.histospec.draft import IndexHandle
from rhymeflow.utils import shared_memory

PROMPT_TAIL = 16  # last tokens of the prompt that are indexed with a response


def prompt_key(prompt_ids: Sequence[int]) -> int:
    """Hash a prompt to 63 bits, the same in every process and run."""
    digest = hashlib.blake2b(np.asarray(prompt_ids, "<i4").tobytes(), digest_size=8).digest()
    return int.from_bytes(digest, "little") >> 1


class Arrays(NamedTuple):
    """The arrays of the index: L levels, B blocks, R responses."""

    header: np.ndarray  # int64 [16]: counters, see `kernels`
    words: np.ndarray
    """int32 [B * 32]: blocks of text, each a header of six words and then its tokens."""
    links: np.ndarray
    """uint32 [L, B * 32]: for each token's position the next older position in its chain."""
    heads: np.ndarray  # uint32 [L, power of two]: the newest position of each chain
    prompts: np.ndarray  # int64 [power of two]: the newest response of each bucket of prompts
    records: np.ndarray  # int64 [R, 12]: a record per response, see `kernels`
    rewards: np.ndarray  # float32 [R]; NaN: unknown
    merits: np.ndarray  # float32 [R]: weight by the reward; 1: unknown


class Index:
    """An index of responses, in private or in shared memory.

    Holds `max_tokens` tokens of `max_responses` responses (fewer tokens if responses are much
    shorter than a block of 26). The process that created a shared index frees it with `close`;
    `prefix` begins the name of the shared memory."""

    def __init__(
        self,
        *,
        max_tokens: int,
        max_responses: int,
        shared: bool = False,
        prefix: str = "rhymeflow-history",
    ) -> None:
        name = shared_memory.new_name(prefix) if shared else ""
        handle = IndexHandle(name, *_sizes(max_tokens, max_responses), max_responses)
        if shared:
            buffer = shared_memory.create(
                name,
                sum(size for *_, size in _layout(handle)),
                what="the history index",
                advice="drafting.history_tokens sets its size, for a container --shm-size that of "
                "the memory",
            )
            arrays = _mapped(handle, buffer)
        else:
            arrays = Arrays(*(np.zeros(shape, dtype) for shape, dtype, _ in _layout(handle)))
        arrays.header[: kernels.NUM_TOKENS] = 1  # 0 is no block and no response
        self._take(handle, arrays, owns=shared)

    @classmethod
    def attach(cls, handle: IndexHandle) -> Index:
        """Map another process's index for reading; `FileNotFoundError` if its creator is gone."""
        index = cls.__new__(cls)
        buffer = shared_memory.attach(handle.name, writable=False)
        index._take(handle, _mapped(handle, buffer), owns=False)
        return index

    def _take(self, handle: IndexHandle, arrays: Arrays, *, owns: bool) -> None:
        self.handle = handle  # the name (empty for private memory) and sizes of the index
        self._arrays = arrays
        self._owns = owns
        self.readable = Arrays(*(array.view() for array in arrays))
        """Read-only views, also of the own index, so that readers are compiled for one type."""
        for view in self.readable:
            view.flags.writeable = False

    def close(self) -> None:
        """Free shared memory that this process created; processes that mapped it keep theirs."""
        if self._owns:
            self._owns = False
            shared_memory.free(self.handle.name)

    def begin(self, prompt_ids: Sequence[int], *, sample: int, noise_epoch: int) -> int:
        """Add a response to this prompt and return its number. The last tokens of the prompt are
        stored before the response, so that its first token is found too, and text of the prompt is
        proposed to its own responses. `noise_epoch` -1: unknown."""
        key, tail = prompt_key(prompt_ids), prompt_ids[-PROMPT_TAIL:]
        response: int = kernels.begin(self._arrays, key, len(tail), sample, noise_epoch)
        self.extend(response, tail)
        return response

    def extend(self, response: int, tokens: Sequence[int] | np.ndarray) -> None:
        """Append tokens to a response."""
        self.extend_many(
            np.array([response]), np.asarray(tokens, np.int32), np.array([0, len(tokens)])
        )

    def extend_many(self, responses: np.ndarray, tokens: np.ndarray, offsets: np.ndarray) -> None:
        """Append tokens[offsets[i]:offsets[i + 1]] (int32) to responses[i] (int64), for all i."""
        kernels.append_many(self._arrays, responses, tokens, offsets)

    def finish(self, response: int, reward: float | None) -> None:
        """Record that a response is complete, and its reward, which may follow in a later call."""
        kernels.finish(self._arrays, response, np.nan if reward is None else float(reward))

    @property
    def num_tokens(self) -> int:
        """Number of stored tokens, prompts' tails included."""
        return int(self._arrays.header[kernels.NUM_TOKENS])

    @property
    def num_responses(self) -> int:
        """Number of responses that have a record."""
        begun = int(self._arrays.header[kernels.NEXT_RESPONSE]) - 1
        return min(begun, len(self._arrays.records))

    @property
    def num_bytes(self) -> int:
        """Size of the index in bytes, however full it is."""
        return sum(array.nbytes for array in self._arrays)


def _sizes(max_tokens: int, max_responses: int) -> tuple[int, int]:
    """Return the numbers of blocks and heads; each response may leave its last block half empty."""
    # With too few blocks, a growing response would overwrite itself.
    blocks = max(8, -(-max_tokens // kernels.BLOCK_TOKENS) + min(max_responses, max_tokens) // 2)
    return blocks, _power_of_two(max(1024, max_tokens))


def _power_of_two(number: int) -> int:
    return 1 << (number - 1).bit_length()


def _layout(handle: IndexHandle) -> list[tuple[tuple[int, ...], type, int]]:
    """Return each array's shape, type and bytes in shared memory, where they are contiguous."""
    num_words, num_responses = handle.num_blocks * kernels.BLOCK_WORDS, handle.max_responses
    shapes: list[tuple[tuple[int, ...], type]] = [
        ((16,), np.int64),
        ((num_words,), np.int32),
        ((kernels.NUM_LEVELS, num_words), np.uint32),
        ((kernels.NUM_LEVELS, handle.num_heads), np.uint32),
        ((_power_of_two(num_responses),), np.int64),
        ((num_responses, kernels.RECORD_WORDS), np.int64),
        ((num_responses,), np.float32),
        ((num_responses,), np.float32),
    ]
    return [
        (shape, dtype, shared_memory.whole_lines(math.prod(shape) * np.dtype(dtype).itemsize))
        for shape, dtype in shapes
    ]


def _mapped(handle: IndexHandle, buffer: mmap.mmap) -> Arrays:
    arrays: list[np.ndarray] = []
    start = 0
    for shape, dtype, size in _layout(handle):
        arrays.append(np.frombuffer(buffer, dtype, math.prod(shape), start).reshape(shape))
        start += size
    return Arrays(*arrays)
