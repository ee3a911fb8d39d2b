"""Which simulated processes die, when, what is lost, and when they are back.

Devices fail independently of one another and of their age: a Poisson process of the seed, the rates
and the devices, the same for all schedules. The process group of a device dies with it. Of a
response what was stored is kept. What dies while it restarts begins its restart anew.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from itertools import count
from math import inf, log
from typing import TYPE_CHECKING, Literal, NamedTuple

from rhymeflow.core.events import InstanceLeft, LearnerReady, TrajectoryInterrupted
from rhymeflow.core.types import Version
from rhymeflow.errors import UserError
from rhymeflow.sim.workload import uniform

if TYPE_CHECKING:
    from rhymeflow.sim.cluster import Cluster


HOUR = 3600.0
DETECTION = 10.0  # seconds from a death to when it is noticed
Victim = int | Literal["learner", "devices", "controller"]
"""What dies: the instance at this site; the learner; all instances and the learner; these and the
controller."""


class Death(NamedTuple):
    """Something dies at this second."""

    at: float
    victim: Victim


@dataclass(frozen=True, slots=True)
class Recovery:
    """What a death costs; times in seconds."""

    instance: float  # until a new instance is up; see `FaultsConfig`
    learner: float  # until the learner, or the controller, is
    save_seconds: float
    save_steps: int
    evaluates: Callable[[Version], bool]  # whether a version is evaluated
    detection: float = DETECTION
    store: float = 1.0  # how often the tokens in flight are stored, as in real runs
    checkpoint_copy: float = 1.0  # how long the learner waits for a copy, at each checkpoint
    checkpoint_write: float = 60.0  # how long it is written after that, until it can be loaded


@dataclass(frozen=True, slots=True)
class Devices:
    """How many devices each process group has."""

    num_instances: int
    per_instance: int
    learner: int  # devices that train; with `colocated` all there are
    colocated: bool

    @property
    def total(self) -> int:
        """The number of devices."""
        return self.learner + (0 if self.colocated else self.num_instances * self.per_instance)

    def victim(self, device: int) -> Victim:
        """What dies with a device."""
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
    """All failures, in order, without end; none if both times are None."""
    of_devices = devices.total / (device_mtbf_hours or inf)
    rate = (of_devices + 1 / (controller_mtbf_hours or inf)) / HOUR
    if not rate:
        return
    now = 0.0
    for number in count():
        now -= log(uniform(seed, b"failure", number)) / rate
        chosen = uniform(seed, b"victim", number) * rate * HOUR
        if chosen < of_devices:
            yield Death(now, devices.victim(int(chosen / of_devices * devices.total)))
        else:
            yield Death(now, "controller")


_HOPELESS = 10_000  # failures without a step between them after which the run is ended


class Deaths:
    """The failures of a run, in order; without `recovery` there are none."""

    def __init__(
        self, cluster: Cluster, recovery: Recovery | None, failures: Iterable[Death]
    ) -> None:
        self.counts: Counter[str] = Counter()  # by `instance` or another victim
        self.silent_until = 0.0  # until then the controller is down
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
        self._check_hope()
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

    def _check_hope(self) -> None:
        steps = len(self._cluster.steps)
        self._since_step = self._since_step + 1 if steps == self._steps else 1
        self._steps = steps
        if self._since_step > _HOPELESS:
            raise UserError(
                f"simulation.faults: step {steps + 1} is never done: {_HOPELESS:,} failures came "
                "before it"
            )

    def _lose_instance(self, number: int, recovery: Recovery) -> None:
        cluster = self._cluster
        struck = cluster.sites[number]
        struck.losses, struck.is_ready = struck.losses + 1, False
        name, struck.instance = struck.instance, None
        if name is not None:
            responses = cluster.live.pop(name).crash(cluster.now, recovery.store)
            stored = [TrajectoryInterrupted(r.id, name, 0, r.stored) for r in responses]
            noticed = recovery.detection + cluster.latencies.message_seconds
            cluster.report([*stored, InstanceLeft(name, "failure")], noticed)
        up = max(cluster.now + recovery.detection + recovery.instance, self.silent_until)
        cluster.at(up, cluster.join, (number, struck.losses))

    def _lose_learner(self, recovery: Recovery) -> None:
        cluster = self._cluster
        cluster.learner.die(cluster.now)
        loaded = max(cluster.now + recovery.detection + recovery.learner, self.silent_until)
        self._restored_at = loaded + cluster.learner.retrain()
        cluster.at(self._restored_at, self._restore, cluster.now)

    def _restore(self, died: float) -> None:
        cluster = self._cluster
        if self._restored_at != cluster.now:
            return  # it died again meanwhile
        self._restored_at = inf
        cluster.learner.restored(died, cluster.now)
        cluster.report([LearnerReady(cluster.published)])
        for number, site in enumerate(cluster.sites):
            if site.is_ready:
                cluster.join((number, site.losses))
        cluster.expect_version()
