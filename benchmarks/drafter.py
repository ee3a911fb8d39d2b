"""Drafts from history, replayed on recorded rollouts: what is accepted, and how long it takes.

`latency`: an iteration of 256 sequences with 16 responses of 8,192 tokens behind each prompt.
"""

from __future__ import annotations

import argparse
import statistics
import sys
import time
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np

from benchmarks import harness
from benchmarks.rollouts import record
from benchmarks.rollouts.recorded import Rollout, empty_history, remember
from rhymeflow.config import DraftingConfig
from rhymeflow.histospec.drafter import Drafter
from rhymeflow.histospec.index import Index

DRAFTS = (4, 8, 16)
RECORDINGS = ("demo", "smollm2", "smollm2-long-1.0", "smollm2-long-0.6", "smollm2-rhyme")
LONG_GROUPS = 32
"""Groups that run together in recordings of recipe `long`; of others a training batch."""
WIDTH, SAMPLES, HISTORY_TOKENS, ITERATIONS = 256, 16, 8192, 60
"""The latency case: running sequences; responses behind each prompt, and their tokens."""
ITERATION_SECONDS = 10.0
"""What the drafter is told that an iteration takes, however many rows it has: so long that all
drafts pay."""
NOTES = (
    "Replay of recorded rollouts, all sequences of a step together, on one core. A step is one "
    "sequence in one iteration; the first token of a response comes with its prompt and is not "
    "counted. `epoch 0` has no history but siblings and other prompts; the other columns are of "
    "the epochs after it. us/sequence: propose and extend, in seconds of the thread, lists as an "
    "engine takes them; it is the whole drafter, learning included."
)


def add_arguments(parser: argparse.ArgumentParser) -> None:
    record.add_arguments(parser)
    parser.add_argument("--recordings", default=",".join(RECORDINGS), help="default: all")
    harness.add_parts_argument(parser, PARTS)


def run(args: argparse.Namespace) -> dict[str, Any]:
    return harness.report_parts("drafter", PARTS, args, NOTES)


def made(rollouts: Sequence[Rollout], *, max_draft: int, shape: Any) -> tuple[Drafter, Index]:
    """The drafter of an engine, told that rows cost nothing, and its history, with room for these.

    So the window `cost` verifies all that was found, up to `max_draft`, and what is measured is the
    search.
    """
    history = empty_history(rollouts)
    drafter = Drafter(
        history,
        DraftingConfig(max_draft=max_draft, shape=shape),
        max_sequences=WIDTH,
        max_length=max(len(rollout.prompt) + len(rollout.tokens) for rollout in rollouts),
    )
    for _ in range(50):  # so that the model of iteration times is certain
        for drafted in (0, WIDTH * max_draft):
            drafter.prices.observe(WIDTH, drafted, 0, 0, ITERATION_SECONDS)
    return drafter, history


def accepted(args: argparse.Namespace) -> harness.Found:
    """Accepted tokens per step, by recording, draft and shape."""
    rows = []
    for name in args.recordings.split(","):
        batches, limit = record.replayable(name, args.runs, LONG_GROUPS)
        rollouts = [rollout for batch in batches for rollout in batch]
        num_tokens = sum(len(rollout.tokens) for rollout in rollouts)
        # The first call compiles.
        replay(*made(rollouts, max_draft=DRAFTS[0], shape="linear"), batches[:2], limit)
        for shape in ("linear", "tree"):
            for max_draft in DRAFTS:
                drafter, history = made(rollouts, max_draft=max_draft, shape=shape)
                counts = replay(drafter, history, batches, limit)
                row = {"part": "accepted", "recording": name, "draft": f"{shape} {max_draft}"}
                row |= figures(counts)
                row["bytes/token"] = round(history.num_bytes / num_tokens)
                print("  " + " ".join(map(str, row.values())), file=sys.stderr, flush=True)
                rows.append(row)
    return rows, []


def figures(counts: Sequence[Count]) -> dict[str, Any]:
    """Columns of a row; those that are not by epoch are of the epochs with history."""

    names = ("steps", "accepted", "generated", "drafted", "seconds")
    steps, *sums = (sum(getattr(count, name) for count in counts[1:]) for name in names)
    accepted, generated, drafted, seconds = (total / steps for total in sums)
    return {
        "accepted/step by epoch": " ".join(f"{c.accepted / c.steps:.2f}" for c in counts),
        "accepted/step": round(accepted, 3),
        "mean acceptance length": round(generated, 3),
        "drafted/step": round(drafted, 3),
        "us/sequence": round(1e6 * seconds, 2),
    }


def latency(args: argparse.Namespace) -> harness.Found:
    """An iteration of 256 sequences: 16 prompts' groups, or 256 prompts' single responses."""
    rows, targets = [], []
    for prompts in (SAMPLES, WIDTH):
        times = iteration_times(*synthetic(prompts, WIDTH // prompts))
        case = {"part": "latency", "recording": f"{prompts} prompts"}
        rows.append(case | harness.side_row("rhymeflow", times, "ms/iteration"))
        name = f"drafter/latency/{prompts}-prompts-ms"
        targets.append(harness.at_most(name, statistics.median(times), 1.0))
    return rows, targets


PARTS = {"accepted": accepted, "latency": latency}


def synthetic(prompts: int, samples: int) -> tuple[list[Rollout], list[Rollout]]:
    """History and running responses: per prompt a text, each response another tenth different."""
    rng = np.random.default_rng(0)
    history, running = [], []
    for row in range(prompts):
        text = (rng.pareto(1.0, HISTORY_TOKENS) * 20).astype(np.int64) % 32_000
        prompt = rng.integers(0, 32_000, 64).tolist()
        for sample in range(SAMPLES + samples):
            epoch = int(sample >= SAMPLES)
            where, length = ((history, HISTORY_TOKENS), (running, 1 + 17 * ITERATIONS))[epoch]
            changed = rng.random(length) < 0.1
            tokens = np.where(changed, rng.integers(0, 32_000, length), text[:length])
            where.append(Rollout(row, epoch, epoch, sample, -1, epoch * prompts + row, prompt,
                                 tokens.tolist(), float(rng.integers(0, 2))))  # fmt: skip
    return history, running


def iteration_times(history: list[Rollout], running: list[Rollout]) -> list[float]:
    """Milliseconds of each iteration, without those that compile."""
    for iterations in (2, ITERATIONS):
        drafter, index = made(history, max_draft=16, shape="linear")
        remember(index, history)
        counts = replay(drafter, index, [running], 2 * HISTORY_TOKENS, iterations)
    return [1e3 * seconds for seconds in counts[0].iteration_seconds]


# -- replay ---------------------------------------------------------------------------------------


@dataclass
class Count:
    """Sums over the steps of an epoch; a step is one sequence in one iteration."""

    steps: int = 0
    drafted: int = 0
    accepted: int = 0
    generated: int = 0
    iteration_seconds: list[float] = field(default_factory=list)
    """Of each iteration, proposing and extending."""

    @property
    def seconds(self) -> float:
        return sum(self.iteration_seconds)


def replay(
    drafter: Any,
    history: Index,
    batches: Sequence[Sequence[Rollout]],
    limit: int,
    iterations: int | None = None,
) -> list[Count]:
    """Replay `batches`, responses of at most `limit` tokens; return one count an epoch.

    Each batch is entered into `history` when it is done. With `iterations`, it is broken off after
    so many.
    """
    counts: dict[int, Count] = {}
    for batch in batches:
        count = counts.setdefault(batch[0].epoch, Count())
        _replay(drafter, batch, limit, iterations, count)
        remember(history, batch)
    return list(counts.values())


def _replay(
    drafter: Any, batch: Sequence[Rollout], limit: int, iterations: int | None, count: Count
) -> None:
    handles = [
        drafter.begin(one.prompt, one.tokens[:1], sample=one.sample, noise_epoch=one.noise_epoch)
        for one in batch
    ]
    done = [1] * len(batch)
    running = [sequence for sequence, rollout in enumerate(batch) if len(rollout.tokens) > 1]
    for sequence in set(range(len(batch))) - set(running):
        drafter.end(handles[sequence])
    last = None if iterations is None else len(count.iteration_seconds) + iterations
    while running and len(count.iteration_seconds) != last:
        room = [limit - done[sequence] - 1 for sequence in running]
        those = [handles[sequence] for sequence in running]
        started = time.thread_time()
        drafts = drafter.propose(those, room, other_rows=0, kv_tokens=0)
        proposing = time.thread_time() - started
        generated = []
        for sequence, (tokens, parents) in zip(running, drafts, strict=True):
            target, position = batch[sequence].tokens, done[sequence]
            accepted = num_accepted(tokens, parents, target, position)
            done[sequence] = min(position + accepted + 1, len(target))
            generated.append(target[position : done[sequence]])
            count.drafted += len(tokens)
            count.accepted += accepted
            count.generated += len(generated[-1])
        count.steps += len(running)
        started = time.thread_time()
        rows = len(running) + sum(len(draft.tokens) for draft in drafts)
        drafter.observe(those, generated, rows=rows, kv_tokens=0, seconds=ITERATION_SECONDS)
        count.iteration_seconds.append(proposing + time.thread_time() - started)
        for sequence in running:
            if done[sequence] == len(batch[sequence].tokens):
                drafter.end(handles[sequence])
        running = [s for s in running if done[s] < len(batch[s].tokens)]
    for sequence in running:
        drafter.end(handles[sequence])


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
