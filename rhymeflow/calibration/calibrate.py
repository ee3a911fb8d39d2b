"""Measure this machine with a run's model, and fit the cost model to it.

Holds true: engine and learner are measured in processes of their own, with the threads and cores
that the configuration gives them: at the same time, as they work in a run, or each alone if the
bound is 0 and they take turns. Held-out timings are not fitted to. Knows nothing of how a run is
carried out.
"""

from __future__ import annotations

import platform
import statistics
from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path

from rhymeflow import profiles
from rhymeflow.calibration.engine import EngineBench, EngineTimings, Prefill
from rhymeflow.calibration.fit import (
    DecodeFit,
    DecodeTiming,
    Errors,
    LineFit,
    errors,
    fit_decode,
    fit_line,
)
from rhymeflow.calibration.learner import LearnerBench, LearnerTimings, TrainTiming
from rhymeflow.calibration.workers import Job, together
from rhymeflow.config import Config
from rhymeflow.profiles import Profile
from rhymeflow.utils.cores import usable_cores

PUBLISHED_ERROR = 0.105
"""Mean error of the cost model as StaleFlow's authors report it."""


BUSY = 0.02
"""Share of the time that workers may wait for cores before it is worth saying."""


@dataclass(frozen=True)
class Row:
    """How well one quantity is fitted."""

    quantity: str
    fitted: Errors
    held_out: Errors | None
    num_points: int


@dataclass(frozen=True)
class Calibration:
    """A profile, and how far off it is."""

    profile: Profile
    rows: tuple[Row, ...]
    waited: float
    """Share of the time in which other programs kept a worker from its core: not counted, but what
    they leave in the caches is."""
    output: Path | None

    def text(self) -> str:
        """A table for people: errors, coefficients, where the profile went."""
        profile = self.profile
        lines = [profile.description, "", f"{'':24}{'mean':>8}{'worst':>8}  of points fitted"]
        for row in self.rows:
            lines.append(_line(row.quantity, row.fitted, f"{row.num_points}"))
            if row.held_out is not None:
                lines.append(_line("  held out", row.held_out, ""))
        lines += [
            f"(published fits of decode iterations: mean {PUBLISHED_ERROR:.1%})",
            "",
            f"decode iteration  {profile.k1:.3g} K + max({profile.k2:.3g}, "
            f"{profile.k3:.3g} n + {profile.c:.3g}) + {profile.k4:.3g} s",
            f"prefill           {profile.prefill_token:.3g} s per token",
            f"training          {profile.train_token:.3g} s per token "
            f"({profile.measure_token:.3g} where rewards are equal) + {profile.train_step:.3g} s",
            f"push, pull        {profile.push:.3g} s, {profile.pull:.3g} s",
            f"KV cache          {profile.kv_capacity} tokens",
        ]
        if self.waited > BUSY:
            lines.append(
                f"\nother programs held a worker up {self.waited:.0%} of the time: "
                "on a quiet machine the profile would be better"
            )
        if self.output is not None:
            lines.append(
                f"\nwritten to {self.output}: use it as --schedule.cost_model {self.output}"
            )
        else:
            lines.append(
                "\nthe profile was not saved: --output FILE.json saves it, and "
                "--schedule.cost_model FILE.json uses it"
            )
        return "\n".join(lines)


def calibrate(config: Config, *, output: Path | None) -> Calibration:
    """Measure and fit; with `output`, write the profile there (`profiles.load` takes it).

    Raises:
        UserError: the model or the prompts cannot be loaded, or the file not be written.
    """
    if output is not None:
        profiles.check_writable(output)
    jobs = workers(config)
    # Workers that take turns are measured alone, those that do not at the same time.
    turns = [[job] for job in (jobs[0], jobs[-1])] if config.schedule.bound == 0 else [jobs]
    timings = [timing for jobs in turns for timing in together(jobs)]
    name = config.name if output is None else output.stem
    found = fitted(config, name, _machine(jobs), timings[0], timings[-1])
    if output is not None:
        profiles.save(found.profile, output)
        return replace(found, output=output)
    return found


def workers(config: Config) -> list[Job]:
    """The workers that a run has: its instances, then the learner."""
    rollout, training, text = config.rollout, config.learner, config.model_dump_json()
    share = max(1, usable_cores() // (1 + rollout.num_instances))
    cores = rollout.cpus or (None,) * rollout.num_instances
    engines = [Job(EngineBench, text, rollout.num_threads or share, cpus) for cpus in cores]
    return [*engines, Job(LearnerBench, text, training.num_threads or share, training.cpus)]


def fitted(
    config: Config,
    name: str,
    machine: str,
    engine_timings: EngineTimings,
    learner_timings: LearnerTimings,
) -> Calibration:
    """Fit a profile to timings. `machine` goes into its description."""
    decode = fit_decode(engine_timings.decode)
    prefill = fit_prefill(engine_timings.prefills, decode)
    train = fit_line(
        [timing.tokens for timing in learner_timings.train],
        [timing.seconds for timing in learner_timings.train],
    )
    measure = fit_still(learner_timings.still, train)
    push, pull = map(statistics.median, (learner_timings.pushes, engine_timings.pulls))
    rows = (
        Row(
            "decode iterations",
            _decode_errors(decode, engine_timings.decode),
            _decode_errors(decode, engine_timings.held_out),
            len(engine_timings.decode),
        ),
        Row(
            "prefill",
            _prefill_errors(prefill, engine_timings.prefills, decode),
            None,
            len(engine_timings.prefills),
        ),
        Row(
            "training steps",
            _train_errors(train, learner_timings.train),
            _train_errors(train, learner_timings.held_out),
            len(learner_timings.train),
        ),
        Row(
            "steps with no signal",
            _train_errors(measure, learner_timings.still),
            None,
            len(learner_timings.still),
        ),
        Row("pulls", _spread(engine_timings.pulls), None, len(engine_timings.pulls)),
        Row("pushes", _spread(learner_timings.pushes), None, len(learner_timings.pushes)),
    )
    waited = max(engine_timings.waited, learner_timings.waited)
    profile = Profile(
        name=name,
        description=f"{config.model.name} on {machine}",
        source=_source(config, rows, waited),
        **decode._asdict(),
        prefill_token=prefill,
        train_token=train.each,
        measure_token=measure.each,
        train_step=train.fixed,
        push=push,
        pull=pull,
        devices_per_instance=1,
        kv_capacity=engine_timings.kv_capacity,
    )
    return Calibration(profile, rows, waited, None)


def fit_prefill(prefills: Sequence[Prefill], decode: DecodeFit) -> float:
    """Seconds per token prefilled: all of the time, less that of the iterations as such, over all
    of the tokens. So the total is right, whatever single ones are.
    """
    seconds = sum(_beyond_decoding(prefill, decode) for prefill in prefills)
    return max(0.0, seconds) / sum(prefill.tokens for prefill in prefills)


def fit_still(timings: Sequence[TrainTiming], train: LineFit) -> LineFit:
    """What a token costs in groups that move nothing, with the step's fixed cost as it is."""
    seconds = sum(timing.seconds - train.fixed for timing in timings)
    return LineFit(max(0.0, seconds) / sum(timing.tokens for timing in timings), train.fixed)


def _beyond_decoding(prefill: Prefill, decode: DecodeFit) -> float:
    return prefill.seconds - sum(decode.seconds(n, held) for n, held in prefill.iterations)


def _decode_errors(fit: DecodeFit, timings: Sequence[DecodeTiming]) -> Errors:
    predicted = [fit.seconds(timing.n, timing.kv_tokens) for timing in timings]
    return errors(predicted, [timing.seconds for timing in timings])


def _prefill_errors(each: float, prefills: Sequence[Prefill], decode: DecodeFit) -> Errors:
    """Of the whole time until all decode, as a simulation would have it."""
    predicted = [
        each * prefill.tokens + prefill.seconds - _beyond_decoding(prefill, decode)
        for prefill in prefills
    ]
    return errors(predicted, [prefill.seconds for prefill in prefills])


def _train_errors(fit: LineFit, timings: Sequence[TrainTiming]) -> Errors:
    predicted = [fit.seconds(timing.tokens) for timing in timings]
    return errors(predicted, [timing.seconds for timing in timings])


def _spread(seconds: Sequence[float]) -> Errors:
    """How far single measurements are from their median, which is what the profile has."""
    middle = statistics.median(seconds)
    return errors([middle] * len(seconds), seconds)


def _machine(jobs: Sequence[Job]) -> str:
    return (
        f"{platform.machine()}, {usable_cores()} cores; {len(jobs) - 1} engine, "
        f"{jobs[0].num_threads} threads each; learner, {jobs[-1].num_threads} threads"
    )


def _source(config: Config, rows: Sequence[Row], waited: float) -> str:
    shares = ", ".join(
        f"{row.quantity} {row.fitted.mean:.1%}"
        + (f" (held out {row.held_out.mean:.1%})" if row.held_out is not None else "")
        for row in rows
    )
    return (
        f"measured by `rhymeflow calibrate {config.name}`; mean relative errors: {shares}; "
        f"other programs held a worker up {waited:.0%} of the time"
    )


def _line(quantity: str, found: Errors, points: str) -> str:
    return f"{quantity:24}{found.mean:8.1%}{found.worst:8.1%}  {points}".rstrip()


__all__ = ["Calibration", "Row", "calibrate", "fit_prefill", "fit_still", "fitted"]
