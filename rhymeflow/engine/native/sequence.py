"""A request's progress inside the engine; all that outlasts the engine is in its `Request`."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from rhymeflow.engine.base import Request, Segment


@dataclass(slots=True, eq=False)
class Sequence:
    """A request inside the engine: its token ids, of which the first `cached` have keys and values.
    Lowering `cached` discards keys and values."""

    request: Request
    stream: int  # the response's noise stream, see `noise.stream`
    ids: list[int]  # prompt and response so far
    prompt: tuple[int, ...]
    slot: Any = None  # its `cache.Slot`, if it has one
    cached: int = 0
    is_mixed: bool = False  # some of its cache was computed under older weights
    has_prompt: bool = True
    """If the prompt is cached: nothing has been given back that the token after it sees."""
    prompt_tokens: Any = None  # the prompt as an array, once it was compared with another

    @property
    def remaining(self) -> int:
        """Tokens to run before the next one can be sampled; at least 1."""
        return len(self.ids) - self.cached

    @property
    def held(self) -> int:
        """Tokens that take room in the cache: the cached ones that were not given back."""
        return max(0, self.cached - (0 if self.slot is None else self.slot.start))

    @property
    def needed(self) -> int:
        """Tokens that take room in the cache when the next one is sampled."""
        return self.held + self.remaining

    def extend(
        self, tokens: list[int], logprobs: list[float], segment: Segment, num_accepted: int = 0
    ) -> None:
        """Append sampled tokens; see `Request.extend`."""
        self.request.extend(tokens, logprobs, segment, num_accepted)
        self.ids += tokens
