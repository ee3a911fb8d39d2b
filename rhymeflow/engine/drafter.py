"""What an engine asks of a drafter, and what it makes of a draft before it runs it.

What `runnable` lets through is safe to run whatever was proposed: it is in the vocabulary and no
longer than the response may become.
"""

from __future__ import annotations

from typing import Protocol

from rhymeflow.engine.base import Request
from rhymeflow.histospec.draft import NONE, Draft, DraftStats


class Drafter(Protocol):
    """Proposes what may come next. `histospec.drafter.Drafter` is one."""

    stats: DraftStats

    def begin(
        self, prompt_ids: list[int], tokens: list[int], *, sample: int, noise_epoch: int
    ) -> int:
        """A response is about to be decoded from `tokens` on; return a handle for it.

        There are no more handles at a time than the engine has places.
        """
        ...

    def end(self, handle: int) -> None:
        """The response has left its place: it is complete, was interrupted, or made way."""
        ...

    def propose(
        self,
        handles: list[int],
        max_tokens: list[int],
        *,
        other_rows: int,
        kv_tokens: int,
    ) -> list[Draft]:
        """Return a draft for each handle, `NONE` for none.

        `max_tokens`: how many of its tokens, one after another, can be of use: 0 or more.
        `other_rows`: rows that this iteration runs for sequences that do not decode yet.
        `kv_tokens`: tokens in the cache.
        """
        ...

    def observe(
        self,
        handles: list[int],
        generated: list[list[int]],
        *,
        rows: int,
        kv_tokens: int,
        seconds: float,
        other_rows: int | None = None,
    ) -> None:
        """What an iteration generated: for each handle the tokens appended, at least one.

        That is the accepted tokens of the draft and one more, or fewer if the response ended among
        them. `rows`: all rows run. `kv_tokens`: as in `propose`. `seconds`: the iteration's time
        without the drafter's. `other_rows`: as in `propose`, if they turned out to be others.
        """
        ...


def begin(drafter: Drafter, request: Request) -> int:
    """The drafter's handle for a request that goes on after the tokens it has."""
    return drafter.begin(
        request.prompt_ids,
        request.tokens,
        sample=request.noise_key.sample,
        noise_epoch=request.noise_key.epoch,
    )


def runnable(draft: Draft, max_tokens: int, vocabulary: int) -> Draft:
    """The draft without tokens that do not exist, or are too deep, and what follows them."""
    tokens, parents = draft
    assert len(parents) == len(tokens)
    if is_linear(draft):
        tokens = tokens[:max_tokens]
        if not tokens:
            return NONE
        if min(tokens) >= 0 and max(tokens) < vocabulary:
            return Draft(tokens, parents[: len(tokens)])
    kept: dict[int, int] = {-1: -1}
    depth = {-1: 0}
    cut = Draft([], [])
    for node, (token, parent) in enumerate(zip(tokens, parents, strict=False)):
        assert parent < node, "a draft's parents stand before their children"
        if parent in kept and depth[parent] < max_tokens and 0 <= token < vocabulary:
            kept[node], depth[node] = len(cut.tokens), depth[parent] + 1
            cut.tokens.append(token)
            cut.parents.append(kept[parent])
    return cut


def is_linear(draft: Draft) -> bool:
    """Whether each token follows the one before it."""
    return draft.parents == list(range(-1, len(draft.tokens) - 1))
