"""The drafter of an instance, from the configuration, ready to be timed.

What drafting runs is compiled by numba, once on a machine and in a quarter of a minute; later
processes load it from numba's cache. The history process sees to that while responses are generated
already, and instances draft once it is done.
"""

from __future__ import annotations

from rhymeflow.config import Config
from rhymeflow.histospec.draft import DraftStats
from rhymeflow.histospec.drafter import Drafter
from rhymeflow.histospec.handle import IndexHandle
from rhymeflow.histospec.index import Index

_REHEARSAL = 24
"""Iterations: the first ones are not drafted for, and what they are to find repeats after five."""


def drafter(
    config: Config, history: IndexHandle | None, max_length: int, stats: DraftStats | None = None
) -> Drafter:
    """Return what drafts from `history`, and from the responses of the engine it is given to.

    `history`: None for nothing but those. `max_length`: most tokens of a prompt and the response
    to it. `stats`: totals of the drafters before it, which it adds to.
    """
    rehearse(config)
    index = None if history is None else Index.attach(history)
    made = _drafter(config, index, max_sequences=config.rollout.max_num_seqs, max_length=max_length)
    if stats is not None:
        made.stats = stats
    return made


def rehearse(config: Config) -> None:
    """Run all of it once, small."""
    index = _small_index()
    response = index.begin(0, [1, 2], sample=0, noise_epoch=0)
    index.extend(response, [3])
    index.finish(response, 1.0)
    _draft(_drafter(config, index, max_sequences=2, max_length=64))
    index.clear()


def _small_index() -> Index:
    return Index(max_tokens=256, max_responses=4)


def _drafter(
    config: Config, index: Index | None, *, max_sequences: int, max_length: int
) -> Drafter:
    drafting = config.drafting
    return Drafter(
        index,
        window=drafting.window,
        max_draft=drafting.max_draft,
        shape=drafting.shape,
        ranking=drafting.ranking,
        max_sequences=max_sequences,
        max_length=max_length,
    )


def _draft(drafting: Drafter) -> None:
    handles = [drafting.begin([1, 2, 3], [], sample=s, noise_epoch=0) for s in range(2)]
    for i in range(_REHEARSAL):
        drafts = drafting.propose(handles, [8, 8], other_rows=0, kv_tokens=0)
        rows = sum(1 + len(draft.tokens) for draft in drafts)
        generated = [[i % 5] for _ in handles]
        drafting.observe(handles, generated, rows=rows, kv_tokens=0, seconds=1.0)
    for handle in handles:
        drafting.end(handle)
