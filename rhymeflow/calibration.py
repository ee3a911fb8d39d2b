"""Fits a machine's cost model to the log of a run on it.

Decoding is timed between two snapshots of an instance, less the seconds of prefill between them;
training is timed by the steps of `metrics.jsonl`. Every fourth timing is held out from the fits.
"""

from __future__ import annotations

import statistics
from collections import Counter, defaultdict
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, fields
from itertools import combinations, groupby
from operator import attrgetter
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np

from rhymeflow import profiles
from rhymeflow.config import Config
from rhymeflow.core import events
from rhymeflow.core.commands import Abort, Command, Route
from rhymeflow.core.cost import CostModel
from rhymeflow.core.events import Event, Snapshot
from rhymeflow.core.types import GroupId, TrajectoryId
from rhymeflow.emulation import learner_cost
from rhymeflow.errors import UserError
from rhymeflow.observe import metrics
from rhymeflow.profiles import Profile
from rhymeflow.store.damage import open_undamaged
from rhymeflow.store.previous_run import config_in_force, store_of
from rhymeflow.store.reader import TrajectoryReader

PUBLISHED_ERROR = 0.105
"""Mean relative error of the cost model that StaleFlow's authors report."""
LEAST_SECONDS = 0.1
"""Shortest timing: the controller stamps snapshots when it reads them, some hundredths late."""
CALM = 0.8
"""Least ratio of the smaller to the larger number of running trajectories in a calm stretch."""
LEAST_TIMINGS = 8
HELD_OUT_INTERVAL = 4
"""One timing in this many is held out."""
COMPUTED = "packing/computed_share"
_ONES = CostModel(*(1.0 for _ in fields(CostModel)))
_KINKS = 128
"""Kinks that are tried, in each of two rounds."""


# -- fits ------------------------------------------------------------------------------------------


class Stretch(NamedTuple):
    """A time in which an instance decoded without a break under one version."""

    seconds: float  # without prefill
    iterations: float
    n: float  # mean number of running trajectories
    kv_tokens: float  # mean
    is_calm: bool
    """Whether nothing was prefilled, and the number of running trajectories hardly changed."""


class DecodeFit(NamedTuple):
    """Coefficients of an iteration, `k1 K + max(k2, k3 n + c) + k4`; see `core.cost`."""

    k1: float
    k2: float
    k3: float
    c: float
    k4: float

    def seconds(self, stretch: Stretch) -> float:
        """Return the predicted seconds of a stretch."""
        floor = max(self.k2, self.k3 * stretch.n + self.c)
        return stretch.iterations * (self.k1 * stretch.kv_tokens + floor + self.k4)


class Errors(NamedTuple):
    """Errors of a fit, relative to the measured seconds."""

    mean: float
    worst: float


def fit_decode(stretches: Sequence[Stretch]) -> DecodeFit:
    """Fit the coefficients of an iteration.

    With the kink at m the floor is k2 = k3 m + c, so the seconds are linear in (k1, k3, c): k1 K +
    k3 max(n, m) + c. Kinks from 0 to the largest n are tried, then kinks between the neighbours of
    the best one. k4 cannot be separated from k2 and c, and is 0.
    """
    columns = (np.array(column, float) for column in zip(*stretches, strict=True))
    seconds, iterations, n, kv_tokens, _ = columns
    best, best_kink, best_loss = DecodeFit(0, 0, 0, 0, 0), 0.0, np.inf
    low, high = 0.0, float(n.max())
    for _ in range(2):
        kinks, step = np.linspace(low, high, _KINKS, retstep=True)
        for kink in map(float, kinks):
            terms = np.stack([kv_tokens, np.maximum(n, kink), np.ones_like(n)], axis=1)
            (k1, k3, c), loss = nonnegative(iterations[:, None] * terms, seconds)
            if loss < best_loss * (1 - 1e-9):
                best_kink, best_loss = kink, loss
                best = DecodeFit(k1=k1, k2=k3 * kink + c, k3=k3, c=c, k4=0.0)
        low, high = max(low, best_kink - float(step)), min(high, best_kink + float(step))
    return best


def nonnegative(columns: np.ndarray, seconds: np.ndarray) -> tuple[list[float], float]:
    """Fit nonnegative coefficients of the columns [P, C] to seconds [P]; return them and the loss,
    the mean squared relative error, by which short timings count as much as long ones.

    The best coefficients solve the unbounded problem for the columns that they do not set to 0, so
    all subsets of the few columns are tried.
    """
    assert (seconds > 0).all(), "a timing of 0"
    relative = columns / seconds[:, None]
    scale = np.abs(relative).max(axis=0)
    scale[scale == 0] = 1.0
    relative = relative / scale
    num_columns = columns.shape[1]
    best, best_loss = [0.0] * num_columns, 1.0
    for size in range(1, num_columns + 1):
        for chosen in combinations(range(num_columns), size):
            subset = relative[:, chosen]
            solution = np.linalg.lstsq(subset, np.ones(len(subset)), rcond=None)[0]
            loss = float(((subset @ solution - 1) ** 2).mean())
            if (solution >= 0).all() and loss < best_loss * (1 - 1e-9):
                best_loss = loss
                best = [0.0] * num_columns
                for column, value in zip(chosen, solution, strict=True):
                    best[column] = float(value / scale[column])
    return best, best_loss


def errors(predicted: Iterable[float], measured: Iterable[float]) -> Errors:
    """Return the relative errors of predictions."""
    shares = [abs(p - m) / m for p, m in zip(predicted, measured, strict=True)]
    return Errors(sum(shares) / len(shares), max(shares))


# -- the log ---------------------------------------------------------------------------------------


@dataclass
class _Instance:
    """An instance's state, as the log shows it."""

    since: Snapshot | None = None  # with which the current stretch began; None: there is none
    began: float = 0.0  # time of that snapshot
    n: int = 0  # running trajectories when the stretch began
    running: set[TrajectoryId] = field(default_factory=set)
    kv_tokens: int = 0
    prompts: set[GroupId] = field(default_factory=set)
    """Groups whose prompts were prefilled under the current weights."""

    def observe(self, now: float, snapshot: Snapshot) -> Stretch | None:
        """End the current stretch at a snapshot, if it is long enough, and begin another."""
        before, seconds, stretch = self.since, now - self.began, None
        n = max(0, len(self.running) - len(snapshot.waiting))
        if before is not None:
            if seconds < LEAST_SECONDS:
                return None
            prefill = snapshot.prefill_seconds - before.prefill_seconds
            stretch = Stretch(
                seconds - prefill,
                snapshot.decoded_tokens - before.decoded_tokens,
                (self.n + n) / 2,
                (before.kv_tokens + snapshot.kv_tokens) / 2,
                is_calm=not prefill and min(self.n, n) >= CALM * max(self.n, n),
            )
        self.since, self.began = snapshot if n else None, now
        self.n, self.kv_tokens = n, snapshot.kv_tokens
        return stretch if stretch and stretch.iterations > 0 and stretch.seconds > 0 else None


class Log:
    """The instances' work between the first and the last published version."""

    def __init__(self, recomputes: bool) -> None:
        """`recomputes`: whether a pull makes running trajectories recompute their cache."""
        self._recomputes = recomputes
        self._instances: dict[str, _Instance] = defaultdict(_Instance)
        self._prompts: dict[GroupId, int] = {}
        self._lengths: dict[TrajectoryId, int] = defaultdict(int)
        self._unpublished: list[Stretch] = []  # since the last published version
        self._prefill_seconds: dict[str, float] = {}
        self._prefilled = 0  # tokens that instances had to prefill
        self.kv_capacity = 0
        self.stretches: list[Stretch] = []

    @property
    def prefill_token(self) -> float:
        """Seconds per prefilled token."""
        return sum(self._prefill_seconds.values()) / max(1, self._prefilled)

    def hear(self, time: float, event: Event) -> None:
        """Read an event."""
        match event:
            case events.GroupCreated(group=group, prompt_tokens=tokens):
                self._prompts[group] = tokens
            case events.InstanceJoined(kv_capacity=capacity):
                self.kv_capacity = capacity
            case events.VersionPublished(version=version):
                # Before the first version and after the last one the run evaluates.
                self.stretches += self._unpublished if version > 1 else ()
                self._unpublished = []
            case events.Pulled(instance=name):
                self._pulled(self._instances[name])
            case Snapshot(instance=name):
                self._prefill_seconds[name] = event.prefill_seconds
                if stretch := self._instances[name].observe(time, event):
                    self._unpublished.append(stretch)
            case events.TrajectoryFinished() | events.TrajectoryInterrupted() | events.TurnEnded():
                self._lengths[event.trajectory] = event.length
                instance = self._instances[event.instance]
                instance.running.discard(event.trajectory)
                if not instance.running:
                    instance.since = None
            case events.Observed(trajectory=trajectory, length=length):
                self._lengths[trajectory] = length

    def obey(self, command: Command) -> None:
        """Read a command."""
        match command:
            case Route(instance=name, trajectory=trajectory):
                instance = self._instances[name]
                instance.running.add(trajectory)
                self._prefilled += self._lengths[trajectory]
                if trajectory.group not in instance.prompts:
                    self._prefilled += self._prompts.get(trajectory.group, 0)
                    instance.prompts.add(trajectory.group)
            case Abort(instance=name, trajectories=trajectories):
                self._instances[name].running.difference_update(trajectories)

    def _pulled(self, instance: _Instance) -> None:
        """Count what the instance prefills again after a pull, a group's prompt once."""
        instance.since = None
        if not self._recomputes:
            return
        members = Counter(each.group for each in instance.running)
        instance.prompts = set(members)
        if members:
            copied = sum((count - 1) * self._prompts[group] for group, count in members.items())
            self._prefilled += max(0, instance.kv_tokens - copied)


def read(reader: TrajectoryReader, config: Config) -> Log:
    """Read the log of a run."""
    log = Log(recomputes=config.rollout.kv_cache_on_pull == "recompute")
    grouped = groupby(reader.commands(), attrgetter("event"))
    cause, commands = next(grouped, (None, None))
    for seq, time, event in reader.events():
        log.hear(time, event)
        if commands is not None and cause == seq:
            for each in commands:
                log.obey(each.command)
            cause, commands = next(grouped, (None, None))
    return log


class TrainTiming(NamedTuple):
    """The computed tokens and the seconds of a training step."""

    trained: float
    measured: float  # tokens of groups whose rewards are all equal: no backward pass
    seconds: float


def train_timings(
    rows: Sequence[Mapping[str, Any]], reader: TrajectoryReader, passes: int = 1
) -> Iterator[TrainTiming]:
    """Yield the timing of each step; a batch is passed over so many times."""
    # By step, which is the version that its batch makes: [trained, measured].
    tokens: dict[int, list[float]] = defaultdict(lambda: [0.0, 0.0])
    for batch, is_flat, count in reader.query(
        "SELECT trained, MIN(reward) = MAX(reward), SUM(length) + LENGTH(prompt_tokens) / 4"
        " FROM trajectories JOIN groups USING (group_id) WHERE trained IS NOT NULL"
        " GROUP BY trained, group_id"
    ):
        tokens[batch + 1][is_flat] += count
    for row in rows:
        seconds = (1 - row["idle/learner"]) * row["step_time"] - row.get("params/push_s", 0.0)
        share = passes * row.get(COMPUTED, 1.0)
        trained, measured = (share * each for each in tokens[row["step"]])
        if seconds > 0:
            yield TrainTiming(trained, measured, seconds)


# -- the profile -----------------------------------------------------------------------------------


class FitQuality(NamedTuple):
    """The errors of one fitted quantity."""

    quantity: str
    num_points: int
    fitted: Errors
    held_out: Errors | None = None


class Calibration(NamedTuple):
    """A fitted profile and its errors."""

    profile: Profile
    qualities: tuple[FitQuality, ...]

    def text(self, output: Path | None) -> str:
        """Return a table of errors and coefficients; `output`: the profile's file, if any."""
        p = self.profile
        lines = [p.description, "", f"{'':24}{'mean':>8}{'worst':>8}  of points fitted"]
        for quantity, points, fitted, held_out in self.qualities:
            lines.append(f"{quantity:24}{fitted.mean:8.1%}{fitted.worst:8.1%}  {points}")
            if held_out is not None:
                lines.append(f"{'  held out':24}{held_out.mean:8.1%}{held_out.worst:8.1%}")
        saved = f"written to {output}: use it as --schedule.cost_model {output}"
        if output is None:
            unsaved = "the profile was not saved: --output FILE.json saves it, and "
            saved = f"{unsaved}--schedule.cost_model FILE.json uses it"
        lines += [
            f"(published fits of decode iterations: mean {PUBLISHED_ERROR:.1%})",
            "",
            f"decode iteration  {p.k1:.3g} K + max({p.k2:.3g}, {p.k3:.3g} n + {p.c:.3g}) s",
            f"prefill           {p.prefill_token:.3g} s per token",
            f"training          {p.train_token:.3g} s per token ({p.measure_token:.3g} where "
            f"rewards are equal) + {p.train_step:.3g} s",
            f"push, pull        {p.push:.3g} s, {p.pull:.3g} s",
            f"KV cache          {p.kv_capacity} tokens",
            "",
            saved,
        ]
        return "\n".join(lines)


def calibrate(run_dir: Path, *, output: Path | None) -> Calibration:
    """Fit a profile to a run and, if `output` is given, write it there for `profiles.load`. Raises
    `UserError` if there is no run, it used drafts or is too short, or the file cannot be made."""
    if output is not None:
        profiles.check_writable(output)
    with open_undamaged(store_of(run_dir)) as reader:
        config = config_in_force(reader)
        if config.emulation.is_used:
            raise UserError(f"{run_dir}: is emulated: its times are those of a profile already")
        if config.drafting.window != "off":
            raise UserError(
                f"{run_dir}: has drafting.window = {config.drafting.window!r}: iterations that "
                "verify drafts differ in size; a run that is to be fitted has drafting.window = "
                "'off'"
            )
        passes, of_all = config.learner.num_iterations, learner_cost(_ONES, config.learner)
        if config.learner.distillation.is_served or of_all.train_token != passes:
            raise UserError(
                f"{run_dir}: its steps have other passes, too: of a critic, a teacher or a "
                "reference, or forward passes for a ratio or a correction; a run that is to be "
                "fitted has none (learner.algorithm: dapo, one optimizer step for a batch)"
            )
        # The first step includes loading and compiling.
        rows = [row for row in metrics.read(run_dir).values() if "step_time" in row][1:]
        log = read(reader, config)
        trained = list(train_timings(rows, reader, passes))
    if len(log.stretches) < LEAST_TIMINGS or len(trained) < 2:
        raise UserError(
            f"{run_dir}: has {len(log.stretches)} timings of decoding and {len(trained)} of "
            f"training; a fit needs {LEAST_TIMINGS} and 2: let it train for more steps"
        )
    name = config.name if output is None else output.stem
    calibration = fitted(config, name, log, trained, rows)
    if output is not None:
        profiles.save(calibration.profile, output)
    return calibration


def fitted(
    config: Config,
    name: str,
    log: Log,
    trained: Sequence[TrainTiming],
    rows: Sequence[Mapping[str, Any]],
) -> Calibration:
    """Fit a profile to timings; `rows` are the steps' metrics."""
    calm = [each for each in log.stretches if each.is_calm]
    decoded = calm if len(calm) >= 2 * LEAST_TIMINGS else log.stretches
    decode = fit_decode(_for_fit(decoded))
    fitted_steps = _for_fit(trained)
    columns = np.array([[each.trained, each.measured, 1.0] for each in fitted_steps])
    measured_seconds = np.array([each.seconds for each in fitted_steps])
    (train_token, measure_token, train_step), _ = nonnegative(columns, measured_seconds)

    def train_seconds(timing: TrainTiming) -> float:
        return train_token * timing.trained + measure_token * timing.measured + train_step

    qualities = [
        _quality("decode iterations", decoded, decode.seconds),
        _quality("training steps", trained, train_seconds),
    ]
    times = {}
    for quantity, metric in (("pulls", "params/pull_s"), ("pushes", "params/push_s")):
        seconds = [row[metric] for row in rows if metric in row]
        times[quantity] = median = statistics.median(seconds) if seconds else 0.0
        if seconds:
            quality = errors([median] * len(seconds), seconds)
            qualities.append(FitQuality(quantity, len(seconds), quality))
    ranks = config.learner.num_ranks
    profile = Profile(
        name=name,
        description=f"{config.model.name}: {config.rollout.num_instances} instances, {ranks} ranks",
        source=_source(qualities),
        **decode._asdict(),
        prefill_token=log.prefill_token,
        train_token=train_token * ranks,
        measure_token=measure_token * ranks,
        train_step=train_step,
        push=times["pushes"],
        pull=times["pulls"],
        devices_per_instance=config.rollout.vllm_tensor_parallel_size,
        kv_capacity=log.kv_capacity,
        of_adapter=config.model.lora.is_used,
    )
    return Calibration(profile, tuple(qualities))


def _for_fit(timings: Sequence[Any]) -> list[Any]:
    """Return the timings that are not held out."""
    return [each for number, each in enumerate(timings) if number % HELD_OUT_INTERVAL]


def _quality(quantity: str, timings: Sequence[Any], predict: Callable[[Any], float]) -> FitQuality:
    fitted, held_out = (
        errors(map(predict, subset), (timing.seconds for timing in subset))
        for subset in (_for_fit(timings), timings[::HELD_OUT_INTERVAL])
    )
    return FitQuality(quantity, len(timings), fitted, held_out)


def _source(qualities: Sequence[FitQuality]) -> str:
    shares = ", ".join(
        f"{each.quantity} {each.fitted.mean:.1%}"
        + (f" (held out {each.held_out.mean:.1%})" if each.held_out is not None else "")
        for each in qualities
    )
    return f"fitted by `rhymeflow calibrate` to the log of a run; mean relative errors: {shares}"
