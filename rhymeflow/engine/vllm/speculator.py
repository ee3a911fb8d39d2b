"""Drafts for vLLM's second model runner (V2): where they are put, and a speculator of nothing.

V2 verifies the tokens that stand in its `req_states.draft_tokens` on the device, as many of each
request as the scheduler says (`scheduled_spec_decode_tokens`). It takes them from a speculator at
the end of an iteration. Drafts from history are made by the engine between two iterations, so they
are put there before the next one: by one copy to the device that nothing waits for. A speculator
must be there for the runner to verify at all; `NoSpeculation` takes the place of the one that vLLM
made for `ngram_gpu`.

Holds true: a draft is put in the slot of the request that it is for. Imports no vLLM.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor

METHOD = {"method": "ngram_gpu", "prompt_lookup_min": 1, "prompt_lookup_max": 1}
"""What makes V2 verify drafts, of `speculative_config`: the method that loads no draft model."""


class NoSpeculation:
    """A `BaseSpeculator` of V2 that has the runner keep what was put there."""

    supports_mm_inputs = False
    draft_logits = None
    num_query_per_req = 1
    num_extra_query_per_req = 0

    def __init__(self, req_states: Any) -> None:
        self._none = torch.zeros_like(req_states.draft_tokens)

    def init_cudagraph_manager(self, cudagraph_mode: Any) -> None:
        """It runs nothing on the device."""

    def capture(self) -> None:
        """Likewise."""

    def propose(self, input_batch: Any, *args: Any, **kwargs: Any) -> Tensor:
        """Tokens that nobody asks for, one row for each request."""
        return self._none[: input_batch.num_reqs]


def put_drafts(req_states: Any, drafts: Mapping[str, list[int]]) -> None:
    """Have these verified in the next iteration, by vLLM's names of requests."""
    if not drafts:
        return
    into = req_states.draft_tokens
    width = max(map(len, drafts.values()))
    slots = [req_states.req_id_to_index[name] for name in drafts]
    rows = [
        [slot, *draft, *[0] * (width - len(draft))]
        for slot, draft in zip(slots, drafts.values(), strict=True)
    ]
    packed = torch.tensor(rows, dtype=torch.int64, pin_memory=into.is_cuda)
    there = packed.to(into.device, non_blocking=True)
    into[there[:, 0], :width] = there[:, 1:]


__all__ = ["METHOD", "NoSpeculation", "put_drafts"]
