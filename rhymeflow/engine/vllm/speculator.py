"""Drafters for vLLM's model runners that propose nothing: the engine drafts instead.

vLLM asks its drafter at the end of an iteration, without naming the requests. Ours needs their ids
and what the next iteration runs, so the engine drafts before it (`engine/drafter.py`) and hands
drafts to vLLM's scheduler. A runner verifies them only if it was built with a drafter. V2 verifies
`req_states.draft_tokens`, on the device, so drafts are also copied there, asynchronously."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import Tensor

PROPOSER = {"method": "custom_class", "model": f"{__name__}.NoProposals"}
"""`speculative_config` for V1."""

SPECULATOR = {"method": "ngram_gpu", "prompt_lookup_min": 1, "prompt_lookup_max": 1}
"""`speculative_config` for V2: with this method it verifies drafts and loads no draft model."""


class NoProposals:
    """A V1 drafter, of method `custom_class`, that proposes nothing."""

    def __init__(self, vllm_config: Any) -> None:
        """Ignore vLLM's configuration."""

    def load_model(self, *args: Any, **kwargs: Any) -> None:
        """Load nothing."""

    def propose(
        self, sampled_token_ids: Sequence[Any], *args: Any, **kwargs: Any
    ) -> list[list[int]]:
        """Return no tokens for each request."""
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
        """Do nothing: there is no model to capture."""

    def capture(self) -> None:
        """Do nothing."""

    def propose(self, input_batch: Any, *args: Any, **kwargs: Any) -> Tensor:
        """Return a row of zeros for each request; they are not verified."""
        return self._none[: input_batch.num_reqs]


def put_drafts(req_states: Any, drafts: Mapping[str, list[int]]) -> None:
    """Have the next iteration verify these drafts, by vLLM's request id."""
    into = req_states.draft_tokens
    width = max(map(len, drafts.values()))
    slots = [req_states.req_id_to_index[name] for name in drafts]
    rows = [
        [slot, *draft, *[0] * (width - len(draft))]
        for slot, draft in zip(slots, drafts.values(), strict=True)
    ]
    sent = on_device(torch.tensor(rows, dtype=torch.int64), into.device)
    into[sent[:, 0], :width] = sent[:, 1:]


def on_device(tensor: Tensor, device: torch.device) -> Tensor:
    """Copy to the device, without waiting for it."""
    if device.type == "cuda":
        tensor = tensor.pin_memory()
    return tensor.to(device, non_blocking=True)
