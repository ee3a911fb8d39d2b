"""The drafter: proposes drafts to an engine and learns from what came of them.

    drafter = Drafter(history, window="cost", max_draft=16, shape="linear", ranking="combined",
                      max_sequences=64, max_length=1024)
    handle = drafter.begin(prompt_ids, tokens, sample=0, noise_epoch=3)
    drafts = drafter.propose([handle], [100], other_rows=0, kv_tokens=500)
    drafter.observe([handle], [[17, 4]], rows=3, kv_tokens=500, seconds=0.004)
    drafter.end(handle)

It puts together the search over history and over the sequences that run now, the acceptance model,
the time that iterations take, and the rule that weighs one against the other. Where `cost` finds
that drafts do not pay it stops searching, see `exploration_budget.py`.

Holds true: every token that was generated is known to the search before it searches again; the
drafter's own time is part of every decision. Knows nothing of tensors, processes, or how drafts are
verified.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from itertools import chain

import numpy as np
from numpy.typing import NDArray

from rhymeflow.histospec.acceptance import Acceptance
from rhymeflow.histospec.build_draft import Proposals
from rhymeflow.histospec.draft import NONE, Draft, DraftStats
from rhymeflow.histospec.draft_length import Times, make_rule
from rhymeflow.histospec.exploration_budget import ExplorationBudget
from rhymeflow.histospec.index import Index, prompt_key
from rhymeflow.histospec.iteration_time import IterationTime
from rhymeflow.histospec.pending import Pending
from rhymeflow.histospec.search import Search

_PROMPT_TAIL = 16
"""Tokens of the prompt that matches may begin in."""
_MOST_LIVE_TOKENS = 2_000_000
_MAX_UNINDEXED = 64
"""Iterations after which the search hears of tokens at the latest."""
_COMPARED = 100
"""Iterations with drafts after which one goes without: what they are weighed against grows old.
Fewer at first, when little is known of it."""
_COMPARED_FIRST = 16

Ints = NDArray[np.int64]


class Drafter:
    """Drafts for one engine.

    `history`: what earlier responses said, None for nothing. `window`, `max_draft`, `shape`
    and `ranking` as in `config.DraftingConfig`. `max_sequences` run at a time, of at most
    `max_length` tokens (prompt and response). `clock`: seconds.
    """

    def __init__(
        self,
        history: Index | None,
        *,
        window: str,
        max_draft: int,
        shape: str,
        ranking: str,
        max_sequences: int,
        max_length: int,
        clock: Callable[[], float] = time.perf_counter,
    ) -> None:
        self.stats = DraftStats()
        self.acceptance = Acceptance(max_sequences)
        self.iteration_time = IterationTime()
        self._clock = clock
        self._live = Index(
            max_tokens=min(2 * max_sequences * max_length, _MOST_LIVE_TOKENS),
            max_responses=8 * max_sequences,
        )
        self._rule = make_rule(window, max_sequences=max_sequences, max_draft=max_draft)
        self._budget = ExplorationBudget() if self._rule.uses_times else None
        self._responses = np.zeros(max_sequences, np.int64)
        """By handle, the number of the response in the live index."""
        self._row_of = np.full(max_sequences, -1, np.int64)
        self._unindexed: list[tuple[Ints, NDArray[np.int32], Ints]] = []
        """Tokens that the search has not heard of yet: handles, tokens, where each one's begin."""
        self._pending: Pending | None = None
        self._since_plain = 0
        """Iterations with drafts since the last one without."""
        self._compared = _COMPARED_FIRST
        self._search = Search(
            [self._live] if history is None else [self._live, history],
            max_draft=max_draft,
            shape=shape,
            ranking=ranking,
            rates=self.acceptance.rates,
        )

    @property
    def num_bytes(self) -> int:
        """Memory of the index of what runs, however full it is."""
        return self._live.num_bytes

    def begin(
        self, prompt_ids: list[int], tokens: list[int], *, sample: int, noise_epoch: int
    ) -> int:
        """A response is about to be decoded, or gone on with after `tokens`; return its handle."""
        started = self._clock()
        handle = self._search.begin(prompt_ids, tokens, sample=sample, noise_epoch=noise_epoch)
        response = self._live.begin(
            prompt_key(prompt_ids), prompt_ids[-_PROMPT_TAIL:],
            sample=sample, noise_epoch=noise_epoch, version=0,
        )  # fmt: skip
        if tokens:
            self._live.extend(response, tokens)
        self._responses[handle] = response
        self._rule.begin(handle)
        self.acceptance.begin(handle)
        self.stats.seconds += self._clock() - started
        return handle

    def end(self, handle: int) -> None:
        """The response is complete or was interrupted."""
        started = self._clock()
        self._update_indexes()
        self._live.finish(int(self._responses[handle]), None)
        self._search.end(handle)
        self.stats.seconds += self._clock() - started

    def propose(
        self, handles: list[int], max_tokens: list[int], *, other_rows: int, kv_tokens: int
    ) -> list[Draft]:
        """Return a draft for each handle, `NONE` for none.

        `max_tokens`: most tokens that can be of use, one after another. `other_rows`: rows of the
        iteration that belong to sequences that do not decode yet. `kv_tokens`: tokens in the
        cache.
        """
        started = self._clock()
        self._pending = pending = Pending(len(handles), other_rows, kv_tokens)
        drafts = [NONE] * len(handles)
        if self._should_search(len(handles)):
            self._update_indexes()
            self._find(pending, np.array(handles, np.int64), np.array(max_tokens, np.int64))
            drafts = pending.drafts()
        pending.seconds = self._clock() - started
        return drafts

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

        `rows`: all rows of the iteration. `seconds`: its time without the drafter's. `other_rows`:
        as in `propose`, if they turned out to be others.
        """
        started = self._clock()
        pending = self._pending or Pending(0, rows - len(handles), kv_tokens)
        if other_rows is not None:
            pending.other_rows = other_rows
        self._pending = None
        stats = self.stats
        stats.steps += len(handles)
        stats.generated += sum(map(len, generated))
        self._unindexed.append((np.array(handles, np.int64), *_flat(generated)))
        if pending.proposals is None:
            self.acceptance.went_on(self._unindexed[-1][0])
        else:
            self._learn(pending, *self._unindexed[-1])
        if pending.proposals is not None or len(self._unindexed) >= _MAX_UNINDEXED:
            self._update_indexes()
        drafted = rows - len(handles) - pending.other_rows
        was_known = self.iteration_time.is_known
        self.iteration_time.observe(len(handles), drafted, pending.other_rows, kv_tokens, seconds)
        spent = pending.seconds + self._clock() - started
        stats.seconds += spent
        self._settle(pending, seconds, spent, was_known=was_known)

    def _should_search(self, sequences: int) -> bool:
        """Whether to search in this iteration."""
        if self._budget is None:
            return True
        if not self.iteration_time.is_known:
            return False
        if self._since_plain >= self._compared:
            self._compared = min(2 * self._compared, _COMPARED)
            return False
        return self._budget.allows_search(sequences)

    def _find(self, pending: Pending, handles: Ints, max_tokens: Ints) -> None:
        """Search, and choose what of it is verified."""
        states = self.acceptance.states(handles)
        proposals = self._search.propose(handles, self._rule.most(handles, max_tokens), states)
        times = self._times(pending, proposals) if self._rule.uses_times else None
        pending.proposals = proposals
        pending.lengths = self._rule.cut(proposals.path_probability, proposals.counts, times)
        self._row_of[:] = -1
        self._row_of[handles] = np.arange(len(handles))

    def _times(self, pending: Pending, proposals: Proposals) -> Times:
        """What verifying as many tokens as were found would cost."""
        assert self._budget is not None
        model, found = self.iteration_time, int(proposals.counts.sum())
        kv_tokens = pending.kv_tokens
        alone = seconds = model.seconds(pending.sequences, 0, kv_tokens, found)
        if pending.other_rows:
            seconds = model.seconds(pending.sequences, pending.other_rows, kv_tokens, found)
        max_loss = self._budget.max_loss(float(alone[0]))
        return Times(seconds, alone, model.doubt, max_loss, self.acceptance.discount)

    def _learn(self, pending: Pending, which: Ints, flat: NDArray[np.int32], offsets: Ints) -> None:
        """Learn from what became of the proposals."""
        proposals, lengths = pending.proposals, pending.lengths
        assert proposals is not None
        assert lengths is not None
        rows = self._row_of[which]
        accepted = self.acceptance.observe(proposals, lengths, rows, which, flat, offsets)
        known = rows >= 0
        pending.generated = int(np.diff(offsets)[known].sum())
        self._rule.observe(which[known], lengths[rows[known]], accepted[known])
        self.stats.drafted += pending.num_drafted
        self.stats.accepted += int(accepted.sum())

    def _update_indexes(self) -> None:
        """Add all tokens generated so far to the search and to the live index."""
        for which, flat, offsets in self._unindexed:
            self._live.extend_many(self._responses[which], flat, offsets)
            self._search.extend(which, flat, offsets)
        self._unindexed.clear()

    def _settle(self, pending: Pending, seconds: float, spent: float, *, was_known: bool) -> None:
        """Reckon what the iteration saved, against iterations that make one token each."""
        drafted = pending.num_drafted
        self._since_plain = self._since_plain + 1 if drafted else 0
        if pending.proposals is None:
            self.stats.saved_seconds -= spent
            if self._budget is not None:
                self._budget.rested(seconds + spent)
            return
        if not was_known or not pending.sequences:
            return
        model, kv_tokens = self.iteration_time, pending.kv_tokens
        mixed = model.seconds(pending.sequences, pending.other_rows, kv_tokens, drafted)
        undrafted, verified = float(mixed[0]), float(mixed[drafted])
        plain = undrafted
        if pending.other_rows:
            plain = float(model.seconds(pending.sequences, 0, kv_tokens, 0)[0])
        gained = (pending.generated / pending.sequences - 1) * plain
        self.stats.saved_seconds += undrafted + gained - seconds - spent
        if self._budget is not None:
            # What verifying took is the model's: one iteration by itself may have been held up.
            saved = gained - (verified - undrafted) - spent
            self._budget.searched(pending.sequences, search=spent, saved=saved, plain=plain)
            if self._budget.is_used_up and not drafted:
                model.doubt_drafted()


def _flat(generated: list[list[int]]) -> tuple[NDArray[np.int32], Ints]:
    """The tokens one after another, and where each sequence's begin, with the end."""
    offsets = np.zeros(len(generated) + 1, np.int64)
    np.cumsum(np.fromiter(map(len, generated), np.int64, len(generated)), out=offsets[1:])
    return np.fromiter(chain.from_iterable(generated), np.int32, int(offsets[-1])), offsets


__all__ = ["Drafter"]
