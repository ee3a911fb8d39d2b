"""What failures cost on 64 to 1,024 simulated devices: effective training time by failure rate.

Each kind of death is simulated by itself for what one costs, and the ratio at a rate follows from
that; where deaths come before the cluster is over the last one, all are simulated together beside.
The baseline restarts the whole job from the newest checkpoint. README.md says what is assumed.
"""

from __future__ import annotations

import argparse
import itertools
import math
import statistics
import sys
from collections.abc import Iterator, Mapping, Sequence
from typing import Any, NamedTuple, cast

from benchmarks import harness
from benchmarks.simulated import splits
from benchmarks.staleflow import setting
from rhymeflow.config import Config
from rhymeflow.sim.faults import DETECTION, HOUR, Death, Devices, Victim, failures
from rhymeflow.sim.result import SimulationResult
from rhymeflow.sim.simulate import run as simulate
from rhymeflow.sim.workload import uniform, workload

SIZES = (64, 256, 1024)
MTBF_HOURS = 16384 * 54 * 24 / 419
"""Device-hours between two failures: Llama 3 (arXiv 2407.21783), 419 unexpected interruptions in 54
days on 16,384 H100s."""
RATES = (1, 10, 100)
"""Times the published rate. OPT-175B's logbook, 7.5 hours between interruptions of some 1,000
A100s, is 6.6 times it."""
SIMULATED = f"{RATES[-1]}x, simulated"
APART = 900.0
"""Seconds in which there is one death, where the cost of one is measured."""
STEPS, UNCOUNTED = 16, 3
AIM = 0.8
"""Of the effective training time; published best under injected failures: over 80%, against 60%
where the job restarts (RobustRL, arXiv 2512.22492, at another rate than any of these)."""
NOTES = (
    f"Simulated, {STEPS} steps; benchmarks/README.md says what is assumed. Rates are "
    f"multiples of a failure per {MTBF_HOURS:,.0f} device-hours. `s lost`: seconds that one death "
    "costs, medians over seeds, from all `deaths` of that kind; what is below a hundredth of the "
    "run is no more than the other order in which things happen. `1x` and so on: effective "
    "training time ratio, from these costs; `simulated`: all kinds together, median over seeds. "
    "`restart` is the baseline."
)


class Cell(NamedTuple):
    """A cluster and a schedule; the fields are those that `setting` asks for."""

    devices: int
    schedule: str
    bound: int
    model: str = "14b"
    prompt: int = 2048

    @property
    def rollout(self) -> int:
        """Devices that only generate; 0: all alternate."""
        return self.devices // 2 if self.bound else 0

    def kinds(self) -> dict[str, int]:
        """What dies of one failed device, and of how many devices that is so."""
        if not self.rollout:
            return {"devices": self.devices}
        return {"instance": self.rollout, "learner": self.devices - self.rollout}


SCHEDULES = (("synchronous", 0), ("rhymeflow", 1), ("rhymeflow", 3))


def add_arguments(parser: argparse.ArgumentParser) -> None:
    harness.add_number(parser, "--seeds", 3, "draws of failures, for each figure")
    what = "devices, may be repeated (default: 64, 256, 1024)"
    parser.add_argument("--devices", type=harness.whole(8), action="append", help=what, metavar="N")


def run(args: argparse.Namespace) -> dict[str, Any]:
    sizes = args.devices or SIZES
    rows = []
    for devices, (schedule, bound) in itertools.product(sizes, SCHEDULES):
        cell = Cell(devices, schedule, bound)
        rows += rows_of(cell, args.seeds, is_beside=devices == max(sizes))
    return harness.report("faults_simulated", rows, targets(rows), args, NOTES)


def rows_of(cell: Cell, seeds: int, *, is_beside: bool) -> list[dict[str, Any]]:
    """A row for a schedule, with the greatest rate simulated beside, and for `synchronous` one for
    each baseline.
    """
    quiet = one(cell, None)
    row: dict[str, Any] = {name: getattr(cell, name) for name in ("devices", "schedule", "bound")}
    row["s/step"] = round(1 / quiet.steps_per_second, 1)
    rows = [{**row, "recovery": "resume", **resuming(cell, quiet, seeds)}]
    if is_beside:
        found = [one(cell, failures_of(cell, seed)).throughput for seed in range(seeds)]
        rows[0] |= harness.spread(SIMULATED, [each / quiet.throughput for each in found])
    if not cell.bound:
        rows += [{**row, **restarting(cell, quiet, save_steps)} for save_steps in (1, 20)]
    return rows


def resuming(cell: Cell, quiet: SimulationResult, seeds: int) -> dict[str, Any]:
    """What the deaths of each kind cost, and the ratios that follow from it."""
    columns: dict[str, Any] = {}
    per_second = 0.0
    for kind, devices in cell.kinds().items():
        seconds, deaths = cost_of(cell, kind, quiet, seeds)
        columns |= {f"s lost/{kind}": round(seconds, 1), f"deaths/{kind}": deaths}
        per_second += seconds * devices / (MTBF_HOURS * HOUR)
    return columns | {f"{rate}x": round(1 / (1 + per_second * rate), 4) for rate in RATES}


def cost_of(cell: Cell, kind: str, quiet: SimulationResult, seeds: int) -> tuple[float, int]:
    """Seconds that one death costs, the median over seeds, and how many deaths there were."""
    results = [one(cell, apart(cell, kind, seed)) for seed in range(seeds)]
    deaths = [sum(result.deaths.values()) for result in results]
    pairs = zip(results, deaths, strict=True)
    found = [(result.seconds - quiet.seconds) / died for result, died in pairs if died]
    return max(0.0, statistics.median(found)), sum(deaths)


def one(cell: Cell, dying: Iterator[Death] | None) -> SimulationResult:
    config = configure(cell)
    result = simulate(config, workload(config, None), deaths=dying, uncounted=UNCOUNTED)
    told = ", ".join(f"{n} {kind}" for kind, n in result.deaths.items()) or "no deaths"
    print(f"  {tuple(cell)[:3]}: {result.seconds:.0f} s, {told}", file=sys.stderr, flush=True)
    return result


def configure(cell: Cell) -> Config:
    settings = {
        **setting(cell),
        "drafting.window": "cost",
        "learner.groups_per_batch": str(cell.devices // 2),
        "run.save_steps": "1",  # a step takes minutes
        "simulation.workload.num_prompts": str(cell.devices // 2 * splits.SKIPPED),
        **splits.planned_every(2),
    }
    return splits.configure(splits.case(cell.devices, settings, STEPS), cell.rollout)


def apart(cell: Cell, kind: str, seed: int) -> Iterator[Death]:
    """Deaths of one kind, one in each `APART` seconds, never two within half of that."""
    for number in itertools.count():
        at = (number + uniform(seed, b"at", number) / 2) * APART
        place = int(uniform(seed, b"place", number) * cell.rollout)
        yield Death(at, place if kind == "instance" else cast(Victim, kind))


def failures_of(cell: Cell, seed: int) -> Iterator[Death]:
    """All deaths at the greatest rate; an instance has one device."""
    devices = Devices(
        num_instances=cell.rollout or cell.devices,
        per_instance=1,
        learner=cell.devices - cell.rollout,
        colocated=not cell.rollout,
    )
    return failures(seed, devices, device_mtbf_hours=MTBF_HOURS / RATES[-1])


def restarting(cell: Cell, quiet: SimulationResult, save_steps: int) -> dict[str, Any]:
    """The baseline: work since the checkpoint is done again, and so is a restart that fails (its
    expectation, as in Daly, A higher order estimate of the optimum checkpoint interval, 2006)."""
    faults = configure(cell).simulation.faults
    away = DETECTION + max(faults.instance_seconds, faults.learner_seconds)
    work = save_steps / quiet.steps_per_second
    columns: dict[str, Any] = {"recovery": f"restart, checkpoint every {save_steps}"}
    for rate in RATES:
        failures = rate * cell.devices / (MTBF_HOURS * HOUR)
        seconds = math.exp(failures * away) * math.expm1(failures * work) / failures
        columns[f"{rate}x"] = round(work / seconds, 4)
    return columns


def targets(rows: Sequence[Mapping[str, Any]]) -> list[harness.Target]:
    found = []
    for row in rows:
        if SIMULATED in row:
            name = f"{row['devices']} devices/{row['schedule']}, bound {row['bound']}, 100x"
            found.append(harness.Target(f"faults/{name}", row[SIMULATED], AIM))
    return found
