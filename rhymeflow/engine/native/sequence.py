"""How far a running response has come inside the engine; what is to last is in its `Request`."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from rhymeflow.engine.base import Request, Segment


@dataclass(slots=True, eq=False)
class Sequence:
    """A request inside the engine: its token ids, and how many are in the cache.

    `cached` tokens have keys and values; the others are still to be run. Lowering `cached` is all
    that taking tokens back needs.
    """

    request: Request
    stream: int
    """The response's noise stream, see `noise.stream`."""
    ids: list[int]
    """Prompt and response so far."""
    prompt: tuple[int, ...]
    """The prompt, to find others with the same one."""
    slot: Any = None
    """Where the cache keeps it; the cache's business."""
    cached: int = 0
    is_mixed: bool = False
    """Some of what is cached was computed under weights that the model no longer has."""

    @property
    def remaining(self) -> int:
        """Tokens to run before the next one can be sampled; at least 1."""
        return len(self.ids) - self.cached

    def extend(
        self, tokens: list[int], logprobs: list[float], segment: Segment, num_accepted: int = 0
    ) -> None:
        """Append sampled tokens; see `Request.extend`."""
        self.request.extend(tokens, logprobs, segment, num_accepted)
        self.ids += tokens
