"""The drafter: what an engine asks for drafts and tells what came of them.

    drafter = Drafter(history, window="cost", max_draft=16, shape="linear", ranking="combined",
                      max_sequences=64, max_length=1024)
    handle = drafter.begin(prompt_ids, tokens, sample=0, noise_epoch=3)
    drafts = drafter.propose([handle], [100], other_rows=0, kv_tokens=500)
    drafter.observe([handle], [[17, 4]], rows=3, kv_tokens=500, seconds=0.004)
    drafter.end(handle)

It puts together the search over history and over the sequences that run now, the chances that what
is found is accepted, the time that iterations take, and the window rule that weighs one against the
other. Where `cost` finds that drafts do not pay it stops searching, see `purse.py`.

Holds true: every token that was made is known to the search before it searches again; the drafter's
own time is part of every decision. Knows nothing of tensors, processes, or how drafts are verified.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from itertools import chain

import numpy as np
from numpy.typing import NDArray

from rhymeflow.histospec import cells
from rhymeflow.histospec.asked import Asked
from rhymeflow.histospec.chances import walk
from rhymeflow.histospec.draft import NONE, Draft, DraftStats
from rhymeflow.histospec.index import Index, prompt_key
from rhymeflow.histospec.purse import Purse
from rhymeflow.histospec.search import Search
from rhymeflow.histospec.timing import IterationTime
from rhymeflow.histospec.trust import Trust
from rhymeflow.histospec.window import Iteration, make_rule

_PROMPT_TAIL = 16
"""Tokens of the prompt that matches may begin in."""
_MOST_LIVE_TOKENS = 2_000_000
_LATE = 64
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
        self.chances = cells.first_chances()
        self.timing = IterationTime()
        self._clock = clock
        self._live = Index(
            max_tokens=min(2 * max_sequences * max_length, _MOST_LIVE_TOKENS),
            max_responses=8 * max_sequences,
        )
        self._rule = make_rule(window, max_sequences=max_sequences, max_draft=max_draft)
        self._trust = Trust(max_sequences)
        self._purse = Purse() if window == "cost" else None
        self._responses = np.zeros(max_sequences, np.int64)
        """By handle, the number of the response in the live index."""
        self._row_of = np.full(max_sequences, -1, np.int64)
        self._late: list[tuple[Ints, NDArray[np.int32], Ints]] = []
        """Tokens that the search has not heard of yet: handles, tokens, where each one's begin."""
        self._asked: Asked | None = None
        self._since_plain = 0
        """Iterations with drafts since the last one without."""
        self._compared = _COMPARED_FIRST
        indexes = [self._live] if history is None else [self._live, history]
        self._search = Search(
            indexes,
            max_draft=max_draft,
            shape=shape,
            ranking=ranking,
            chances=self.chances.values,
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
        self._trust.begin(handle)
        self.stats.seconds += self._clock() - started
        return handle

    def end(self, handle: int) -> None:
        """The response is complete or was interrupted."""
        started = self._clock()
        self._tell()
        self._live.finish(int(self._responses[handle]), None)
        self._search.end(handle)
        self.stats.seconds += self._clock() - started

    def propose(
        self,
        handles: list[int],
        room: list[int],
        *,
        other_rows: int,
        kv_tokens: int,
        weights: list[float] | None = None,
    ) -> list[Draft]:
        """Return a draft for each handle, `NONE` for none.

        `room`: most tokens that can be of use, one after another. `other_rows`: rows of the
        iteration that belong to sequences that do not decode yet. `kv_tokens`: tokens in the
        cache. `weights`: what a token of each sequence is worth to the window `cost`, above 0;
        None: 1. The other windows make no difference between sequences.
        """
        started = self._clock()
        self._asked = asked = Asked(len(handles), other_rows, kv_tokens, 0.0)
        asked.weights = None if weights is None else np.array(weights, float)
        drafts = [NONE] * len(handles)
        if self._is_worth_it(len(handles), hurried=weights is not None):
            self._tell()
            if self.timing.is_known:
                asked.curve = self.timing.curve(len(handles), other_rows, kv_tokens)
                asked.alone = asked.curve
                if other_rows:
                    asked.alone = self.timing.curve(len(handles), 0, kv_tokens)
            self._find(asked, np.array(handles, np.int64), np.array(room, np.int64))
            drafts = asked.drafts()
        asked.seconds = self._clock() - started
        return drafts

    def observe(
        self,
        handles: list[int],
        made: list[list[int]],
        *,
        rows: int,
        kv_tokens: int,
        seconds: float,
    ) -> None:
        """What an iteration made: for each handle the tokens appended, at least one.

        `rows`: all rows of the iteration. `seconds`: its time without the drafter's.
        """
        started = self._clock()
        asked = self._asked or Asked(0, rows - len(handles), kv_tokens, 0.0)
        self._asked = None
        stats = self.stats
        stats.steps += len(handles)
        stats.made += sum(map(len, made))
        self._late.append((np.array(handles, np.int64), *_flat(made)))
        if asked.proposals is not None:
            self._compare(asked, *self._late[-1])
        else:
            self._trust.rested(self._late[-1][0])
        if asked.proposals is not None or len(self._late) >= _LATE:
            self._tell()
        drafted = rows - len(handles) - asked.other_rows
        self.timing.observe(len(handles), drafted, asked.other_rows, kv_tokens, seconds)
        spent = asked.seconds + self._clock() - started
        stats.seconds += spent
        self._settle(asked, seconds, spent)

    def _is_worth_it(self, sequences: int, *, hurried: bool) -> bool:
        """Whether to search in this iteration."""
        if self._purse is None:
            return True
        if not self.timing.is_known:
            return False
        if self._since_plain >= self._compared:
            self._compared = min(2 * self._compared, _COMPARED)
            return False
        return self._purse.is_open(sequences, hurried=hurried)

    def _find(self, asked: Asked, handles: Ints, room: Ints) -> None:
        """Search, and choose what of it is verified."""
        proposals = self._search.propose(handles, self._rule.most(handles, room))
        alone = 0.0 if asked.alone is None else asked.alone.at(asked.sequences)
        iteration = Iteration(
            asked.sequences + asked.other_rows,
            asked.curve,
            asked.weights,
            asked.alone,
            asked.sequences,
            self.timing.doubt,
            np.inf if self._purse is None else self._purse.risk(alone),
            self._trust.credit,
        )
        asked.proposals = proposals
        reach = self._trust.temper(proposals, handles)
        asked.lengths = self._rule.cut(reach, proposals.counts, iteration)
        chosen = np.arange(reach.shape[1]) < asked.lengths[:, None]
        asked.expected = float(reach[chosen].sum())
        self._row_of[:] = -1
        self._row_of[handles] = np.arange(len(handles))

    def _compare(self, asked: Asked, which: Ints, flat: NDArray[np.int32], offsets: Ints) -> None:
        """Learn from what became of the proposals."""
        proposals, lengths = asked.proposals, asked.lengths
        assert proposals is not None
        assert lengths is not None
        rows = self._row_of[which]
        tried = np.zeros(cells.NUM_CELLS, np.int64)
        accepted = np.zeros(cells.NUM_CELLS, np.int64)
        taken = walk(
            proposals.tokens, proposals.parents, proposals.cells, proposals.counts,
            rows, flat, offsets, lengths, tried, accepted,
        )  # fmt: skip
        self.chances.observe(tried, accepted)
        self._trust.verified(asked.expected, int(taken.sum()))
        self._trust.observe(proposals, rows, which, flat, offsets)
        known, made = rows >= 0, np.diff(offsets)
        asked.made = int(made[known].sum())
        asked.worth = float(asked.made)
        if asked.weights is not None:
            share = asked.weights / asked.weights.sum()
            asked.worth = asked.sequences * float((made[known] * share[rows[known]]).sum())
        self._rule.observe(which[known], lengths[rows[known]], taken[known])
        self.stats.drafted += int(lengths.sum())
        self.stats.accepted += int(taken.sum())

    def _tell(self) -> None:
        """Let the search and the live index know of all tokens made."""
        for which, flat, offsets in self._late:
            self._live.extend_many(self._responses[which], flat, offsets)
            self._search.extend(which, flat, offsets)
        self._late.clear()

    def _settle(self, asked: Asked, seconds: float, spent: float) -> None:
        """Reckon what the iteration saved, against iterations that make one token each."""
        self._since_plain = 0 if asked.is_plain else self._since_plain + 1
        if asked.proposals is None:
            self.stats.saved_seconds -= spent
            if self._purse is not None:
                self._purse.rested(seconds + spent)
            return
        if asked.curve is None or asked.alone is None or not asked.sequences:
            return
        assert asked.lengths is not None
        alone = asked.alone.at(asked.sequences)
        first = asked.curve.at(asked.sequences + asked.other_rows)
        gained = (asked.made / asked.sequences - 1) * alone
        self.stats.saved_seconds += first + gained - seconds - spent
        if self._purse is not None:
            # What tells whether trying pays is what the window aims at: tokens by their weight.
            gained = (asked.worth / asked.sequences - 1) * alone
            saved = gained - self._drafts_took(asked) - spent
            self._purse.tried(asked.sequences, search=spent, saved=saved, plain=alone)
            if self._purse.is_empty and asked.is_plain:
                self.timing.doubt_drafted()

    def _drafts_took(self, asked: Asked) -> float:
        """Seconds that verifying took, by what is known now that it was timed.

        One iteration's time says little by itself: it may have been held up.
        """
        drafted = int(asked.lengths.sum())
        if not drafted:
            return 0.0
        curve = self.timing.curve(asked.sequences, asked.other_rows, asked.kv_tokens)
        rows = asked.sequences + asked.other_rows
        return curve.at(rows + drafted) - curve.at(rows)


def _flat(made: list[list[int]]) -> tuple[NDArray[np.int32], Ints]:
    """The tokens one after another, and where each sequence's begin, with the end."""
    offsets = np.zeros(len(made) + 1, np.int64)
    np.cumsum(np.fromiter(map(len, made), np.int64, len(made)), out=offsets[1:])
    return np.fromiter(chain.from_iterable(made), np.int32, int(offsets[-1])), offsets


__all__ = ["Drafter"]
