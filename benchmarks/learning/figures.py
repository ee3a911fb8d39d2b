"""What one training run says about learning, read from its directory.

Holds true: epochs count from 0; the noise cannot rhyme with anything in epoch 0, so measures begin
with epoch 1 unless they say otherwise. Knows nothing of other runs.
"""

from __future__ import annotations

import math
import statistics
from collections import defaultdict
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np

from benchmarks.e2e import training_rows
from benchmarks.learning import repeats
from benchmarks.learning.repeats import Common, Response
from rhymeflow.config import Config
from rhymeflow.histospec.noise_sharing import noise_epoch
from rhymeflow.observe.summary import EVENTS, summarize
from rhymeflow.store.reader import TrajectoryReader

GOAL = 0.85
"""Held-out reward of `steps_to_goal`."""


@dataclass(frozen=True)
class Figures:
    """A run in curves and sums."""

    epoch_steps: int
    """Steps that one epoch takes."""
    held_out: list[tuple[int, float]]
    """(version, mean reward), in order."""
    reward: list[float]
    """Of each step's batch."""
    entropy: list[float]
    """By step, nats a token."""
    variance: dict[int, float]
    """By epoch: variance of the rewards inside a group, mean over groups."""
    rhyming: dict[int, Common]
    """By epoch: members whose noise is that of the epoch before, against that epoch."""
    fresh: dict[int, Common]
    """By epoch: the other members."""
    halves: dict[int, float]
    """By epoch: reward of the first half of the members less that of the others."""
    unsolved: int
    """Prompts of which no response was rewarded in the first epoch."""
    discovered: int
    """Those of them of which one was rewarded later."""
    distinct: float
    """Different responses per response, over the whole run."""
    staleness: float
    """Mean over all that was trained on."""


def read(run_dir: Path, config: Config) -> Figures:
    """Read a finished run of that configuration; all members of its groups were trained on."""
    summary, rows = summarize(run_dir), training_rows(run_dir)
    responses = read_responses(run_dir)
    unsolved, discovered = discoveries(responses)
    num_members = config.rollout.num_generations
    num_rhyming = count_rhyming(num_members, config.rollout.rhyming_noise)
    assert config.data.size is not None
    assert len(rows) == summary.steps == config.learner.max_steps, run_dir
    assert summary.staleness_mean is not None
    return Figures(
        epoch_steps=config.data.size // config.learner.groups_per_batch,
        held_out=list(summary.eval_rewards),
        reward=[row["reward"] for row in rows],
        entropy=[row["entropy"] for row in rows],
        variance=group_variance(responses),
        rhyming=repeats.by_epoch(responses, range(num_rhyming)),
        fresh=repeats.by_epoch(responses, range(num_rhyming, num_members)),
        halves=repeats.halves(responses, num_members),
        unsolved=unsolved,
        discovered=discovered,
        distinct=repeats.distinct(responses),
        staleness=summary.staleness_mean,
    )


def count_rhyming(num_members: int, share: float) -> int:
    """How many members keep their noise; they are the first."""
    epochs = [noise_epoch(1, m, num_members=num_members, share=share) for m in range(num_members)]
    return epochs.count(0)


def read_responses(run_dir: Path) -> list[Response]:
    """All responses that were trained on."""
    reader = TrajectoryReader(run_dir / EVENTS)
    try:
        parts = reader.query(
            "SELECT g.row, g.epoch, s.group_id, s.member, t.reward, s.tokens"
            " FROM segments s JOIN groups g USING (group_id)"
            " JOIN trajectories t USING (group_id, member)"
            " WHERE t.trained IS NOT NULL ORDER BY s.group_id, s.member, s.start"
        )
    finally:
        reader.close()
    texts: dict[tuple[int, int, int, int, float], bytes] = defaultdict(bytes)
    for *key, tokens in parts:
        texts[tuple(key)] += tokens
    return [
        Response(row, epoch, member, np.frombuffer(tokens, "<i4"), reward)
        for (row, epoch, _, member, reward), tokens in texts.items()
    ]


def group_variance(responses: Iterable[Response]) -> dict[int, float]:
    """By epoch: variance of the rewards inside a group, mean over groups."""
    groups: dict[tuple[int, int], list[float]] = defaultdict(list)
    for response in responses:
        groups[response.epoch, response.row].append(response.reward)
    by_epoch: dict[int, list[float]] = defaultdict(list)
    for (epoch, _), rewards in groups.items():
        by_epoch[epoch].append(statistics.pvariance(rewards))
    return {epoch: statistics.fmean(found) for epoch, found in sorted(by_epoch.items())}


def discoveries(responses: Sequence[Response]) -> tuple[int, int]:
    """Prompts without a rewarded response in epoch 0, and those of them that had one later."""
    first = {r.row for r in responses if r.epoch == 0}
    unsolved = first - {r.row for r in responses if r.epoch == 0 and r.reward > 0}
    return len(unsolved), len(unsolved & {r.row for r in responses if r.reward > 0})


# -- measures: one number of a run -----------------------------------------------------------------


def final(run: Figures) -> float:
    """Held-out reward: mean over the evaluations of the last quarter."""
    last = run.held_out[-1][0]
    return statistics.fmean(reward for step, reward in run.held_out if step >= 0.75 * last)


def area(run: Figures) -> float:
    """Held-out reward: mean height of the curve from the end of the first epoch on."""
    points = [(step, reward) for step, reward in run.held_out if step >= run.epoch_steps]
    steps, rewards = zip(*points, strict=True)
    return float(np.trapezoid(rewards, steps) / (steps[-1] - steps[0]))


def steps_to_goal(run: Figures) -> float:
    """The step at which held-out reward first reaches `GOAL`, between evaluations linearly."""
    for (before, low), (after, high) in zip(run.held_out, run.held_out[1:], strict=False):
        if high >= GOAL:
            return before + max(0.0, GOAL - low) / (high - low) * (after - before)
    return math.nan


def later(values: Sequence[float], run: Figures) -> float:
    """Mean over the steps after the first epoch."""
    return statistics.fmean(values[run.epoch_steps :])


def of_common(name: str, which: Callable[[Figures], Iterable[Common]]) -> Callable[..., float]:
    """A share of what responses have in common; `nan` for a run that has no such members."""

    def measure(run: Figures) -> float:
        total = sum(which(run), Common())
        return total.shares()[name] if total.pairs else math.nan

    return measure


def _rhyming(run: Figures) -> Iterable[Common]:
    return run.rhyming.values()


def _fresh(run: Figures) -> Iterable[Common]:
    return run.fresh.values()


def _all(run: Figures) -> Iterable[Common]:
    return [*run.rhyming.values(), *run.fresh.values()]


def _from_second(found: dict[int, float]) -> float:
    return statistics.fmean(value for epoch, value in found.items() if epoch > 0)


MEASURES: dict[str, Callable[[Figures], float]] = {
    "held-out reward, last quarter": final,
    "held-out reward, area": area,
    f"steps to {GOAL:g} held out": steps_to_goal,
    "training reward": lambda run: later(run.reward, run),
    "first half of members less second, reward": lambda run: _from_second(run.halves),
    "unsolved in the first epoch, solved later": lambda run: (
        run.discovered / run.unsolved if run.unsolved else math.nan
    ),
    "entropy": lambda run: later(run.entropy, run),
    "reward variance in a group": lambda run: _from_second(run.variance),
    "distinct responses per response": lambda run: run.distinct,
    "agreement, rhyming members": of_common("agreement", _rhyming),
    "agreement, other members": of_common("agreement", _fresh),
    "equal up to the first difference": of_common("prefix", _all),
    "equal at all positions": of_common("equal", _all),
    "identical responses": of_common("identical", _all),
    "staleness": lambda run: run.staleness,
}
"""By what a table calls them. From the second epoch on, `distinct` and `staleness` excepted."""
