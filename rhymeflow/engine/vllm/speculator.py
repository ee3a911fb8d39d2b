"""The drafters of vLLM's model runners: they propose nothing, so that ours can.

vLLM asks its proposer at the end of an iteration, without naming the requests. Our drafter needs
their names and what the next iteration runs, so the engine drafts before it (`engine/drafter.py`)
and hands drafts to vLLM's scheduler. A runner verifies them only if it was made with a drafter. The
second one (V2) verifies `req_states.draft_tokens`, on the device, so drafts are put there too, by
one copy that nothing waits for.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import Tensor

PROPOSER = {"method": "custom_class", "model": f"{__name__}.NoProposals"}
"""How vLLM's `speculative_config` names that of the first runner (V1)."""

SPECULATOR = {"method": "ngram_gpu", "prompt_lookup_min": 1, "prompt_lookup_max": 1}
"""What makes V2 verify drafts: the method that loads no draft model."""


class NoProposals:
    """A proposer for `custom_class`."""

    def __init__(self, vllm_config: Any) -> None:
        """vLLM's configuration is not needed."""

    def load_model(self, *args: Any, **kwargs: Any) -> None:
        """There is no draft model."""

    def propose(
        self, sampled_token_ids: Sequence[Any], *args: Any, **kwargs: Any
    ) -> list[list[int]]:
        """Nothing, for each request."""
        return [[] for _ in sampled_token_ids]


class NoSpeculation:
    """A `BaseSpeculator` of V2 that proposes nothing."""

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
        """Zeros, a row for each request, which are not verified."""
        return self._none[: input_batch.num_reqs]


def put_drafts(req_states: Any, drafts: Mapping[str, list[int]]) -> None:
    """Have these verified in the next iteration, by vLLM's names of requests."""
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
