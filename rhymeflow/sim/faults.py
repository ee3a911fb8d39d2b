"""Simulated failures: which processes die and when, what is lost, and when they are back.

Devices fail independently and without ageing: a Poisson process that depends on the seed, the rates
and the devices only, so it is the same for all schedules. A device's whole process group dies with
it. Stored tokens of responses are kept. A process that dies while it restarts restarts again."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from itertools import count
from math import inf, log
from typing import TYPE_CHECKING, Literal, NamedTuple

from rhymeflow.config.run import RunConfig
from rhymeflow.core.events import InstanceLeft, LearnerReady, TrajectoryInterrupted
from rhymeflow.core.types import Version
from rhymeflow.errors import UserError
from rhymeflow.sim.workload import uniform

if TYPE_CHECKING:
    from rhymeflow.sim.cluster import Cluster


HOUR = 3600.0
DETECTION = 10.0  # seconds from a death to its detection
Victim = int | Literal["learner", "devices", "controller"]
"""The instance at this site; the learner; `devices`: all instances and the learner; `controller`:
these and the controller."""


class Death(NamedTuple):
    """A death and its time in virtual seconds."""

    at: float
    victim: Victim


@dataclass(frozen=True, slots=True)
class Recovery:
    """The times of recovery from a death, in seconds, and the rules of checkpoints."""

    instance: float  # until a new instance is up; see `FaultsConfig`
    learner: float  # until the learner or the controller is up again
    run: RunConfig
    evaluates: Callable[[Version], bool]  # whether a version is evaluated
    checkpoint_copy: float  # for which a checkpoint stops the learner
    checkpoint_write: float  # after that, until the checkpoint can be loaded
    detection: float = DETECTION
    store: float = 1.0  # between writes of the tokens in flight, as in real runs


@dataclass(frozen=True, slots=True)
class Devices:
    """The number of devices of each process group."""

    num_instances: int
    per_instance: int
    learner: int  # devices that train; with `colocated` all devices
    colocated: bool

    @property
    def total(self) -> int:
        """The number of all devices."""
        return self.learner + (0 if self.colocated else self.num_instances * self.per_instance)

    def victim(self, device: int) -> Victim:
        """Return what dies with a device, by its number."""
        if self.colocated:
            return "devices"
        place = device // self.per_instance
        return place if place < self.num_instances else "learner"


def failures(
    seed: int,
    devices: Devices,
    *,
    device_mtbf_hours: float | None,
    controller_mtbf_hours: float | None = None,
) -> Iterator[Death]:
    """Yield failures in order of time, endlessly; none if both mean times are None."""
    device_rate = devices.total / (device_mtbf_hours or inf)  # per hour
    rate = (device_rate + 1 / (controller_mtbf_hours or inf)) / HOUR  # per second
    if not rate:
        return
    now = 0.0
    for number in count():
        now -= log(uniform(seed, b"failure", number)) / rate
        chosen = uniform(seed, b"victim", number) * rate * HOUR
        if chosen < device_rate:
            yield Death(now, devices.victim(int(chosen / device_rate * devices.total)))
        else:
            yield Death(now, "controller")


_MOST_FAILURES = 10_000  # most failures between two steps; then the run is given up


class Deaths:
    """Applies a run's failures to its cluster, in order; without `recovery` there are none."""

    def __init__(
        self, cluster: Cluster, recovery: Recovery | None, failures: Iterable[Death]
    ) -> None:
        self.counts: Counter[str] = Counter()  # by `instance` or another victim
        self.silent_until = 0.0  # when the controller is up again
        self._cluster, self._recovery, self._failures = cluster, recovery, iter(failures)
        self._restored_at = inf
        self._steps = self._since_step = 0

    def expect(self) -> None:
        """Schedule the next failure."""
        failure = next(self._failures, None)
        if failure is not None:
            self._cluster.at(failure.at, self._fail, failure.victim)

    def _fail(self, victim: Victim) -> None:
        recovery = self._recovery
        assert recovery is not None
        self._check_progress()
        self.counts["instance" if isinstance(victim, int) else victim] += 1
        if victim == "controller":
            self.silent_until = self._cluster.now + recovery.detection + recovery.learner
        if isinstance(victim, int):
            self._lose_instance(victim, recovery)
        else:
            self._lose_learner(recovery)
        if victim in ("devices", "controller"):
            for number in range(self._cluster.num_instances):
                self._lose_instance(number, recovery)
        self.expect()

    def _check_progress(self) -> None:
        steps = len(self._cluster.steps)
        self._since_step = self._since_step + 1 if steps == self._steps else 1
        self._steps = steps
        if self._since_step > _MOST_FAILURES:
            raise UserError(
                f"simulation.faults: step {steps + 1} is never done: {_MOST_FAILURES:,} failures "
                "came before it"
            )

    def _lose_instance(self, number: int, recovery: Recovery) -> None:
        cluster = self._cluster
        site = cluster.sites[number]
        site.losses, site.is_ready = site.losses + 1, False
        name, site.instance = site.instance, None
        if name is not None:
            responses = cluster.live.pop(name).crash(cluster.now, recovery.store)
            stored = [TrajectoryInterrupted(r.id, name, 0, r.stored) for r in responses]
            noticed = recovery.detection + cluster.latencies.message_seconds
            cluster.report([*stored, InstanceLeft(name, "failure")], noticed)
        up = max(cluster.now + recovery.detection + recovery.instance, self.silent_until)
        cluster.at(up, cluster.join, (number, site.losses))

    def _lose_learner(self, recovery: Recovery) -> None:
        cluster = self._cluster
        cluster.learner.die(cluster.now)
        loaded = max(cluster.now + recovery.detection + recovery.learner, self.silent_until)
        self._restored_at = loaded + cluster.learner.retrain()
        cluster.at(self._restored_at, self._restore, cluster.now)

    def _restore(self, died: float) -> None:
        cluster = self._cluster
        if self._restored_at != cluster.now:
            return  # it has died again
        self._restored_at = inf
        cluster.learner.restored(died, cluster.now)
        cluster.report([LearnerReady(cluster.published)])
        for number, site in enumerate(cluster.sites):
            if site.is_ready:
                cluster.join((number, site.losses))
        cluster.expect_version()
