"""Tests, before an instance joins a run, that vLLM works as this engine assumes.

It generates a few dozen tokens: undisturbed, interrupted, and with right and wrong drafts. If our
sampler were not called, positions counted differently, or a draft given to another request, tokens
would differ or no draft be accepted. In bfloat16 the last bits of a product depend on the number of
rows, so one equal response in `NUM_TRIES` is enough."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from rhymeflow.engine.base import NoiseKey, Request, Sampling
from rhymeflow.histospec.draft import NONE, Draft, DraftStats
from rhymeflow.histospec.drafter import Drafter

if TYPE_CHECKING:
    from rhymeflow.engine.vllm.vllm_engine import VllmEngine

NUM_TOKENS = 12
NUM_TRIES = 3
MOST_ITERATIONS = 200
PROMPT = list(range(2, 42))  # longer than a block of the KV cache


class VllmDiffers(RuntimeError):  # noqa: N818 - it is what happened
    """vLLM does not work as this engine assumes."""


class KnownResponse(Drafter):
    """Drafts a known response, with every sixth token wrong."""

    def __init__(self, response: list[int], vocabulary: int) -> None:
        self.stats = DraftStats()
        self._response, self._vocabulary, self._num_generated = response, vocabulary, 0

    def begin(
        self, prompt_ids: list[int], tokens: list[int], *, sample: int, noise_epoch: int
    ) -> int:
        """Begin the only response."""
        self._num_generated = len(tokens)
        return 0

    def end(self, handle: int) -> None:
        """Do nothing."""

    def propose(
        self, handles: list[int], max_tokens: list[int], *, other_rows: int, kv_tokens: int
    ) -> list[Draft]:
        """Draft the next four tokens."""
        first = self._num_generated
        tokens = [
            token if position % 6 else (token + 1) % self._vocabulary
            for position, token in enumerate(self._response[first : first + 4], first)
        ]
        return [Draft(tokens, list(range(-1, len(tokens) - 1))) if tokens else NONE]

    def observe(self, handles: list[int], generated: list[list[int]], **costs: Any) -> None:
        """Count what was generated."""
        self._num_generated += len(generated[0])


def check(engine: VllmEngine, *, drafts: bool, has_sampler: bool) -> None:
    """Raise `VllmDiffers` if every try finds the same fault. `drafts`: also test drafting;
    `has_sampler`: the engine has a `CounterSampler`."""
    before = engine.num_draws() if has_sampler else 0
    tries = [_one_try(engine, number, drafts=drafts) for number in range(NUM_TRIES)]
    if has_sampler and engine.num_draws() == before:
        raise VllmDiffers("vLLM generated tokens that Rhymeflow's sampler did not draw")
    for faults in zip(*tries, strict=True):
        if all(faults):
            raise VllmDiffers(f"{faults[0]}, in {NUM_TRIES} of {NUM_TRIES} tries")


def _one_try(engine: VllmEngine, number: int, *, drafts: bool) -> list[str | None]:
    """Return a message for each kind of fault, or None where there is no fault."""
    plain = response(engine, number)
    again = _drain(engine, _request(number), interrupted=True)
    faults = [_difference("interrupted", plain, again)]
    if drafts:
        engine.draft_with(KnownResponse(plain.tokens, engine.vocabulary))
        drafted = _drain(engine, _request(number))
        engine.draft_with(None)
        faults.append(_difference("with drafts", plain, drafted))
        is_used = drafted.drafted > 0 and drafted.steps < plain.steps
        faults.append(None if is_used else "no drafted token was accepted")
    return faults


def response(engine: VllmEngine, number: int) -> Request:
    """Return a request with its response, the same for each number and version."""
    return _drain(engine, _request(number))


def _difference(condition: str, plain: Request, other: Request) -> str | None:
    if plain.tokens == other.tokens:
        return None
    return f"a response {condition} has tokens {other.tokens}, undisturbed {plain.tokens}"


def _request(number: int) -> Request:
    sampling = Sampling(1.0, 1.0, 0, NUM_TOKENS, frozenset())
    return Request("self-test", PROMPT.copy(), NoiseKey(number, 0, 0), sampling)


def _drain(engine: VllmEngine, request: Request, *, interrupted: bool = False) -> Request:
    engine.submit(request)
    for _ in range(MOST_ITERATIONS):
        if not engine.has_work:
            return request
        engine.poll(0.0)
        if interrupted and len(request.tokens) == NUM_TOKENS // 2:
            interrupted = False  # once: a long prompt takes several iterations before a token
            (request,) = engine.interrupt()
            engine.submit(request)
    raise VllmDiffers(f"vLLM generates no {NUM_TOKENS} tokens in {MOST_ITERATIONS} iterations")
