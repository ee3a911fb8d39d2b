"""What vLLM's model runner (V1) is given as its proposer: one that proposes nothing.

vLLM asks its proposer at the end of an iteration, in the worker, without saying which requests it
asks for. Drafts from history need to know (siblings of a group are not interchangeable), and how
many to verify depends on what the next iteration runs. So drafts are made by the engine before the
iteration (`drafting.py`), and handed to vLLM's scheduler by its own `update_draft_token_ids`. The
runner must have been made with a proposer to verify what the scheduler hands on; this is it.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

METHOD = {"method": "custom_class", "model": f"{__name__}.NoProposals"}
"""How vLLM's `speculative_config` names it."""


class NoProposals:
    """A proposer for `custom_class`."""

    def __init__(self, vllm_config: Any) -> None:
        """vLLM's configuration is not needed."""

    def load_model(self, *args: Any, **kwargs: Any) -> None:
        """There is no draft model."""

    def propose(self, sampled_token_ids: Sequence[Any], *args: Any, **kwargs: Any) -> list[list]:
        """Nothing, for each request."""
        return [[] for _ in sampled_token_ids]
