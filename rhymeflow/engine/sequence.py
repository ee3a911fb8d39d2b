"""What the engine is asked for, what it gives back, and how far a running response has come.

Holds true: a `Request` is the whole of a response's state outside the engine. Whoever holds one
that was interrupted can give it to any engine and it goes on as if nothing had happened. The
engine's own books (`Sequence`) can be thrown away at any time. Knows nothing of tensors.
"""

from __future__ import annotations

from collections.abc import Hashable
from dataclasses import dataclass, field
from typing import Any, Literal, NamedTuple


class NoiseKey(NamedTuple):
    """Names a response's sampling noise; with the run's seed and a position it is all of it."""

    prompt: int
    epoch: int
    """Of the noise: 0 in every epoch for a response whose noise rhymes."""
    sample: int


@dataclass(frozen=True, slots=True)
class Sampling:
    """How tokens are chosen and when a response ends."""

    temperature: float
    """0 is greedy."""
    top_p: float
    """1 is off."""
    top_k: int
    """0 is off."""
    max_new_tokens: int
    """Length at which a response ends with reason `length`."""
    stop_token_ids: frozenset[int]
    """A response ends with the first of these, which is part of it."""


@dataclass(frozen=True, slots=True)
class Segment:
    """Tokens from position `start` of the response on were made by `instance` under `version`."""

    start: int
    version: int
    instance: str


@dataclass(slots=True)
class Request:
    """One response to be made, or gone on with where `tokens` is not empty.

    The engine appends to `tokens`, `logprobs` (natural logarithm, under the distribution sampled
    from) and `segments`, and counts in `steps` and `drafted`; it changes nothing else. `logprobs`
    are those of the last tokens: of tokens that were made elsewhere they need not be known here.
    """

    id: Hashable
    prompt_ids: list[int]
    noise_key: NoiseKey
    sampling: Sampling
    tokens: list[int] = field(default_factory=list)
    logprobs: list[float] = field(default_factory=list)
    segments: list[Segment] = field(default_factory=list)
    steps: int = 0
    """Iterations of the engine that made tokens of it."""
    drafted: int = 0
    """Tokens that were drafted for it and verified, accepted or not."""

    def finish_reason(self) -> Literal["stop", "length"] | None:
        """Why the response is complete, or None. A stop token at the last place counts as stop."""
        if self.tokens and self.tokens[-1] in self.sampling.stop_token_ids:
            return "stop"
        return "length" if len(self.tokens) >= self.sampling.max_new_tokens else None


class Finished(NamedTuple):
    """A response that is complete."""

    request: Request
    reason: Literal["stop", "length"]


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
    handle: int | None = None
    """The drafter's name for it."""
    is_mixed: bool = False
    """Some of what is cached was computed under weights that the model no longer has."""

    @property
    def remaining(self) -> int:
        """Tokens to run before the next one can be sampled; at least 1."""
        return len(self.ids) - self.cached

    @property
    def room(self) -> int:
        """Tokens that the response may still become longer by; at least 1."""
        return self.request.sampling.max_new_tokens - len(self.request.tokens)

    def extend(self, tokens: list[int], logprobs: list[float], segment: Segment) -> None:
        """Take in sampled tokens; a segment begins where version or instance change."""
        request = self.request
        last = request.segments[-1] if request.segments else None
        if last is None or last.version != segment.version or last.instance != segment.instance:
            request.segments.append(segment)
        request.tokens += tokens
        request.logprobs += logprobs
        self.ids += tokens


__all__ = ["Finished", "NoiseKey", "Request", "Sampling", "Segment", "Sequence"]
