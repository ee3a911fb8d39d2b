"""Drafts from history, replayed on recorded rollouts: what is accepted, and how long it takes.

Recorded rollouts of real runs (`rollouts/record.py`) are replayed as an engine would ask for drafts
(`rollouts/lockstep.py`): the sequences of a step together, siblings' tokens as they come, earlier
epochs as history. Beside it arctic-inference, suffix decoding in C++, in its own environment (how
to make one: `peers/arctic_side.py`), with the same rollouts in the same order.

Parts: `accepted` at drafts of 4, 8, 16, linear and tree, by epoch; `latency` is an iteration of 256
sequences with 16 responses of 8,192 tokens behind each prompt.
"""

from __future__ import annotations

import argparse
import statistics
import sys
import tempfile
from collections.abc import Sequence
from contextlib import ExitStack, closing
from pathlib import Path
from typing import Any

import numpy as np

from benchmarks import harness
from benchmarks.peers.process import Peer
from benchmarks.rollouts import record
from benchmarks.rollouts.history import empty_history, remember
from benchmarks.rollouts.lockstep import Count, replay, total
from benchmarks.rollouts.recorded import Rollout, load, save
from rhymeflow.histospec.drafter import Drafter

PARTS = ("accepted", "latency")
DRAFTS = (4, 8, 16)
RECORDINGS = ("demo", "smollm2", "smollm2-long-1.0", "smollm2-long-0.6", "smollm2-rhyme")
LIMITS = {"demo": 448, "smollm2": 8}
"""Longest response of a recording; `LONG_LIMIT` of the others."""
LONG_LIMIT = 96
GROUPS = {"demo": 16, "smollm2": 16}
"""Groups that run together: a training batch; 32 prompts x 4 of the others."""
WIDTH, SAMPLES, HISTORY_TOKENS, ITERATIONS = 256, 16, 8192, 60
"""The latency case: running sequences; responses behind each prompt, and their tokens."""
ITERATION_SECONDS = 10.0
"""What the drafter is told that an iteration takes, however many rows it has: so long that all
drafts pay."""
ARCTIC = {"depth": 24, "factor": 1.0, "least": 0.1}
"""What vLLM sets if the user sets nothing."""
CANDIDATES = (
    ARCTIC,
    {"depth": 24, "factor": 2.0, "least": 0.1},
    {"depth": 24, "factor": 4.0, "least": 0.1},
    {"depth": 24, "factor": 4.0, "least": 0.0},
    {"depth": 64, "factor": 1.0, "least": 0.0},
)
"""Settings of arctic-inference; the best is taken."""
NOTES = (
    "Replay of recorded rollouts, all sequences of a step together, on one core. A step is one "
    "sequence in one iteration; the first token of a response comes with its prompt and is not "
    "counted. `epoch 0` has no history but siblings and other prompts; the other columns are of "
    "the epochs after it. arctic is arctic-inference 0.3.0 as vLLM's `suffix` uses it, `default` "
    "with vLLM's settings (depth 24, factor 1, least probability 0.1), `best` with those of five "
    "settings that are best at the same draft. us/sequence: propose and extend, in seconds of the "
    "thread, lists as an engine takes them; ours is the whole drafter, learning included."
)


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Options of this benchmark."""
    harness.add_runs_argument(parser)
    parser.add_argument("--recordings", default=",".join(RECORDINGS), help="default: all")
    harness.add_parts_argument(parser, PARTS)
    harness.add_python_argument(parser, "arctic")


def run(args: argparse.Namespace) -> dict[str, Any]:
    """Measure the chosen parts and report them."""
    parts = harness.chosen_parts(args, PARTS)
    rows: list[dict[str, Any]] = []
    targets: list[harness.Target] = []
    with ExitStack() as stack:
        arctic = None
        if args.arctic_python:
            arctic = start_arctic(args.arctic_python)
            stack.enter_context(closing(arctic))
        for part in parts:
            print(f"{part}:", file=sys.stderr, flush=True)
            found = accepted(args, arctic) if part == "accepted" else latency(arctic)
            rows += found[0]
            targets += found[1]
    name = harness.record_name("drafter", parts, PARTS)
    return harness.report(name, rows, targets, args, NOTES)


def start_arctic(python: str) -> Peer:
    """arctic-inference, ready for requests."""
    return Peer(python, ["-m", "benchmarks.peers.arctic_side"])


class Ours:
    """A `lockstep.Side`: the drafter of an engine, told that rows cost nothing.

    So the window `cost` verifies all that was found, up to `max_draft`, and what is measured is the
    search. History has room for `rollouts`.
    """

    def __init__(
        self,
        rollouts: Sequence[Rollout],
        *,
        max_draft: int,
        tree: bool,
    ) -> None:
        self.history = empty_history(rollouts)
        self.drafter = Drafter(
            self.history,
            window="cost",
            max_draft=max_draft,
            shape="tree" if tree else "linear",
            ranking="combined",
            max_sequences=WIDTH,
            max_length=max(len(rollout.prompt) + len(rollout.tokens) for rollout in rollouts),
        )
        for _ in range(50):  # so that the model of iteration times is certain
            for drafted in (0, WIDTH * max_draft):
                self.drafter.iteration_time.observe(WIDTH, drafted, 0, 0, ITERATION_SECONDS)
        self.handles: list[int] = []
        self.rows = 0

    def begin(self, rollouts: Sequence[Rollout], first: Sequence[list[int]]) -> None:
        """Sequences of a batch, each with its first token."""
        self.handles = [
            self.drafter.begin(
                rollout.prompt, tokens, sample=rollout.sample, noise_epoch=rollout.noise_epoch
            )
            for rollout, tokens in zip(rollouts, first, strict=True)
        ]

    def propose(self, running: list[int], room: list[int]) -> Sequence[tuple[list[int], list[int]]]:
        """All sequences in one call."""
        handles = [self.handles[sequence] for sequence in running]
        drafts = self.drafter.propose(handles, room, other_rows=0, kv_tokens=0)
        self.rows = len(running) + sum(len(draft.tokens) for draft in drafts)
        return drafts

    def extend(self, running: list[int], made: list[list[int]]) -> None:
        """What the engine generated."""
        handles = [self.handles[sequence] for sequence in running]
        self.drafter.observe(handles, made, rows=self.rows, kv_tokens=0, seconds=ITERATION_SECONDS)

    def end(self, sequence: int) -> None:
        """The handle is free."""
        self.drafter.end(self.handles[sequence])

    def finish(self, rollouts: Sequence[Rollout]) -> None:
        """The batch becomes history."""
        remember(self.history, rollouts)


Found = tuple[list[dict[str, Any]], list[harness.Target]]


def accepted(args: argparse.Namespace, arctic: Peer | None) -> Found:
    """Accepted tokens per step, by recording, draft and shape, beside arctic."""
    rows, targets = [], []
    for name in args.recordings.split(","):
        path = record.recording(name, args.runs)
        groups, limit = GROUPS.get(name, 32), LIMITS.get(name, LONG_LIMIT)
        found = load(path)
        batches = found.batches(groups)
        how = {"max_draft": DRAFTS[0], "tree": False}
        replay(Ours(found.rollouts, **how), batches[:2], limit)  # the first call compiles
        for tree in (False, True):
            for max_draft in DRAFTS:
                how = {"max_draft": max_draft, "tree": tree}
                draft = f"{'tree' if tree else 'linear'} {max_draft}"
                side = Ours(found.rollouts, **how)
                counts = replay(side, batches, limit)
                memory = side.history.num_bytes / found.num_tokens
                rows.append(accepted_row(name, draft, "rhymeflow", counts, memory))
                if arctic is None:
                    continue
                request = {"path": str(path.resolve()), "groups": groups, "limit": limit}
                tried = [ask(arctic, {**request, "settings": how | c}) for c in CANDIDATES]
                best = max(tried, key=lambda answer: rate(later(answer[0])))
                rows.append(accepted_row(name, draft, "arctic default", *tried[0]))
                rows.append(accepted_row(name, draft, "arctic best", *best))
                ratio = rate(later(counts)) / rate(later(best[0]))
                target = f"drafter/accepted/{name}/{draft.replace(' ', '-')}"
                targets.append(harness.Target(target, ratio, 1.2))
    return rows, targets


def latency(arctic: Peer | None) -> Found:
    """An iteration of 256 sequences: 16 prompts' groups, or 256 prompts' single responses."""
    rows, targets = [], []
    for prompts in (SAMPLES, WIDTH):
        history, running = synthetic(prompts, WIDTH // prompts)
        case = {"part": "latency", "recording": f"{prompts} prompts"}
        times = ours_latency(history, running)
        rows.append(case | harness.side_row("rhymeflow", times, "ms/iteration"))
        name = f"drafter/latency/{prompts}-prompts-ms"
        targets.append(harness.Target(name, statistics.median(times), 1.0, at_most=True))
        if arctic and prompts == SAMPLES:
            times = arctic_latency(arctic, history, running)
            rows.append(case | harness.side_row("arctic", times, "ms/iteration"))
    return rows, targets


def ask(arctic: Peer, request: dict[str, Any]) -> tuple[list[Count], float]:
    """Its counts by epoch, and the bytes per token of its shared tree."""
    answer = arctic.ask(request)
    return [Count(**count) for count in answer["counts"]], answer["bytes_per_token"]


def arctic_latency(arctic: Peer, history: list[Rollout], running: list[Rollout]) -> list[float]:
    """Milliseconds of each of its iterations."""
    with tempfile.TemporaryDirectory(prefix="rhymeflow-drafter-") as folder:
        path = Path(folder) / "latency.npz"
        save(path, [*history, *running])
        request = {
            "path": str(path),
            "running": len(running),
            "iterations": ITERATIONS,
            "limit": 2 * HISTORY_TOKENS,
            "settings": {"max_draft": 16, "tree": False, **ARCTIC},
        }
        counts, _ = ask(arctic, request)
    return [1e3 * seconds for seconds in counts[0].iteration_seconds]


def accepted_row(
    name: str, draft: str, side: str, counts: list[Count], bytes_per_token: float
) -> dict[str, Any]:
    """A table row; figures that are not by epoch are of the epochs with history."""
    whole = later(counts)
    row = {
        "part": "accepted",
        "recording": name,
        "draft": draft,
        "side": side,
        "accepted/step by epoch": " ".join(f"{rate(count):.2f}" for count in counts),
        "accepted/step": round(rate(whole), 3),
        "mean acceptance length": round(whole.generated / whole.steps, 3),
        "drafted/step": round(whole.drafted / whole.steps, 3),
        "us/sequence": round(1e6 * sum(whole.iteration_seconds) / whole.steps, 2),
        "bytes/token": round(bytes_per_token),
    }
    print("  " + " ".join(map(str, row.values())), file=sys.stderr, flush=True)
    return row


def later(counts: list[Count]) -> Count:
    """The sum of all epochs that have one before them."""
    return total(counts, range(1, 1 + max(count.epoch for count in counts)))


def rate(count: Count) -> float:
    """Accepted tokens per step."""
    return count.accepted / count.steps


def synthetic(prompts: int, samples: int) -> tuple[list[Rollout], list[Rollout]]:
    """History and running responses: per prompt a text, each response another tenth different."""
    rng = np.random.default_rng(0)
    history, running = [], []
    for row in range(prompts):
        text = (rng.pareto(1.0, HISTORY_TOKENS) * 20).astype(np.int64) % 32_000
        prompt = rng.integers(0, 32_000, 64).tolist()
        for sample in range(SAMPLES + samples):
            length = HISTORY_TOKENS if sample < SAMPLES else 1 + 17 * ITERATIONS
            changed = rng.random(length) < 0.1
            tokens = np.where(changed, rng.integers(0, 32_000, length), text[:length])
            where = history if sample < SAMPLES else running
            epoch = int(sample >= SAMPLES)
            where.append(Rollout(row, epoch, epoch, sample, -1, epoch * prompts + row, prompt,
                                 tokens.tolist(), float(rng.integers(0, 2))))  # fmt: skip
    return history, running


def ours_latency(history: list[Rollout], running: list[Rollout]) -> list[float]:
    """Milliseconds of each iteration, without those that compile."""
    side = Ours(history, max_draft=16, tree=False)
    side.finish(history)
    replay(side, [running], 2 * HISTORY_TOKENS, iterations=2)
    side.history.clear()
    side.finish(history)
    counts = replay(side, [running], 2 * HISTORY_TOKENS, iterations=ITERATIONS)
    return [1e3 * seconds for seconds in counts[0].iteration_seconds]
