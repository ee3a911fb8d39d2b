"""What names a shared index. Loads no numba: messages carry it to processes that draft nothing."""

from __future__ import annotations

import msgspec


class IndexHandle(msgspec.Struct, frozen=True, array_like=True):
    """What another process needs to reach a shared index."""

    name: str
    num_blocks: int
    num_heads: int
    max_responses: int
