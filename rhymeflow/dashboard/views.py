"""Smaller views of a run: the first screen, curves, drafts, a response, the simulator's advice."""

from __future__ import annotations

import os
import shlex
import sys
import threading
from collections.abc import Sequence
from concurrent.futures import Future, ProcessPoolExecutor
from functools import cached_property
from itertools import pairwise
from multiprocessing import get_context
from pathlib import Path
from typing import TYPE_CHECKING, Any

import msgspec
import numpy as np
from numpy.typing import NDArray

from rhymeflow.core.types import CUT, TrajectoryId
from rhymeflow.dashboard.groups import Summaries
from rhymeflow.dashboard.run import Run
from rhymeflow.learner.algorithms.advantages import batch_advantages, shaped_rewards
from rhymeflow.observe import query
from rhymeflow.observe.metrics import by_step, is_time_weighted
from rhymeflow.observe.query import SHOWN_PROMPT, TokenTexts, draft_figures, drafts_by_epoch
from rhymeflow.store.checkpoint_dirs import paths_of
from rhymeflow.store.previous_run import section_in_force
from rhymeflow.store.reader import TrajectoryReader
from rhymeflow.suites.figures import REWARD, STDERR

if TYPE_CHECKING:
    from rhymeflow.sim.advice import Advice

# -- the first screen ------------------------------------------------------------------------------


SHOWN = (
    "step_time", "reward", "frac_reward_zero_std", "completions/clipped_ratio",
    "rollout/tokens_per_s", "distillation/divergence",
)  # fmt: skip
AN_END = 8


def overview(run: Run) -> dict[str, Any]:
    """Return `query.overview` with the run's `name`, how many `rows` of metrics there are, the
    `held_out` reward of the first, the best and the last evaluation, each as (step, mean, standard
    error), and `SHOWN` of the `first` and the `last` `AN_END` steps."""
    steps = by_step(rows := run.metrics.rows())
    rewards = query.held_out(steps)
    chosen = (min(rewards), max(rewards, key=rewards.__getitem__), max(rewards)) if rewards else ()
    with run.reader() as reader:
        found = query.overview(run.directory, reader, rows, run.verdicts)
    trained = [[row.get(name) for name in SHOWN] for row in steps.values() if row.get("step_time")]
    return found | {
        "name": run.name,
        "rows": len(rows),
        "first": trained[:AN_END],
        "last": trained[-AN_END:],
        "held_out": [(step, rewards[step], steps[step].get(STDERR)) for step in chosen],
    }


# -- curves ----------------------------------------------------------------------------------------

POINTS = 1_000
"""Most points of a curve. If there are more rows, a point is the mean of several (weighted by their
time, if the metric is a share of time), with their least and greatest values."""
_NORMAL_95 = 1.96  # half the width of a 95% interval, in standard errors


def metrics(run: Run, names: Sequence[str]) -> dict[str, Any]:
    """Return points of each metric: `step`, `time`, `value`, and `low` and `high` where a point is
    a mean. For up to `POINTS` held-out rewards these are the 95% interval of the mean over
    prompts."""
    rows = run.metrics.rows()

    def column(name: str) -> NDArray[np.float64]:
        return np.array([row.get(name) for row in rows], float)  # None is not a number there

    steps, times, seconds = column("step"), column("time"), np.nan_to_num(column("step_time"))
    found: dict[str, Any] = {
        name: _points(steps, times, column(name), seconds if is_time_weighted(name) else None)
        for name in names
    }
    if REWARD in found and "low" not in found[REWARD]:
        is_known = ~np.isnan(rewards := column(REWARD))
        rewards, widths = rewards[is_known], _NORMAL_95 * column(STDERR)[is_known]
        if len(rewards) and not np.isnan(widths).any():  # of a single prompt there is none
            low, high = (rewards - widths).tolist(), (rewards + widths).tolist()
            found[REWARD] |= {"low": low, "high": high, "is_interval": True}
    return found


def meanings(names: Sequence[str]) -> dict[str, tuple[str, str]]:
    """Return what metrics mean, and what they look like in a run that learns; of those known."""
    from rhymeflow.observe.meanings import meaning_of  # it imports the configuration

    return {name: meaning[1:] for name in names if (meaning := meaning_of(name))}


def _points(
    steps: NDArray[np.float64],
    times: NDArray[np.float64],
    every: NDArray[np.float64],
    seconds: NDArray[np.float64] | None,
) -> dict[str, list[float]]:
    """`seconds`: weights of the means, of a metric that is a share of time or a rate; `weight` in
    the answer."""
    known = np.flatnonzero(~np.isnan(every))
    every, width = every[known], -(-len(known) // POINTS) or 1
    weights = np.ones(len(known)) if seconds is None else np.maximum(seconds[known], 1e-9)
    starts = np.arange(0, len(known), width)
    total = np.add.reduceat(weights, starts) if len(known) else weights
    middles = known[starts + np.diff([*starts, len(known)]) // 2]
    found = {"step": steps[middles].astype(int).tolist(), "time": times[middles].tolist()}
    if width == 1:
        found["value"] = every.tolist()
    else:
        found["value"] = (np.add.reduceat(every * weights, starts) / total).tolist()
        found["low"] = np.minimum.reduceat(every, starts).tolist()
        found["high"] = np.maximum.reduceat(every, starts).tolist()
    return found if seconds is None else found | {"weight": total.tolist()}


# -- drafts ----------------------------------------------------------------------------------------

NEWEST = 500  # groups whose positions are counted
PROMPTS = 20  # listed of the best, and of the worst

EDGES = (0, 16, 64, 256, 1024, 4096, 16384)
_STRETCHES = """SELECT start, LENGTH(tokens) / 4, steps, drafted, accepted FROM segments
        WHERE group_id > ?1 AND steps > 0
    UNION ALL SELECT start, length, steps, drafted, NULL FROM pruned
        WHERE group_id > ?1 AND steps > 0"""
# Prompts are looked up only for the rows that are listed.
_BY_PROMPT = f"""SELECT d.row, (SELECT SUBSTR(prompt, 1, {SHOWN_PROMPT}) FROM main.groups g
        WHERE g.row = d.row AND g.suite IS NULL ORDER BY group_id LIMIT 1), epoch, newest, sampled,
    steps, drafted
    FROM (SELECT row, MAX(epoch) AS epoch, MAX(group_id) AS newest, SUM(sampled) AS sampled,
        SUM(steps) AS steps, SUM(drafted) AS drafted
        FROM temp.summaries WHERE steps > 0 AND epoch > 0 GROUP BY row
        ORDER BY 1.0 * SUM(sampled) / SUM(steps) {{0}}, row LIMIT {PROMPTS}) d
    ORDER BY 1.0 * sampled / steps {{0}}, d.row"""


def drafts(run: Run) -> dict[str, Any]:
    """`draft_figures` by epoch, by position in a response (of the newest groups) and by prompt. An
    iteration counts at the position of its token without a draft (`run.token_details`); where that
    is not known, iterations are spread evenly over a stretch of one instance and version."""
    with run.kept(Summaries) as kept:
        reader = kept.reader
        epochs = drafts_by_epoch(reader, "SELECT * FROM temp.summaries")
        ((last,),) = reader.query("SELECT COALESCE(MAX(group_id), 0) FROM temp.summaries")
        positions = _by_position(reader.query(_STRETCHES, max(last - NEWEST, -1)))
        best, worst = (_by_prompt(reader, order) for order in ("DESC", "ASC"))
    return {
        "epochs": epochs,
        "positions": [{"from": start, **draft_figures(*sums)} for start, *sums in positions],
        "best": best,
        "worst": worst,
    }


def _by_position(stretches: list[tuple[Any, ...]]) -> list[tuple[Any, ...]]:
    """(edge, tokens, iterations, drafted tokens) of each interval of `EDGES` that has tokens."""
    sums = {edge: [0, 0.0, 0.0] for edge in EDGES}
    for start, length, steps, drafted, accepted in stretches:
        for low, high in pairwise((*EDGES, sys.maxsize)):
            first, last = max(low, start), min(high, start + length)
            if first < last:
                iterations = steps * (last - first) / length
                if accepted is not None:
                    iterations = accepted[first - start : last - start].count(0)
                added = last - first, iterations, drafted * iterations / steps
                for i, value in enumerate(added):
                    sums[low][i] += value
    return [(edge, *values) for edge, values in sums.items() if values[0]]


def _by_prompt(reader: TrajectoryReader, order: str) -> list[dict[str, Any]]:
    names = ("row", "prompt", "epoch", "group")
    return [
        dict(zip(names, row, strict=False)) | draft_figures(*row[len(names) :])
        for row in reader.query(_BY_PROMPT.format(order))
    ]


# -- a response ------------------------------------------------------------------------------------

_BATCH = """SELECT group_id, member, reward, components, reason, (SELECT SUM(s.length) FROM spans s
        WHERE s.group_id = t.group_id AND s.member = t.member), length FROM trajectories t
    WHERE trained = ?1 AND group_id IN (SELECT group_id FROM groups WHERE ending_version = ?1)
    ORDER BY group_id, member"""


def group(run: Run, number: int) -> dict[str, Any]:
    """Return `query.group` with the `advantage` of each member, None of one that was not trained
    on. Raises `UserError` if there is no such group."""
    with run.reader() as reader:
        found = query.group(reader, number)
        advantages = _advantages(reader, found["step"])
    for each in found["members"]:
        each["advantage"] = advantages.get((number, each["member"]))
    return found


def response(run: Run, trajectory: TrajectoryId, texts: TokenTexts) -> dict[str, Any]:
    """Return `query.response` with texts of its and of the prompt's tokens, the advantage, and
    `command` for the prompt. Raises `UserError` if there is no such response."""
    with run.reader() as reader:
        found = query.response(run.directory, reader, trajectory)
        read = reader.prompt_tokens(trajectory.group)
        return {
            **found,
            "prompt_texts": read and texts.of(reader, read),
            "texts": found["tokens"] and texts.of(reader, found["tokens"]),
            "advantage": _advantages(reader, found["step"]).get(trajectory),
            "generate": command(run.directory, reader, found["prompt"]),
        }


def command(directory: Path, reader: TrajectoryReader, prompt: Any) -> str | None:
    """Return a `rhymeflow generate` command with the prompt for the run's newest checkpoint, or its
    initial model; None for a conversation, which the command cannot take."""
    if not isinstance(prompt, str):
        if [message["role"] for message in prompt] != ["user"]:
            return None
        prompt = prompt[0]["content"]
    checkpoints = paths_of(directory)
    model, rollout, data = (section_in_force(reader, n) for n in ("model", "rollout", "data"))
    source = str(checkpoints[max(checkpoints)]) if checkpoints else model.name
    options = ["--temperature", f"{rollout.temperature:g}"]
    options += ["--max-tokens", str(rollout.max_completion_length)]
    if data.system_prompt is not None:
        options += ["--system", data.system_prompt]
    return shlex.join(["rhymeflow", "generate", source, prompt, *options])


def _advantages(reader: TrajectoryReader, step: int | None) -> dict[tuple[int, int], float]:
    """Return the advantages of a step's responses, by the rewards of its batch; none of tokens that
    have each their own, or one that depends on what is not recorded."""
    if step is None:
        return {}
    from rhymeflow.reward.components import WeightedSum  # loads the configuration

    batch = reader.query(_BATCH, step - 1)
    groups, learner = [group for group, *_ in batch], section_in_force(reader, "learner")
    rollout, reward, environment = (
        section_in_force(reader, n) for n in ("rollout", "reward", "environment")
    )
    if learner.kl_in == "reward" or learner.discounts or learner.distillation.is_used:
        return {}
    most, totals = rollout.max_completion_length, [each[6] for each in batch]
    found = batch_advantages(
        shaped_rewards([each[2] for each in batch], totals, learner, most),
        groups,
        [0 if learner.mask_truncated_completions and each[4] in CUT else each[5] for each in batch],
        learner,
        [msgspec.json.decode(each[3] or b"{}") for each in batch],
        WeightedSum(reward.functions, environment.judges).weights,
    )
    values = found.values.tolist()
    return {(each[0], each[1]): value for each, value in zip(batch, values, strict=True)}


# -- advice ----------------------------------------------------------------------------------------

_NICENESS = 10


class Advisor:
    """Simulates changes of a run's configuration and recommends one. It takes seconds of a core, so
    another process of low priority computes it, one run at a time."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._futures: dict[str, Future[Advice]] = {}

    @cached_property
    def _pool(self) -> ProcessPoolExecutor:
        return ProcessPoolExecutor(1, get_context("spawn"), os.nice, (_NICENESS,))

    def found(self, run: Run, *, anew: bool = False) -> dict[str, Any]:
        """Return the advice, or `{"working": True}` until it is ready; `anew`: compute it again.
        Raises `UserError` if the run cannot be simulated."""
        from rhymeflow.sim.advice import advise  # not above: pages do not need the simulator

        with self._lock:
            future = self._futures.get(run.name)
            if future is None or (anew and future.done()):
                future = self._futures[run.name] = self._pool.submit(advise, run.directory)
        if not future.done():
            return {"working": True}
        advice = future.result()
        return vars(advice) | {"recommended": advice.recommended}
