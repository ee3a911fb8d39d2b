"""What is compared in real runs: a schedule at a bound, on cores that are shared out alike.

Holds true: each worker is pinned, the learner to the first core, the rollout instances to the
others in turn (on two cores they share the second). So nobody wins by spreading over cores that
another leaves idle, and what a schedule wins is overlap and order.
"""

from __future__ import annotations

import json
import os
from collections.abc import Iterable, Sequence
from typing import NamedTuple, get_args

from rhymeflow.config import FIXED_BOUNDS, ScheduleConfig

BOUNDS = (1, 3)
"""Of those that leave it open, unless told otherwise."""
NAMES: tuple[str, ...] = get_args(ScheduleConfig.model_fields["name"].annotation)


class Side(NamedTuple):
    """A schedule and its bound."""

    schedule: str
    bound: int
    has_drafts: bool = True
    """As the recipe has them; `False`: none."""

    def __str__(self) -> str:
        drafts = "" if self.has_drafts else ", no drafts"
        return f"{self.schedule}, bound {self.bound}{drafts}"


def sides(names: Iterable[str], bounds: Sequence[int]) -> list[Side]:
    """Each schedule at each bound, or at the one that is its own."""
    return [
        Side(name, bound)
        for name in names
        for bound in ([FIXED_BOUNDS[name]] if name in FIXED_BOUNDS else bounds)
    ]


def overrides(side: Side, num_instances: int) -> dict[str, str]:
    """The fields of a configuration that make it this side's."""
    learner, instances = cores(num_instances)
    fields = {
        "schedule.name": side.schedule,
        "schedule.max_staleness": str(side.bound),
        "rollout.num_instances": str(num_instances),
        "rollout.num_threads": "1",
        "learner.num_threads": "1",
        "rollout.cpus": json.dumps(instances),
        "learner.cpus": json.dumps(learner),
    }
    return fields if side.has_drafts else {**fields, "drafting.window": "off"}


def cores(num_instances: int) -> tuple[list[int], list[list[int]]]:
    """The learner's core, and each instance's: all others in turn."""
    first, *rest = sorted(os.sched_getaffinity(0))
    assert rest, "one core is not enough to compare schedules on"
    return [first], [[rest[index % len(rest)]] for index in range(num_instances)]
