"""The drafter: proposes drafts to an engine and learns from their results.

    drafter = Drafter(history, config.drafting, max_sequences=64, max_length=1024)
    handle = drafter.begin(prompt_ids, tokens, sample=0, noise_epoch=3)
    drafts = drafter.propose([handle], [100], other_rows=0, kv_tokens=500)
    drafter.observe([handle], [[17, 4]], rows=3, kv_tokens=500, seconds=0.004)
    drafter.end(handle)

It searches the history and the running sequences; `control.py` decides how much is verified, taking
the drafter's own time into account."""

from __future__ import annotations

import time
from collections.abc import Callable, Collection
from dataclasses import dataclass
from itertools import chain

import numpy as np
from numpy.typing import NDArray

from rhymeflow.config import Config, DraftingConfig
from rhymeflow.emulation import draft_seconds
from rhymeflow.histospec.build_draft import Proposals
from rhymeflow.histospec.control import Acceptance, Aimd, Budget, Prices, best_cut
from rhymeflow.histospec.draft import NONE, Draft, DraftStats, IndexHandle
from rhymeflow.histospec.index import Index
from rhymeflow.histospec.search import Search

_MOST_LIVE_TOKENS = 2_000_000
_MAX_UNINDEXED = 64  # most iterations whose tokens are not indexed yet
_FIRST_ITERATIONS = 3  # iterations before the first search, which measure the time without drafts
_FIRST_PLAIN_INTERVAL, _PLAIN_INTERVAL = 16, 100
"""Iterations with drafts between two plain ones, at first and later. Plain iterations measure the
time without drafts."""

Ints = NDArray[np.int64]


@dataclass(slots=True)
class _Iteration:
    """An iteration of the engine, between `propose` and `observe`."""

    sequences: int
    other_rows: int
    kv_tokens: int
    seconds: float = 0.0  # spent on proposals
    proposals: Proposals | None = None  # None: there was no search
    lengths: Ints | None = None  # tokens of each proposal that the engine verifies
    generated: int = 0  # tokens of the sequences with a proposal, even an empty one

    @property
    def num_drafted(self) -> int:
        return 0 if self.lengths is None else int(self.lengths.sum())


class Drafter:
    """Drafts for one engine.

    `history`: index of earlier responses; None: drafts come from running sequences only. At most
    `max_sequences` run at a time, of at most `max_length` tokens (prompt and response), whose turns
    end with a token in `stop_ids`. `clock` returns seconds; with `search_seconds` a search is taken
    to last so long for each response, and all else of the drafter no time."""

    def __init__(
        self,
        history: Index | None,
        drafting: DraftingConfig,
        *,
        max_sequences: int,
        max_length: int,
        stop_ids: Collection[int] = (),
        clock: Callable[[], float] = time.perf_counter,
        search_seconds: float | None = None,
    ) -> None:
        self.stats = DraftStats()
        self.acceptance = Acceptance(max_sequences)
        self.prices = Prices()
        self._clock = clock if search_seconds is None else lambda: 0.0
        self._search_seconds = search_seconds or 0.0
        self._live = Index(
            max_tokens=min(2 * max_sequences * max_length, _MOST_LIVE_TOKENS),
            max_responses=8 * max_sequences,
        )
        self._budget = Budget()
        self._aimd = Aimd(max_sequences, drafting.max_draft) if drafting.window == "aimd" else None
        """None: the window is `cost`."""
        self._responses = np.zeros(max_sequences, np.int64)
        """By handle, the number of the response in the live index."""
        self._row_of = np.full(max_sequences, -1, np.int64)  # by handle, its row in the proposals
        self._unindexed: list[tuple[Ints, NDArray[np.int32], Ints]] = []
        """Tokens that are not indexed yet: (handles, tokens, offsets), as in `extend_many`."""
        self._iteration: _Iteration | None = None
        self._since_plain = 0  # iterations with drafts since the last one without
        self._plain_interval = _FIRST_PLAIN_INTERVAL
        self._search = Search(
            self._live,
            history,
            drafting,
            max_sequences=max_sequences,
            rates=self.acceptance.rates,
            stop_ids=stop_ids,
        )

    @property
    def num_bytes(self) -> int:
        """Size in bytes of the index of running sequences, however full it is."""
        return self._live.num_bytes

    @property
    def num_searched(self) -> int:
        """Responses for which the last `propose` has searched."""
        iteration = self._iteration
        return iteration.sequences if iteration and iteration.proposals is not None else 0

    def begin(
        self, prompt_ids: list[int], tokens: list[int], *, sample: int, noise_epoch: int
    ) -> int:
        """Begin a response, or continue one after `tokens`; return its handle."""
        started = self._clock()
        handle = self._search.begin(prompt_ids, tokens, sample=sample, noise_epoch=noise_epoch)
        response = self._live.begin(prompt_ids, sample=sample, noise_epoch=noise_epoch)
        if tokens:
            self._live.extend(response, tokens)
        self._responses[handle] = response
        self.acceptance.begin(handle)
        if self._aimd is not None:
            self._aimd.begin(handle)
        self.stats.seconds += self._clock() - started
        return handle

    def end(self, handle: int) -> None:
        """End a response, which is complete or was interrupted."""
        started = self._clock()
        self._update_indexes()
        self._live.finish(int(self._responses[handle]), None)
        self._search.end(handle)
        self.stats.seconds += self._clock() - started

    def propose(
        self, handles: list[int], max_tokens: list[int], *, other_rows: int, kv_tokens: int
    ) -> list[Draft]:
        """Return a draft for each handle, `NONE` for none. `max_tokens`: the most tokens of each
        draft. `other_rows`: rows of the iteration that belong to sequences that do not decode yet.
        `kv_tokens`: tokens in the cache."""
        started = self._clock()
        self._iteration = iteration = _Iteration(len(handles), other_rows, kv_tokens)
        drafts = [NONE] * len(handles)
        if self._should_search(len(handles)):
            self._update_indexes()
            drafts = self._find(iteration, np.array(handles, np.int64), np.array(max_tokens))
        iteration.seconds = self._clock() - started + self.num_searched * self._search_seconds
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
        """Learn from an iteration, which generated `generated[i]`, at least one token, per handle.

        These are the accepted tokens of the draft and one more, or fewer if the response ended
        among them. `rows`: all rows of the iteration. `seconds`: its time without the drafter's.
        `other_rows`: if given, corrects the value given to `propose`."""
        started = self._clock()
        iteration = self._iteration or _Iteration(0, rows - len(handles), kv_tokens)
        self._iteration = None
        if other_rows is not None:
            iteration.other_rows = other_rows
        stats = self.stats
        stats.steps += len(handles)
        stats.generated += sum(map(len, generated))
        self._unindexed.append((np.array(handles, np.int64), *_flat(generated)))
        if iteration.proposals is None:
            self.acceptance.observe_undrafted(self._unindexed[-1][0])
        else:
            self._learn(iteration, *self._unindexed[-1])
        if iteration.proposals is not None or len(self._unindexed) >= _MAX_UNINDEXED:
            self._update_indexes()
        drafted = rows - len(handles) - iteration.other_rows
        self.prices.observe(len(handles), drafted, iteration.other_rows, kv_tokens, seconds)
        spent = iteration.seconds + self._clock() - started
        stats.seconds += spent
        self._count_saved(iteration, seconds, spent)

    def _should_search(self, sequences: int) -> bool:
        """Whether to search in this iteration."""
        if self._aimd is not None:
            return True
        if self.prices.num_seen < _FIRST_ITERATIONS:
            return False
        if self._since_plain >= self._plain_interval:
            self._plain_interval = min(2 * self._plain_interval, _PLAIN_INTERVAL)
            return False
        return self._budget.allows_search(sequences)

    def _find(self, iteration: _Iteration, handles: Ints, max_tokens: Ints) -> list[Draft]:
        """Search for drafts, and choose how much of each is verified."""
        if self._aimd is not None:
            max_tokens = np.minimum(max_tokens, self._aimd.sizes[handles])
        proposals = self._search.propose(handles, max_tokens, self.acceptance.states(handles))
        lengths = proposals.counts if self._aimd else self._best_cut(iteration, proposals)
        iteration.proposals, iteration.lengths = proposals, lengths
        self._row_of[:] = -1
        self._row_of[handles] = np.arange(len(handles))
        chosen = np.arange(proposals.tokens.shape[1]) < lengths[:, None]
        tokens, parents = proposals.tokens[chosen].tolist(), proposals.parents[chosen].tolist()
        ends = np.cumsum(lengths).tolist()
        return [
            Draft(tokens[end - size : end], parents[end - size : end]) if size else NONE
            for end, size in zip(ends, lengths.tolist(), strict=True)
        ]

    def _best_cut(self, iteration: _Iteration, proposals: Proposals) -> Ints:
        """Return how many tokens of each proposal to verify for the most tokens per second."""
        n, kv_tokens, nodes = iteration.sequences, iteration.kv_tokens, int(proposals.counts.sum())
        seconds = self.prices.seconds(n, kv_tokens, nodes)
        worst = self.prices.seconds(n, kv_tokens, nodes, at_worst=True)
        max_loss = self._budget.max_loss(float(seconds[0]))
        return best_cut(proposals, seconds, worst, max_loss, self.acceptance.discount)

    def _learn(
        self, iteration: _Iteration, handles: Ints, tokens: NDArray[np.int32], offsets: Ints
    ) -> None:
        """Learn from the results of the proposals."""
        assert iteration.proposals is not None
        assert iteration.lengths is not None
        rows = self._row_of[handles]
        accepted = self.acceptance.observe(
            iteration.proposals, iteration.lengths, rows, handles, tokens, offsets
        )
        proposed = rows >= 0
        if self._aimd is not None:
            lengths = iteration.lengths[rows[proposed]]
            self._aimd.observe(handles[proposed], lengths, accepted[proposed])
        iteration.generated = int(np.diff(offsets)[proposed].sum())
        self.stats.drafted += iteration.num_drafted
        self.stats.accepted += int(accepted.sum())

    def _update_indexes(self) -> None:
        """Add all tokens generated so far to the search and to the live index."""
        for handles, tokens, offsets in self._unindexed:
            self._live.extend_many(self._responses[handles], tokens, offsets)
            self._search.extend(handles, tokens, offsets)
        self._unindexed.clear()

    def _count_saved(self, iteration: _Iteration, seconds: float, spent: float) -> None:
        """Count what the iteration saved, compared with plain ones. It took `seconds` and the
        drafter `spent`."""
        drafted = iteration.num_drafted
        self._since_plain = self._since_plain + 1 if drafted else 0
        if iteration.proposals is None:
            self.stats.saved_seconds -= spent
            self._budget.rested(seconds + spent)
            return
        if not iteration.sequences:
            return
        times = self.prices.seconds(iteration.sequences, iteration.kv_tokens, drafted)
        plain, verifying = float(times[0]), float(times[drafted] - times[0])
        gained = (iteration.generated / iteration.sequences - 1) * plain
        # The budget uses the predicted time of verification: a single iteration may be delayed.
        saved = gained - verifying - spent
        # With other rows, the measured time is not that of verification alone.
        verified_in = verifying if iteration.other_rows else seconds - plain
        self.stats.saved_seconds += gained - verified_in - spent
        self._budget.searched(iteration.sequences, search=spent, saved=saved, plain=plain)
        if self._budget.is_between_trials and not drafted:
            self.prices.doubt_drafted()


def _flat(generated: list[list[int]]) -> tuple[NDArray[np.int32], Ints]:
    """Return all tokens in one array, and the offsets at which each sequence's begin and end."""
    offsets = np.zeros(len(generated) + 1, np.int64)
    np.cumsum(np.fromiter(map(len, generated), np.int64, len(generated)), out=offsets[1:])
    return np.fromiter(chain.from_iterable(generated), np.int32, int(offsets[-1])), offsets


# -- from the configuration ------------------------------------------------------------------------

_REHEARSAL = 24
"""Iterations: enough for the first plain ones and for text that repeats every five tokens."""


def drafter_of(
    config: Config,
    history: IndexHandle | None,
    max_length: int,
    stop_ids: Collection[int],
    stats: DraftStats | None = None,
) -> Drafter:
    """Create an engine's drafter, with all its code compiled. `history`: None to draft from the
    engine's own responses only. `max_length`: most tokens of a prompt and its response. `stop_ids`:
    tokens that end a turn. `stats`: totals of the engine's earlier drafters, which it continues."""
    rehearse(config)
    index = None if history is None else Index.attach(history)
    places = config.rollout.max_num_seqs
    drafter = Drafter(
        index,
        config.drafting,
        max_sequences=places,
        max_length=max_length,
        stop_ids=stop_ids,
        search_seconds=draft_seconds(config) if config.emulation.is_used else None,
    )
    if stats is not None:
        drafter.stats = stats
    return drafter


def rehearse(config: Config) -> None:
    """Run all of drafting's code once, so that numba compiles it. That takes about 15 seconds, once
    per machine; later processes load numba's cache. The history process does it while responses are
    already being generated; instances draft after that."""
    index = Index(max_tokens=256, max_responses=4)
    response = index.begin([1, 2], sample=0, noise_epoch=0)
    index.extend(response, [3])
    index.finish(response, 1.0)
    drafter = Drafter(index, config.drafting, max_sequences=2, max_length=64)
    handles = [drafter.begin([1, 2, 3], [], sample=s, noise_epoch=0) for s in range(2)]
    for i in range(_REHEARSAL):
        drafts = drafter.propose(handles, [8, 8], other_rows=0, kv_tokens=0)
        rows = sum(1 + len(draft.tokens) for draft in drafts)
        generated = [[i % 5] for _ in handles]
        drafter.observe(handles, generated, rows=rows, kv_tokens=0, seconds=1.0)
    for handle in handles:
        drafter.end(handle)
