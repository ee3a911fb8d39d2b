"""Replays recorded rollouts against something that drafts, as an engine would ask for drafts.

All sequences of a batch run together. In each iteration every running one gets a draft, what the
recording says next is accepted as far as the draft has it, and one token more comes. Only calls to
the side (as `drafter.Replayed`) are timed, in seconds of the thread.
"""

from __future__ import annotations

import time
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

from benchmarks.rollouts.recorded import Rollout


@dataclass
class Count:
    """Sums over the steps of an epoch; a step is one sequence in one iteration."""

    epoch: int
    steps: int = 0
    drafted: int = 0
    accepted: int = 0
    generated: int = 0
    iteration_seconds: list[float] = field(default_factory=list)
    """Of each iteration, proposing and extending."""


def replay(
    side: Any,
    batches: Sequence[Sequence[Rollout]],
    limit: int,
    iterations: int | None = None,
) -> list[Count]:
    """Replay `batches`, responses of at most `limit` tokens; return one count an epoch.

    With `iterations`, a batch is broken off after so many.
    """
    counts: list[Count] = []
    for batch in batches:
        if not counts or counts[-1].epoch != batch[0].epoch:
            counts.append(Count(batch[0].epoch))
        _replay(side, batch, limit, iterations, counts[-1])
    return counts


def _replay(
    side: Any, batch: Sequence[Rollout], limit: int, iterations: int | None, count: Count
) -> None:
    side.begin(batch, [rollout.tokens[:1] for rollout in batch])
    done = [1] * len(batch)
    running = [sequence for sequence, rollout in enumerate(batch) if len(rollout.tokens) > 1]
    for sequence in set(range(len(batch))) - set(running):
        side.end(sequence)
    last = None if iterations is None else len(count.iteration_seconds) + iterations
    while running and len(count.iteration_seconds) != last:
        room = [limit - done[sequence] - 1 for sequence in running]
        started = time.thread_time()
        drafts = side.propose(running, room)
        proposing = time.thread_time() - started
        made = []
        for sequence, (tokens, parents) in zip(running, drafts, strict=True):
            target, position = batch[sequence].tokens, done[sequence]
            accepted = num_accepted(tokens, parents, target, position)
            done[sequence] = min(position + accepted + 1, len(target))
            made.append(target[position : done[sequence]])
            count.drafted += len(tokens)
            count.accepted += accepted
            count.generated += len(made[-1])
        count.steps += len(running)
        started = time.thread_time()
        side.extend(running, made)
        count.iteration_seconds.append(proposing + time.thread_time() - started)
        for sequence in running:
            if done[sequence] == len(batch[sequence].tokens):
                side.end(sequence)
        running = [s for s in running if done[s] < len(batch[s].tokens)]
    for sequence in running:
        side.end(sequence)
    side.finish(batch)


def num_accepted(
    tokens: Sequence[int], parents: Sequence[int], target: Sequence[int], position: int
) -> int:
    """How far a path of the draft says what the target says from `position` on.

    Parents stand before their children, so one pass finds the path.
    """
    node, accepted = -1, 0
    for place, (token, parent) in enumerate(zip(tokens, parents, strict=True)):
        if position + accepted == len(target):
            break
        if parent == node and token == target[position + accepted]:
            node, accepted = place, accepted + 1
    return accepted


def total(counts: Sequence[Count]) -> Count:
    """The sum of counts."""
    whole = Count(-1)
    for count in counts:
        for name in ("steps", "drafted", "accepted", "generated", "iteration_seconds"):
            setattr(whole, name, getattr(whole, name) + getattr(count, name))
    return whole
