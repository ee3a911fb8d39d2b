"""Which simulated processes die, when, and what it takes to bring them back.

Devices fail independently of one another and of their age, each once in so many hours in the mean
(MTBF), so the failures of a cluster are a Poisson process whose rate is that of a device times the
devices. A device that fails takes with it the process group it is part of: an instance, or the
whole learner; where all devices generate and train in turn, all of them. The controller's machine
fails at a rate of its own, and takes the run with it.

Holds true: the failures are a function of the seed, the rates and the devices only, so all
schedules on as many devices are struck at the same times. Knows nothing of what is lost by them.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from itertools import count
from math import inf, log
from typing import Literal, NamedTuple

from rhymeflow.core.types import Version
from rhymeflow.sim.workload import uniform

HOUR = 3600.0
DETECTION = 10.0
"""Seconds from a death to when it is noticed."""
Victim = int | Literal["learner", "devices", "controller"]
"""What dies: the instance at this place; the learner; all instances and the learner; these and the
controller."""


class Failure(NamedTuple):
    """Something dies at this second."""

    at: float
    victim: Victim


@dataclass(frozen=True, slots=True)
class Recovery:
    """What is lost by a death, and how long it takes to go on; times in seconds."""

    instance: float
    learner: float
    """Of the learner, and of the controller: see `FaultsConfig`."""
    save_seconds: float
    save_steps: int
    evaluates: Callable[[Version], bool]
    """Whether held-out prompts are answered under a version."""
    detection: float = DETECTION
    store: float | None = 1.0
    """How often the tokens in flight are stored, as in real runs; None: only when a response is
    interrupted or complete, and at pulls."""
    checkpoint_copy: float = 1.0
    """How long the learner waits for a copy, at each checkpoint."""
    checkpoint_write: float = 60.0
    """How long it is written then, in the background, before it counts."""


@dataclass(frozen=True, slots=True)
class Devices:
    """How many devices each process group has."""

    num_instances: int
    per_instance: int
    learner: int
    """Devices that train; with `colocated` all there are."""
    colocated: bool

    @property
    def total(self) -> int:
        """All there are."""
        return self.learner + (0 if self.colocated else self.num_instances * self.per_instance)

    def victim(self, device: int) -> Victim:
        """What a device is part of."""
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
) -> Iterator[Failure]:
    """All failures, in order, without end; none where both times are None."""
    of_devices = devices.total / (device_mtbf_hours or inf)
    rate = (of_devices + 1 / (controller_mtbf_hours or inf)) / HOUR
    if not rate:
        return
    now = 0.0
    for number in count():
        now -= log(uniform(seed, b"failure", number)) / rate
        chosen = uniform(seed, b"victim", number) * rate * HOUR
        if chosen < of_devices:
            yield Failure(now, devices.victim(int(chosen / of_devices * devices.total)))
        else:
            yield Failure(now, "controller")
