"""What another staleness bound, or another split of the devices, would do for a run.

The run is simulated on the lengths it has seen, with a profile scaled so that instances and learner
are busy as long for a step as they were; then its neighbours are. Simulations are compared with one
another, never with the run: no gain within the distance between the two is recommended.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from statistics import fmean
from typing import Any, NamedTuple

from rhymeflow import profiles
from rhymeflow.config import Config
from rhymeflow.config.load import build_config
from rhymeflow.errors import UserError
from rhymeflow.observe import metrics
from rhymeflow.profiles import Profile
from rhymeflow.sim.result import SimulationResult
from rhymeflow.sim.simulate import run
from rhymeflow.sim.workload import RecordedWorkload
from rhymeflow.store.damage import open_undamaged
from rhymeflow.store.previous_run import config_in_force, store_of
from rhymeflow.utils.bounds import FIXED_BOUNDS

STEPS = 20
"""The newest, of which the run's figures are, and as many are simulated."""
SKIPPED = 2
"""Of the simulation, before those: the pipeline fills."""
LEAST_GAIN = 0.03
"""That is worth a change."""
ROUNDS = 2
"""Of scaling: how long a step takes depends on both sides."""

_DECODE = ("k1", "k2", "k3", "c", "k4", "prefill_token", "pull")
_TRAIN = ("train_token", "measure_token", "train_step", "push")


@dataclass(frozen=True)
class Change:
    """A neighbour of the run's configuration."""

    fields: dict[str, int]  # what differs, by the fields' paths
    gain: float
    """Its steps per second over those of the run as it is, both simulated, less 1."""


@dataclass(frozen=True)
class Advice:
    """What was found."""

    steps: int  # of the run, that its figures are of
    steps_per_second: float  # the run's
    simulated: float  # the same of its simulation
    changes: tuple[Change, ...]  # all that were tried, the best first

    @property
    def recommended(self) -> Change | None:
        """The best, if its gain is more than the simulation is off by."""
        margin = max(LEAST_GAIN, abs(self.simulated / self.steps_per_second - 1))
        best = self.changes[0] if self.changes else None
        return best if best is not None and best.gain > margin else None


class _Seen(NamedTuple):
    """Means over a step: its seconds, and those that an instance and the learner are busy."""

    seconds: float
    rollout: float
    learner: float


def advise(run_dir: Path) -> Advice:
    """Simulate a run, and what differs from it a little.

    Raises:
        UserError: there is no run, it has too few steps, or cannot be simulated.
    """
    with open_undamaged(store_of(run_dir)) as reader:
        config = config_in_force(reader)
    rows = [row for row in metrics.read(run_dir).values() if "step_time" in row]
    rows = rows[1:][-STEPS:]  # in the first all is loaded and compiled
    if len(rows) < 2:
        raise UserError(f"{run_dir}: has too few steps to be simulated; it needs 3")
    seen = _mean(rows)
    groups = (STEPS + SKIPPED + 2 * config.schedule.bound + 2) * config.learner.groups_per_batch
    lengths = RecordedWorkload(run_dir, config, newest=groups)
    profile = dataclasses.replace(profiles.load(config.schedule.cost_model), devices_per_instance=1)

    def simulated(changes: Mapping[str, int]) -> SimulationResult:
        changed = _configured(config, changes)
        return run(changed, lengths, profile=profile, uncounted=changed.schedule.bound + 1)

    for _ in range(ROUNDS):
        profile = _scaled(profile, seen, simulated({}))
    base = simulated({}).steps_per_second
    changes = [
        Change(dict(each), simulated(each).steps_per_second / base - 1)
        for each in _neighbours(config)
    ]
    changes.sort(key=lambda each: -each.gain)
    return Advice(len(rows), 1 / seen.seconds, base, tuple(changes))


def _mean(rows: Sequence[Mapping[str, Any]]) -> _Seen:
    busy = (
        fmean((1 - row[f"idle/{side}"]) * row["step_time"] for row in rows)
        for side in ("rollout", "learner")
    )
    return _Seen(fmean(row["step_time"] for row in rows), *busy)


def _scaled(profile: Profile, seen: _Seen, result: SimulationResult) -> Profile:
    """With which the simulation's instances and learner would be busy as those of the run are."""
    seconds = 1 / result.steps_per_second
    rollout = seen.rollout / ((1 - result.idle_rollout) * seconds)
    learner = seen.learner / ((1 - result.idle_learner) * seconds)
    factors = {**dict.fromkeys(_DECODE, rollout), **dict.fromkeys(_TRAIN, learner)}
    changed = {name: getattr(profile, name) * factor for name, factor in factors.items()}
    return dataclasses.replace(profile, **changed)


def _neighbours(config: Config) -> Iterator[dict[str, int]]:
    """Other bounds, and as many devices otherwise split."""
    schedule, bound = config.schedule, config.schedule.bound
    if schedule.name not in FIXED_BOUNDS:
        for other in sorted({max(bound - 1, 1), bound + 1, bound + 2} - {bound}):
            yield {"schedule.max_staleness": other}
    instances, ranks = config.rollout.num_instances, config.learner.num_ranks
    for moved in (-1, 1):
        if instances + moved >= 1 and ranks - moved >= 1:
            yield {"rollout.num_instances": instances + moved, "learner.num_ranks": ranks - moved}


def _configured(config: Config, changes: Mapping[str, int]) -> Config:
    bound = changes.get("schedule.max_staleness", config.schedule.bound)
    fields = {
        **changes,
        "learner.max_steps": SKIPPED + STEPS + bound + 1,
        "learner.cpus": None,  # they say how many ranks and instances there are
        "rollout.cpus": None,
        "run.eval_steps": 0,
        "simulation.skip_steps": SKIPPED,
        "simulation.colocated": False,
    }
    return build_config(fields, over=config, where="advice")
