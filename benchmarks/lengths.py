"""How well lengths are predicted, on recorded rollouts of real runs.

Recordings (`rollouts/record.py`) are told to a `LengthPredictor` as a run would: the groups of a
batch are opened, their responses finish in the order of their lengths, and they end together. By
epoch: prediction at opening against the truth, how many ended within the 80% interval, and the
explained variance as the predictor reports it at its end. Beside it how well the mean of a
response's own siblings ranks it, which is what a perfect history could do. Responses are words of
3 to 8 tokens in `smollm2`, so an interval that has whole numbers for ends cannot hold just 80%.

With `--shuffled`, each epoch's responses are given to other prompts than in the one before: what is
predicted from history is then wrong, and the explained variance has to be 0.
"""

from __future__ import annotations

import argparse
import math
import random
import statistics
import time
from collections.abc import Sequence
from typing import Any

from benchmarks import harness
from benchmarks.rollouts import record
from benchmarks.rollouts.recorded import Rollout
from rhymeflow.core.lengths import LengthPredictor
from rhymeflow.core.prediction_quality import spearman
from rhymeflow.core.types import TrajectoryId

RECORDINGS = ("demo", "demo-0.6", "smollm2", "smollm2-long-1.0", "smollm2-long-0.6")
LONG_GROUPS = 8
"""Groups that run together in recordings of recipe `long`, which has 32 prompts; of others a
training batch."""


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Options of this benchmark."""
    record.add_arguments(parser, RECORDINGS)
    parser.add_argument("--shuffled", action="store_true", help="with histories of other prompts")


def run(args: argparse.Namespace) -> dict[str, Any]:
    """Replay the recordings and report."""
    rows = []
    for name in args.recordings.split(","):
        batches, longest = record.replayable(name, args.runs, LONG_GROUPS)
        if args.shuffled:
            batches = shuffled(batches)
        rows += replay(name, batches, longest)
    return harness.report("lengths", rows, [], args, NOTES)


NOTES = (
    "Rank correlations are Spearman's, of all responses of an epoch. us/response: all facts and "
    "what is learned from them, processor time of one core."
)


def replay(name: str, batches: Sequence[list[Rollout]], longest: int) -> list[dict[str, Any]]:
    """Tell a recording to a predictor; one row an epoch."""
    size = max(rollout.sample for batch in batches for rollout in batch) + 1
    predictor = LengthPredictor(longest, size, generated=lambda trajectory: 0)
    rows, seen, seconds = [], [], 0.0
    for number, batch in enumerate(batches):
        started = time.process_time()
        for rollout in batch:
            predictor.open(rollout.group, rollout.row, rollout.epoch)
        seconds += time.process_time() - started
        seen += [predicted(predictor, rollout) for rollout in batch]
        started = time.process_time()
        tell(predictor, batch)
        seconds += time.process_time() - started
        epoch = batch[0].epoch
        if number + 1 == len(batches) or batches[number + 1][0].epoch != epoch:
            rows.append({"recording": name, "epoch": epoch, **figures(seen)})
            rows[-1]["explained variance"] = predictor.explained_variance
            rows[-1]["us/response"] = 1e6 * seconds / len(seen)
            seen, seconds = [], 0.0
    return rows


def predicted(predictor: LengthPredictor, rollout: Rollout) -> tuple[Rollout, float, bool]:
    """A response, its expected length and whether the 80% interval has it."""
    low, high = (predictor.quantile(rollout.group, q) for q in (0.1, 0.9))
    covered = round(low) <= len(rollout.tokens) <= round(high)
    return rollout, predictor.expected(rollout.group), covered


def tell(predictor: LengthPredictor, batch: Sequence[Rollout]) -> None:
    """All of a batch finish, the short ones first; then their groups end."""
    for rollout in sorted(batch, key=lambda r: (len(r.tokens), r.group, r.sample)):
        predictor.finished(TrajectoryId(rollout.group, rollout.sample), len(rollout.tokens))
    for group in dict.fromkeys(rollout.group for rollout in batch):
        predictor.close(group)


def figures(seen: Sequence[tuple[Rollout, float, bool]]) -> dict[str, Any]:
    """Of an epoch's responses."""
    lengths = [len(rollout.tokens) for rollout, *_ in seen]
    siblings: dict[int, list[float]] = {}
    for rollout, *_ in seen:
        siblings.setdefault(rollout.group, []).append(math.log(len(rollout.tokens)))
    others = []
    for rollout, *_ in seen:
        logs = siblings[rollout.group]
        others.append((sum(logs) - math.log(len(rollout.tokens))) / max(1, len(logs) - 1))
    expected = [each for _, each, _ in seen]
    return {
        "responses": len(seen),
        "rank correlation": spearman(expected, lengths),
        "its siblings'": spearman(others, lengths),
        "coverage": statistics.fmean(covered for *_, covered in seen),
        "expected / true mean": sum(expected) / sum(lengths),
    }


def shuffled(batches: Sequence[list[Rollout]]) -> list[list[Rollout]]:
    """The same responses under prompts that are shuffled anew in each epoch."""
    rows = sorted({rollout.row for batch in batches for rollout in batch})
    renamed: dict[int, dict[int, int]] = {}
    for epoch in sorted({rollout.epoch for batch in batches for rollout in batch}):
        new = list(rows)
        random.Random(epoch).shuffle(new)
        renamed[epoch] = dict(zip(rows, new, strict=True))
    return [[r._replace(row=renamed[r.epoch][r.row]) for r in batch] for batch in batches]
