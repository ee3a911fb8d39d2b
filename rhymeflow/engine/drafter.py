"""Drafts for an engine's requests, cut to the vocabulary and to the responses' length limits."""

from __future__ import annotations

from collections.abc import Hashable, Iterable, Mapping

from rhymeflow.engine.base import Request
from rhymeflow.histospec.draft import NONE, Draft, DraftStats
from rhymeflow.histospec.drafter import Drafter


class Drafting:
    """An engine's drafter, if it has one, and the drafter's handle for each request.

    A request gets a handle when it is first ready to decode, and keeps it until it leaves the
    engine or another request needs it (at most `max_sequences` have one). An iteration calls
    `propose`, then `observe`."""

    def __init__(self, *, vocabulary: int, max_sequences: int) -> None:
        self.drafter: Drafter | None = None
        self._vocabulary, self._max_sequences = vocabulary, max_sequences
        self._handles: dict[Hashable, int] = {}
        self._kv_tokens = 0

    def use(self, drafter: Drafter | None) -> None:
        """Use this drafter from now on, also for running requests; None stops drafting."""
        self.end(list(self._handles))
        self.drafter = drafter

    def stats(self) -> DraftStats:
        """Return the drafter's statistics, zeros if there is none."""
        return DraftStats() if self.drafter is None else self.drafter.stats

    @property
    def num_searched(self) -> int:
        """Requests for which the drafter has searched in this iteration, before `observe`."""
        return 0 if self.drafter is None else self.drafter.num_searched

    def propose(
        self, ready: list[Request], *, other_rows: int, kv_tokens: int, room: int | None = None
    ) -> dict[Hashable, Draft]:
        """Return runnable drafts by request id; requests without a draft are missing. `room`: the
        most tokens of all drafts together, of which each may have an equal part."""
        self._kv_tokens = kv_tokens
        if self.drafter is None or not ready:
            return {}
        handles = self._handles_of(self.drafter, ready)
        # An iteration also samples one token after the draft.
        limits = [r.sampling.max_new_tokens - len(r.tokens) - 1 for r in ready]
        if room is not None:
            limits = [min(limit, max(room, 0) // len(ready)) for limit in limits]
        drafts = self.drafter.propose(handles, limits, other_rows=other_rows, kv_tokens=kv_tokens)
        runnable_drafts = {}
        for request, limit, draft in zip(ready, limits, drafts, strict=True):
            if draft.tokens and (cut := runnable(draft, limit, self._vocabulary)).tokens:
                runnable_drafts[request.id] = cut
        return runnable_drafts

    def observe(
        self,
        generated: Mapping[Hashable, list[int]],
        drafted: Mapping[Hashable, int] | None = None,
        *,
        rows: int,
        seconds: float,
    ) -> None:
        """Tell the drafter what an iteration of `rows` tokens generated, by request id. `drafted`
        counts the draft tokens that ran, if they may differ from those proposed."""
        with_handle = [key for key, tokens in generated.items() if tokens and key in self._handles]
        if self.drafter is None or not with_handle:
            return
        other_rows = None
        if drafted is not None:
            other_rows = rows - sum(1 + drafted.get(key, 0) for key in with_handle)
        self.drafter.observe(
            [self._handles[key] for key in with_handle],
            [generated[key] for key in with_handle],
            rows=rows,
            kv_tokens=self._kv_tokens,
            seconds=seconds,
            other_rows=other_rows,
        )

    def end(self, ids: Iterable[Hashable]) -> None:
        """Release the handles of requests that leave the engine or make way for others."""
        for key in ids:
            handle = self._handles.pop(key, None)
            if handle is not None and self.drafter is not None:
                self.drafter.end(handle)

    def _handles_of(self, drafter: Drafter, ready: list[Request]) -> list[int]:
        new = [request for request in ready if request.id not in self._handles]
        # A request that vLLM has preempted still has a handle, which may be needed for another.
        surplus = len(self._handles) + len(new) - self._max_sequences
        if surplus > 0:
            decoding = {request.id for request in ready}
            self.end([key for key in self._handles if key not in decoding][:surplus])
        for request in new:
            known = request.prompt_ids, request.tokens
            if request.row_prompt is not None:
                known = request.row_prompt, [*request.prompt_ids, *request.tokens]
            self._handles[request.id] = drafter.begin(
                *known, sample=request.noise_key.sample, noise_epoch=request.noise_key.epoch
            )
        return [self._handles[request.id] for request in ready]


def runnable(draft: Draft, max_tokens: int, vocabulary: int) -> Draft:
    """Drop tokens outside the vocabulary or deeper than `max_tokens`, and their descendants."""
    tokens, parents = draft
    assert len(parents) == len(tokens)
    if is_linear(draft):
        tokens = tokens[:max_tokens]
        if not tokens:
            return NONE
        if min(tokens) >= 0 and max(tokens) < vocabulary:
            return Draft(tokens, parents[: len(tokens)])
    new_index: dict[int, int] = {-1: -1}
    depth = {-1: 0}
    cut = Draft([], [])
    for node, (token, parent) in enumerate(zip(tokens, parents, strict=False)):  # maybe cut above
        assert parent < node, "a draft's parents stand before their children"
        if parent in new_index and depth[parent] < max_tokens and 0 <= token < vocabulary:
            new_index[node], depth[node] = len(cut.tokens), depth[parent] + 1
            cut.tokens.append(token)
            cut.parents.append(new_index[parent])
    return cut


def is_linear(draft: Draft) -> bool:
    """Return whether each token follows the one before it."""
    return draft.parents == list(range(-1, len(draft.tokens) - 1))
