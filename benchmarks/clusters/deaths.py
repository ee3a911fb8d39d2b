"""Deaths in emulated runs: what one costs, beside the simulation of the same deaths.

Workers are killed at even intervals, of one kind in a run; starting one again, and writing a
checkpoint, takes what it takes on this machine, and the simulation is told how long that was.
Responses of two runs differ in length by more than deaths cost: what a run would have taken without
them is simulated, with its own lengths, and corrected by what the simulator is off without deaths.
"""

from __future__ import annotations

import argparse
import os
import statistics
import tempfile
import time
from collections.abc import Sequence
from contextlib import closing
from datetime import datetime
from pathlib import Path
from typing import Any, NamedTuple

from benchmarks import harness
from benchmarks.clusters.runs import (
    OURS,
    configure,
    published_at,
    ready_at,
    scale_of,
    simulate_run,
    split_of,
)
from benchmarks.faults import processes
from benchmarks.faults_simulated import MTBF_HOURS, RATES
from benchmarks.training.train import train
from rhymeflow import emulation
from rhymeflow.config import Config
from rhymeflow.config.load import build_config
from rhymeflow.core.events import InstanceJoined, InstanceLeft, LearnerReady, VersionPublished
from rhymeflow.sim.faults import DETECTION, HOUR, Death
from rhymeflow.sim.workload import RecordedWorkload, uniform
from rhymeflow.store.checkpoint_dirs import paths_of
from rhymeflow.store.reader import TrajectoryReader
from rhymeflow.store.schema import EVENTS

APART = 900.0
"""Seconds of the cluster between two deaths."""
WITHIN = 0.05
"""By how much the simulator's effective training time may differ."""


class Killed(NamedTuple):
    """A death as the log has it."""

    at: float
    """Since the run was ready."""
    away: float
    """Seconds until another worker was there."""
    site: int
    """Of the instance; 0: the learner."""


class Killer:
    """Kills a worker of a kind at even intervals, from when the first batch was published; a call
    looks whether it is time."""

    def __init__(self, kind: str, apart: float) -> None:
        self._kind, self._apart = kind, apart
        self._next: float | None = None
        self.times: list[float] = []

    def __call__(self, run_dir: Path) -> bool:
        if self._next is None and (run_dir / "metrics.jsonl").is_file():
            self._next = time.time() + self._apart / 2
        if self._next is not None and time.time() >= self._next:
            found = processes.of_kind(processes.family(os.getpid()), self._kind)
            number = len(self.times)
            if found:
                victim = found[int(uniform(0, b"place", number) * len(found))]
                if processes.done(victim.kill):
                    self.times.append(time.time())
            self._next += self._apart
        return False


def deaths(args: argparse.Namespace) -> harness.Found:
    """A run without deaths, and one for each kind."""
    rows = []
    for name in args.setting or ["a"]:
        training = split_of(name, OURS, args.scale)
        scale = scale_of(name, training, args.scale)
        with tempfile.TemporaryDirectory(prefix="rhymeflow-bench-") as folder:
            config = configure(name, OURS, 0, training, Path(folder) / "quiet", scale)
            config = emulation.resolved(
                config.changed(run={"save_steps": 1, "instance_restarts": 100})
            )
            train(config)
            quiet = Path(folder) / "quiet"
            written = written_after(quiet, scale)
            simulated = simulate_run(config, RecordedWorkload(quiet, config)).seconds
            correction = published_at(quiet)[-1] / simulated
            row = {"setting": name, "side": str(OURS), "scale": round(scale)}
            for kind in ("rollout", "learner"):
                run_dir = Path(folder) / kind
                killer = Killer(kind, APART / scale)
                train(config.changed(run={"output_dir": str(run_dir)}), is_enough=killer)
                found = killed(run_dir, kind, killer.times, scale)
                lengths = RecordedWorkload(run_dir, config)
                without = correction * simulate_run(config, lengths).seconds
                beside = simulate_run(told(config, found, written), lengths, dying(found, kind))
                times = without, published_at(run_dir)[-1] - without
                rows.append(row | {"died": "instance" if kind == "rollout" else kind})
                rows[-1] |= columns(
                    config, kind, found, times, correction * beside.seconds - without
                )
    names = [f"{row['setting']}, {row['died']}" for row in rows]
    errors = [abs(row["of the time"] - row["of the time, simulated"]) for row in rows]
    return rows, [
        harness.at_most(f"deaths/{name}: error of the simulator", error, WITHIN)
        for name, error in zip(names, errors, strict=True)
    ]


def columns(
    config: Config, kind: str, found: Sequence[Killed], times: tuple[float, float], simulated: float
) -> dict[str, Any]:
    """What deaths cost, and the effective training time at the rates of `bench faults_simulated`,
    from what one costs."""
    without, lost = times
    training, devices = config.emulation.train_devices or 0, config.emulation.devices or 0
    failing = training if kind == "learner" else devices - training
    each = max(lost, 0.0) / len(found)
    per_second = each * failing / (MTBF_HOURS * HOUR)
    return {
        "deaths": len(found),
        "s away": round(statistics.median(death.away for death in found)),
        "s lost/death": round(lost / len(found)),
        "simulated": round(simulated / len(found)),
        "of the time": round(without / (without + lost), 3),
        "of the time, simulated": round(without / (without + simulated), 3),
        **{f"{rate}x": round(1 / (1 + per_second * rate), 5) for rate in RATES},
    }


def killed(run_dir: Path, kind: str, times: Sequence[float], scale: float) -> list[Killed]:
    """The deaths of a run, from its log; when a learner died the log does not say, but the clock of
    this machine does."""
    left: list[tuple[float, int]] = []
    back: list[float] = []
    sites: dict[str, int] = {}
    empty: list[int] = []
    with closing(TrajectoryReader(run_dir / EVENTS)) as reader:
        first, ready = reader.attempts()[0], ready_at(reader)
        for _, at, event in reader.events():
            match event:
                case InstanceJoined() if not empty:
                    sites[event.instance] = len(sites)
                case InstanceJoined():
                    sites[event.instance] = empty.pop(0)
                    back.append(at)
                case InstanceLeft() if kind == "rollout" and len(left) < len(times):
                    empty.append(sites[event.instance])
                    left.append((at, empty[-1]))
                case LearnerReady() if kind == "learner":
                    back.append(at)
    if kind == "learner":
        began = datetime.fromisoformat(first.started).timestamp()
        left, back = [(first.time + (at - began) * scale, 0) for at in times], back[1:]
    pairs = zip(left, back, strict=False)  # the last may not be back when the run ends
    return [Killed(at - ready, joined - at, site) for (at, site), joined in pairs]


def written_after(run_dir: Path, scale: float) -> float:
    """Seconds of the cluster from a version's publication until its checkpoint was there."""
    with closing(TrajectoryReader(run_dir / EVENTS)) as reader:
        published = {
            event.version: at
            for _, at, event in reader.events()
            if isinstance(event, VersionPublished)
        }
        first = reader.attempts()[0]
    began = datetime.fromisoformat(first.started).timestamp()
    return statistics.median(
        # Renaming a directory, once it is complete, changes its status.
        max(0.0, first.time + (path.stat().st_ctime - began) * scale - published[version])
        for version, path in paths_of(run_dir).items()
    )


def told(config: Config, found: Sequence[Killed], written: float) -> Config:
    """The configuration whose simulation has workers away, and checkpoints written, for as long as
    they were."""
    away = max(0.0, statistics.median(death.away for death in found) - DETECTION)
    fields = {f"simulation.faults.{who}_seconds": away for who in ("instance", "learner")}
    fields |= {
        "simulation.faults.checkpoint_copy_seconds": 0.0,
        "simulation.faults.checkpoint_write_seconds": written,
    }
    return build_config(fields, base=config, where="deaths")


def dying(found: Sequence[Killed], kind: str) -> list[Death]:
    return [Death(each.at, "learner" if kind == "learner" else each.site) for each in found]
