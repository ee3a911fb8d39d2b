"""Drafts for the sequences that are ready to decode, and what the drafter learns in return.

Holds true: a sequence has a handle of the drafter's from the first iteration in which it is ready
until it leaves the engine, and the drafter has got every token of it by then. What goes on
from here to be verified is safe to run whatever the drafter proposed: it is in the vocabulary and
no longer than the response may become. The drafter's own time is counted apart. Knows nothing of
tensors, of how a draft is verified or of where it comes from.
"""

from __future__ import annotations

import time
from typing import Protocol

from rhymeflow.engine.native.scheduler import Work
from rhymeflow.engine.native.sequence import Sequence
from rhymeflow.histospec.draft import NONE, Draft


class Drafter(Protocol):
    """Proposes what may come next. `histospec.drafter.Drafter` is one."""

    def begin(
        self, prompt_ids: list[int], tokens: list[int], *, sample: int, noise_epoch: int
    ) -> int:
        """A response is about to be decoded from `tokens` on; return a handle for it."""
        ...

    def end(self, handle: int) -> None:
        """The response has left: it is complete, or was interrupted."""
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
    ) -> None:
        """What an iteration generated: for each handle the tokens appended, at least one.

        That is the accepted tokens of the draft and one more, or fewer if the response ended among
        them. `rows`: all rows run. `kv_tokens`: as in `propose`. `seconds`: the iteration's time
        without the drafter's.
        """
        ...


class Drafting:
    """One engine's drafter and the handles of its sequences.

    An iteration calls `start`, `propose` and, once the tokens are appended, `observe`.
    """

    def __init__(self, drafter: Drafter, *, vocabulary: int) -> None:
        self._drafter = drafter
        self._vocabulary = vocabulary
        self._started = 0.0
        self._kv_tokens = 0

    def start(self) -> None:
        """An iteration begins."""
        self._started = time.perf_counter()

    def propose(self, work: list[Work], kv_tokens: int) -> list[Work]:
        """Return the work with drafts added to that of sequences that are ready to decode."""
        self._kv_tokens = kv_tokens
        places = [i for i, item in enumerate(work) if item.sequence.remaining == 1]
        if not places:
            return work
        before = time.perf_counter()
        ready = [work[i].sequence for i in places]
        max_tokens = [sequence.tokens_left - 1 for sequence in ready]
        drafts = self._drafter.propose(
            [self._handle(sequence) for sequence in ready],
            max_tokens,
            other_rows=sum(item.num_new for item in work) - len(ready),
            kv_tokens=kv_tokens,
        )
        self._started += time.perf_counter() - before
        drafted = list(work)
        for place, most, draft in zip(places, max_tokens, drafts, strict=True):
            if draft.tokens:
                draft = runnable(draft, most, self._vocabulary)
                drafted[place] = Work(work[place].sequence, 1 + len(draft.tokens), draft)
        return drafted

    def observe(self, sequences: list[Sequence], generated: list[list[int]], rows: int) -> None:
        """Tell the drafter what was generated for sequences that have a handle."""
        seconds = time.perf_counter() - self._started
        known = [i for i, sequence in enumerate(sequences) if sequence.handle is not None]
        if known:
            self._drafter.observe(
                [self._handle(sequences[i]) for i in known],
                [generated[i] for i in known],
                rows=rows,
                kv_tokens=self._kv_tokens,
                seconds=seconds,
            )

    def end(self, sequences: list[Sequence]) -> None:
        """These leave the engine."""
        for sequence in sequences:
            if sequence.handle is not None:
                self._drafter.end(sequence.handle)
                sequence.handle = None

    def _handle(self, sequence: Sequence) -> int:
        if sequence.handle is None:
            request = sequence.request
            sequence.handle = self._drafter.begin(
                request.prompt_ids,
                request.tokens,
                sample=request.noise_key.sample,
                noise_epoch=request.noise_key.epoch,
            )
        return sequence.handle


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


__all__ = ["Drafter", "Drafting", "is_linear", "runnable"]
