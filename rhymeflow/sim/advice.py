"""Advice: how much faster a run would be with another staleness bound or split of the devices.

The run is simulated on its recorded lengths, with a profile scaled so that instances and learner
are as busy per step as they were; then the same is done with small changes. Simulations are only
compared with one another. A gain below the error of the run's own simulation is not recommended.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from statistics import fmean
from typing import Any, NamedTuple

from rhymeflow import emulation, profiles
from rhymeflow.config import Config
from rhymeflow.config.load import build_config
from rhymeflow.errors import UserError
from rhymeflow.observe import metrics
from rhymeflow.profiles import Profile
from rhymeflow.sim.result import SimulationResult
from rhymeflow.sim.simulate import run, with_adapter
from rhymeflow.sim.workload import RecordedWorkload
from rhymeflow.store.damage import open_undamaged
from rhymeflow.store.previous_run import config_in_force, store_of
from rhymeflow.utils.bounds import FIXED_BOUNDS

STEPS = 20
"""The run's figures are means over its newest steps, at most so many; as many are simulated."""
SKIPPED = 2
"""Steps that are simulated before those and left out, since the pipeline fills in them."""
LEAST_GAIN = 0.03
"""Least relative gain in steps per second that is worth a change."""
ROUNDS = 2
"""Times that the profile is scaled: each side's waiting depends on the other side."""

_DECODE = ("k1", "k2", "k3", "c", "k4", "prefill_token", "pull")
_TRAIN = ("train_token", "measure_token", "train_step", "push")


@dataclass(frozen=True)
class Change:
    """A small change of the run's configuration, and its gain."""

    fields: dict[str, int]  # changed values by configuration path
    gain: float  # relative gain in simulated steps per second


@dataclass(frozen=True)
class Advice:
    """A run's speed, its simulation's, and the changes that were tried."""

    steps: int  # number of the run's steps from which its figures are taken
    steps_per_second: float  # of the run
    simulated: float  # steps per second of its simulation
    changes: tuple[Change, ...]  # best first

    @property
    def recommended(self) -> Change | None:
        """The best change, if its gain exceeds the error of the simulation."""
        margin = max(LEAST_GAIN, abs(self.simulated / self.steps_per_second - 1))
        best = self.changes[0] if self.changes else None
        return best if best is not None and best.gain > margin else None


class _StepSeconds(NamedTuple):
    """Mean seconds of a step, and mean busy seconds in it of an instance and of the learner."""

    seconds: float
    rollout: float
    learner: float


def advise(run_dir: Path) -> Advice:
    """Simulate a run, and each small change of it. Raises `UserError` if there is no run, it has
    too few steps, or it cannot be simulated."""
    with open_undamaged(store_of(run_dir)) as reader:
        config = config_in_force(reader)
    rows = [row for row in metrics.read(run_dir).values() if "step_time" in row]
    rows = rows[1:][-STEPS:]  # the first step includes loading and compiling
    if len(rows) < 2:
        raise UserError(f"{run_dir}: has too few steps to be simulated; it needs 3")
    recorded = _mean(rows)
    # About as many groups as a simulation requests; it would repeat fewer.
    groups = (STEPS + SKIPPED + 2 * config.schedule.bound + 2) * config.learner.groups_per_batch
    lengths = RecordedWorkload(run_dir, config, newest=groups)
    profile = emulation.profile_of(config) or dataclasses.replace(
        with_adapter(profiles.load(config.schedule.cost_model), config), devices_per_instance=1
    )

    def simulated(changes: Mapping[str, int]) -> SimulationResult:
        changed = _configured(config, changes)
        return run(changed, lengths, profile=profile, uncounted=changed.schedule.bound + 1)

    for _ in range(ROUNDS):
        profile = _scaled(profile, recorded, simulated({}))
    base = simulated({}).steps_per_second
    changes = [
        Change(dict(each), simulated(each).steps_per_second / base - 1)
        for each in _neighbours(config)
    ]
    changes.sort(key=lambda each: -each.gain)
    return Advice(len(rows), 1 / recorded.seconds, base, tuple(changes))


def _mean(rows: Sequence[Mapping[str, Any]]) -> _StepSeconds:
    return _StepSeconds(
        seconds=fmean(row["step_time"] for row in rows),
        rollout=fmean((1 - row["idle/rollout"]) * row["step_time"] for row in rows),
        learner=fmean((1 - row["idle/learner"]) * row["step_time"] for row in rows),
    )


def _scaled(profile: Profile, recorded: _StepSeconds, result: SimulationResult) -> Profile:
    """Scale the profile so that simulated instances and learner are as busy as the run's."""
    seconds = 1 / result.steps_per_second
    rollout = recorded.rollout / ((1 - result.idle_rollout) * seconds)
    learner = recorded.learner / ((1 - result.idle_learner) * seconds)
    factors = {**dict.fromkeys(_DECODE, rollout), **dict.fromkeys(_TRAIN, learner)}
    changed = {name: getattr(profile, name) * factor for name, factor in factors.items()}
    return dataclasses.replace(profile, **changed)


def _neighbours(config: Config) -> Iterator[dict[str, int]]:
    """Yield the changes to try: other bounds, and one device moved to the other side."""
    schedule, bound = config.schedule, config.schedule.bound
    if schedule.name not in FIXED_BOUNDS:
        for other in sorted({max(bound - 1, 1), bound + 1, bound + 2} - {bound}):
            yield {"schedule.max_staleness": other}
    if config.is_colocated:
        return
    training, field = config.learner.num_ranks, "learner.num_ranks"
    each = config.rollout.vllm_tensor_parallel_size
    if (profile := emulation.profile_of(config)) is not None:
        training, each = config.emulation.train_devices or 0, profile.devices_per_instance
        field = "emulation.train_devices"
    for moved in (-1, 1):
        instances, left = config.rollout.num_instances + moved, training - moved * each
        if instances >= 1 and left >= 1:
            yield {"rollout.num_instances": instances, field: left}


def _configured(config: Config, changes: Mapping[str, int]) -> Config:
    bound = changes.get("schedule.max_staleness", config.schedule.bound)
    fields = {
        **changes,
        "learner.max_steps": SKIPPED + STEPS + bound + 1,
        "learner.critic_warmup_steps": 0,  # those steps are over
        "learner.cpus": None,  # a list here would fix the number of ranks or instances
        "rollout.cpus": None,
        "run.eval_steps": 0,
        "simulation.skip_steps": SKIPPED,
        "simulation.colocated": False,
    }
    return build_config(fields, base=config, where="advice")
