"""The history index: responses as they were generated, found by what stood before.

One process writes; others may read the same shared memory meanwhile, without locks: what they find
may be torn, never out of bounds. New text takes the place of the oldest. Chains through flat arrays
take about a tenth of the memory of the suffix trees of RhymeRL (arXiv 2508.18588) and
SuffixDecoding (arXiv 2411.04975), and a token is entered in constant time.
"""

from __future__ import annotations

import hashlib
from collections.abc import Sequence

import numpy as np

from rhymeflow.histospec import kernels, storage
from rhymeflow.histospec.handle import IndexHandle
from rhymeflow.histospec.storage import Arrays
from rhymeflow.utils import shared_memory


def prompt_key(prompt_ids: Sequence[int]) -> int:
    """Return 63 bits that stand for a prompt, the same in every process and run."""
    digest = hashlib.blake2b(np.asarray(prompt_ids, "<i4").tobytes(), digest_size=8).digest()
    return int.from_bytes(digest, "little") >> 1


class Index:
    """Text of responses, in private or in shared memory.

    Holds `max_tokens` tokens of `max_responses` responses (fewer tokens where responses are much
    shorter than a block of 26). The process that made a shared one frees it by `close`; `prefix` is
    that of its name.
    """

    def __init__(
        self,
        *,
        max_tokens: int,
        max_responses: int,
        shared: bool = False,
        prefix: str = "rhymeflow-history",
    ) -> None:
        num_blocks, num_heads = storage.sizes(max_tokens, max_responses)
        self.handle: IndexHandle | None = None
        if shared:
            self.handle, arrays = storage.create(num_blocks, num_heads, max_responses, prefix)
        else:
            arrays = storage.private(num_blocks, num_heads, max_responses)
        arrays.header[: kernels.NUM_TOKENS] = 1  # 0 is no block and no response
        self._take(arrays, owns=shared)

    @classmethod
    def attach(cls, handle: IndexHandle, *, writable: bool = False) -> Index:
        """Map another process's index: for its one writer, or for reading.

        Raises:
            FileNotFoundError: the creator is gone.
        """
        index = cls.__new__(cls)
        index.handle = handle
        index._take(storage.attach(handle, writable=writable), owns=False)
        return index

    def _take(self, arrays: Arrays, *, owns: bool) -> None:
        self._arrays = arrays
        self._owns = owns
        self.readable = storage.readable(arrays)
        """The arrays, for compiled readers."""

    def close(self) -> None:
        """Free the memory, if this process made it; others that mapped it keep it till they end."""
        if self._owns:
            self._owns = False
            shared_memory.free(self.handle.name)

    def clear(self) -> None:
        """Forget everything; also what a writer that died may have left half done."""
        header = self._arrays.header
        header[kernels.FIRST_BLOCK] = header[kernels.NEXT_BLOCK]
        header[kernels.FIRST_RESPONSE] = header[kernels.NEXT_RESPONSE]
        header[kernels.NUM_TOKENS] = 0

    def begin(
        self,
        prompt: int,
        prompt_tail: Sequence[int],
        *,
        sample: int,
        noise_epoch: int,
    ) -> int:
        """Enter a response to `prompt` (a `prompt_key`) and return its number.

        `prompt_tail`, the end of the prompt or all of it, is stored before the response: so the
        first token too is found by what stands before it, and the prompt's words are proposed to
        its own responses. `noise_epoch` -1: unknown.
        """
        tail = np.asarray(prompt_tail, np.int32)
        response = kernels.begin(self._arrays, prompt, len(tail), sample, noise_epoch)
        self.extend(response, tail)
        return response

    def extend(self, response: int, tokens: Sequence[int]) -> None:
        """Append tokens to a response."""
        self.extend_many(
            np.array([response]), np.asarray(tokens, np.int32), np.array([0, len(tokens)])
        )

    def extend_many(self, responses: np.ndarray, tokens: np.ndarray, offsets: np.ndarray) -> None:
        """Append tokens[offsets[i]:offsets[i + 1]] (int32) to responses[i] (int64), for all i."""
        kernels.append_many(self._arrays, responses, tokens, offsets)

    def finish(self, response: int, reward: float | None) -> None:
        """Say that a response is complete, and its reward if there is one.

        May be called again when the reward comes later.
        """
        kernels.finish(self._arrays, response, np.nan if reward is None else float(reward))

    @property
    def num_tokens(self) -> int:
        """Tokens that are stored, the prompts' tails included."""
        return int(self._arrays.header[kernels.NUM_TOKENS])

    @property
    def num_responses(self) -> int:
        """Responses of which there is a record."""
        header = self._arrays.header
        begun = header[kernels.NEXT_RESPONSE] - header[kernels.FIRST_RESPONSE]
        return int(min(begun, len(self._arrays.records)))

    @property
    def num_bytes(self) -> int:
        """Memory that the index takes, tables of chains included, however full it is."""
        return sum(array.nbytes for array in self._arrays)
