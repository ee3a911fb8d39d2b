"""Drafts from history, replayed on recorded rollouts: what is accepted, and how long it takes.

    python -m benchmarks.drafter [--runs DIR] [--arctic-python PATH] [--parts accepted,...]

Recorded rollouts of real runs (`rollouts/record.py`) are replayed as an engine would ask for drafts
(`rollouts/lockstep.py`): the sequences of a step together, siblings' tokens as they come, earlier
epochs as history. Beside it arctic-inference, suffix decoding in C++, in its own environment (how
to make one: `peers/arctic_side.py`), with the same rollouts in the same order.

Parts: `accepted` at drafts of 4, 8, 16, linear and tree, by epoch; `ranking` and `scope` are
ablations; `speed` is microseconds per drafted sequence, sides in turn; `latency` is an iteration of
256 sequences with 16 responses of 8192 tokens behind each prompt.
"""

from __future__ import annotations

import argparse
import statistics
import sys
import tempfile
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np

from benchmarks import harness
from benchmarks.peers.arctic_driver import CANDIDATES, DEFAULT, Arctic
from benchmarks.rollouts.history import empty_history, remember
from benchmarks.rollouts.lockstep import Count, replay, total
from benchmarks.rollouts.recorded import Rollout, load, save
from rhymeflow.histospec.drafter import Drafter

PARTS = ("accepted", "ranking", "scope", "speed", "latency")
DRAFTS = (4, 8, 16)
RECORDINGS = ("demo", "smollm2", "smollm2-long-1.0", "smollm2-long-0.6", "smollm2-rhyme")
RANKINGS = ("reward", "frequency", "combined")
SCOPES = ("own prompt", "shared", "both")
LIMITS = {"demo": 448, "smollm2": 8}
"""Longest response of a recording; the others' is `LONG_LIMIT`."""
LONG_LIMIT = 96
GROUPS = {"demo": 16, "smollm2": 16}
"""Groups that run together: a training batch; 32 prompts x 4 for the others."""
WIDTH, SAMPLES, HISTORY_TOKENS, ITERATIONS = 256, 16, 8192, 60
"""The latency case: running sequences; responses behind each prompt, and their tokens."""
ITERATION_SECONDS = 10.0
"""What the drafter is told that an iteration takes, however many rows it has: so long that all
drafts pay."""


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Options of this benchmark."""
    harness.add_runs_argument(parser)
    parser.add_argument("--recordings", default=",".join(RECORDINGS), help="default: all")
    harness.add_parts_argument(parser, PARTS)
    parser.add_argument(
        "--repeats", type=harness.positive, default=3, help="of `speed` (default 3)"
    )
    parser.add_argument(
        "--arctic-python",
        type=harness.interpreter,
        metavar="PATH",
        help="see peers/arctic_side.py",
    )


def run(args: argparse.Namespace) -> dict[str, Any]:
    """Measure the chosen parts and report them."""
    parts = harness.chosen_parts(args, PARTS)
    bench = Bench(args)
    for part in parts:
        print(f"{part}:", file=sys.stderr, flush=True)
        getattr(bench, part)()
    name = harness.record_name("drafter", parts, PARTS)
    return harness.report(name, bench.rows, bench.targets, args, NOTES)


NOTES = (
    "Replay of recorded rollouts, all sequences of a step together, on one core. A step is one "
    "sequence in one iteration; the first token of a response comes with its prompt and is not "
    "counted. `epoch 0` has no history but siblings and other prompts; `later` are the epochs "
    "after it. arctic is arctic-inference 0.3.0 as vLLM's `suffix` uses it, `default` with vLLM's "
    "settings (depth 24, factor 1, least probability 0.1), `best` with those of five settings that "
    "are best at the same draft. us/sequence: propose and extend, in seconds of the thread, lists "
    "as an engine takes them; here that is the whole drafter, window and learning included."
)


class Ours:
    """A `lockstep.Side`: the drafter an engine has, told that rows cost nothing.

    So the window `cost` verifies all that was found, up to `max_draft`, and what is measured is the
    search. History has room for `rollouts`.
    """

    def __init__(
        self,
        rollouts: Sequence[Rollout],
        *,
        max_draft: int,
        tree: bool,
        ranking: str = "combined",
    ) -> None:
        self.history = empty_history(rollouts)
        self.drafter = Drafter(
            self.history,
            window="cost",
            max_draft=max_draft,
            shape="tree" if tree else "linear",
            ranking=ranking,
            max_sequences=WIDTH,
            max_length=max(len(rollout.prompt) + len(rollout.tokens) for rollout in rollouts),
        )
        for _ in range(50):  # drafted tokens cost nothing here, and that is well known
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
        """What the engine made."""
        handles = [self.handles[sequence] for sequence in running]
        self.drafter.observe(handles, made, rows=self.rows, kv_tokens=0, seconds=ITERATION_SECONDS)

    def end(self, sequence: int) -> None:
        """The handle is free."""
        self.drafter.end(self.handles[sequence])

    def finish(self, rollouts: Sequence[Rollout]) -> None:
        """The batch becomes history."""
        remember(self.history, rollouts)


class Bench:
    """The parts; each adds rows and targets."""

    def __init__(self, args: argparse.Namespace) -> None:
        from benchmarks.rollouts.record import recording

        self.args = args
        self.paths = {name: recording(name, args.runs) for name in args.recordings.split(",")}
        self.recordings = {name: load(path) for name, path in self.paths.items()}
        self.arctic = Arctic(args.arctic_python) if args.arctic_python else None
        self.rows: list[dict[str, Any]] = []
        self.targets: list[harness.Target] = []
        self.compiled = False

    def accepted(self) -> None:
        """Accepted tokens per step, by recording, draft and shape, beside arctic."""
        for name in self.recordings:
            for tree in (False, True):
                for max_draft in DRAFTS:
                    self._compare(name, max_draft, tree)

    def ranking(self) -> None:
        """What makes one continuation likelier than another."""
        for name in self.recordings:
            for tree in (False, True):
                for ranking in RANKINGS:
                    counts = self._ours(name, 16, tree, ranking=ranking)
                    self._row("ranking", name, ranking, 16, tree, counts)

    def scope(self) -> None:
        """The prompt's own responses, all responses, both."""
        for name in self.recordings:
            for scope in SCOPES:
                counts = self._ours(name, 16, False, scope=scope)
                self._row("scope", name, scope, 16, False, counts)

    def speed(self) -> None:
        """Microseconds per drafted sequence, sides in turn."""
        for name in self.recordings:
            sides = {"rhymeflow": lambda name=name: micros(self._ours(name, 16, False))}
            if self.arctic:
                sides["arctic"] = lambda name=name: micros(self._theirs(name, 16, False, DEFAULT))
            values = harness.interleave(sides, self.args.repeats)
            for side, measured in values.items():
                row = harness.side_row(side, measured, "us/sequence")
                self.rows.append({"part": "speed", "recording": name, **row})
            if self.arctic:
                ratio = harness.median_ratio(values["arctic"], values["rhymeflow"])
                self.targets.append(harness.Target(f"drafter/speed/{name}", ratio, 1.0))

    def latency(self) -> None:
        """An iteration of 256 sequences: 16 prompts' groups, or 256 prompts' single responses."""
        for prompts in (SAMPLES, WIDTH):
            history, running = synthetic(prompts, WIDTH // prompts)
            times = ours_latency(history, running)
            self._latency_row(f"{prompts} prompts", "rhymeflow", times)
            name = f"drafter/latency/{prompts}-prompts-ms"
            value = statistics.median(times)
            self.targets.append(harness.Target(name, value, 1.0, at_most=True))
            if self.arctic and prompts == SAMPLES:
                self._latency_row(
                    f"{prompts} prompts", "arctic", self._their_latency(history, running)
                )

    def _compare(self, name: str, max_draft: int, tree: bool) -> None:
        ours = self._ours(name, max_draft, tree)
        self._row("accepted", name, "rhymeflow", max_draft, tree, ours)
        if not self.arctic:
            return
        tried = [self._theirs(name, max_draft, tree, settings) for settings in CANDIDATES]
        best = max(tried, key=lambda counts: rate(later(counts)))
        self._row("accepted", name, "arctic default", max_draft, tree, tried[0])
        self._row("accepted", name, "arctic best", max_draft, tree, best)
        ratio = rate(later(ours)) / rate(later(best))
        shape = "tree" if tree else "linear"
        self.targets.append(
            harness.Target(f"drafter/accepted/{name}/{shape}-{max_draft}", ratio, 1.2)
        )

    def _ours(
        self,
        name: str,
        max_draft: int,
        tree: bool,
        *,
        ranking: str = "combined",
        scope: str = "both",
    ) -> list[Count]:
        batches = self.recordings[name].batches(GROUPS.get(name, 32))
        rollouts = self.recordings[name].rollouts
        how = {"max_draft": max_draft, "tree": tree, "ranking": ranking}
        if not self.compiled:  # the first call compiles
            replay(Ours(rollouts, **how), batches[:2], LIMITS.get(name, LONG_LIMIT))
            self.compiled = True
        side = Ours(rollouts, **how)
        counts = replay(side, scoped(batches, scope), LIMITS.get(name, LONG_LIMIT))
        self.bytes_per_token = side.history.num_bytes / self.recordings[name].num_tokens
        return counts

    def _theirs(
        self, name: str, max_draft: int, tree: bool, settings: dict[str, Any]
    ) -> list[Count]:
        assert self.arctic is not None
        answer = self.arctic.replay(
            self.paths[name],
            groups=GROUPS.get(name, 32),
            limit=LIMITS.get(name, LONG_LIMIT),
            max_draft=max_draft,
            tree=tree,
            **settings,
        )
        self.bytes_per_token = answer.bytes_per_token
        return answer.counts

    def _their_latency(self, history: list[Rollout], running: list[Rollout]) -> list[float]:
        assert self.arctic is not None
        with tempfile.TemporaryDirectory(prefix="rhymeflow-drafter-") as folder:
            path = Path(folder) / "latency.npz"
            save(path, [*history, *running])
            answer = self.arctic.latency(
                path, running=len(running), iterations=ITERATIONS, limit=2 * HISTORY_TOKENS,
                max_draft=16, tree=False, **DEFAULT,
            )  # fmt: skip
        return [1e3 * seconds for seconds in answer.counts[0].iteration_seconds]

    def _latency_row(self, case: str, side: str, times: list[float]) -> None:
        row = harness.side_row(side, times, "ms/iteration")
        self.rows.append({"part": "latency", "recording": case, **row})

    def _row(
        self, part: str, name: str, side: str, max_draft: int, tree: bool, counts: list[Count]
    ) -> None:
        shape = "tree" if tree else "linear"
        shown = {"part": part, "recording": name, "draft": f"{shape} {max_draft}", "side": side}
        by_epoch = [f"{rate(count):.2f}" for count in counts]
        row = later(counts).row()
        del row["epoch"]
        shown |= {"accepted/step by epoch": " ".join(by_epoch), **row}
        self.rows.append({**shown, "bytes/token": round(self.bytes_per_token or 0)})
        print("  " + " ".join(map(str, self.rows[-1].values())), file=sys.stderr, flush=True)


def later(counts: list[Count]) -> Count:
    """All epochs that have one before them."""
    return total(counts, range(1, 1 + max(count.epoch for count in counts)))


def rate(count: Count) -> float:
    """Accepted tokens per step."""
    return count.accepted / count.steps


def micros(counts: list[Count]) -> float:
    """Microseconds per drafted sequence."""
    whole = total(counts)
    return 1e6 * (whole.propose_seconds + whole.extend_seconds) / whole.steps


def scoped(batches: list[list[Rollout]], scope: str) -> list[list[Rollout]]:
    """The same rollouts, changed so that only part of the history can say anything.

    `own prompt`: each prompt writes with tokens of its own, so no other's text matches. `shared`:
    every response has a prompt of its own, so none has a history of its own.
    """
    if scope == "both":
        return batches
    number = iter(range(1 << 24, 1 << 30))

    def changed(rollout: Rollout) -> Rollout:
        if scope == "shared":
            return rollout._replace(prompt=[next(number), *rollout.prompt])
        shift = rollout.row << 16
        return rollout._replace(
            prompt=[token + shift for token in rollout.prompt],
            tokens=[token + shift for token in rollout.tokens],
        )

    return [[changed(rollout) for rollout in batch] for batch in batches]


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
    """Milliseconds of each iteration; those that compile are left out."""
    side = Ours(history, max_draft=16, tree=False)
    side.finish(history)
    replay(side, [running], 2 * HISTORY_TOKENS, iterations=2)
    side.history.clear()
    side.finish(history)
    counts = replay(side, [running], 2 * HISTORY_TOKENS, iterations=ITERATIONS)
    return [1e3 * seconds for seconds in counts[0].iteration_seconds]
