"""Fleets and queues to show to strategies: drawn by hypothesis, or written down in one line."""

import copy
from collections.abc import Callable
from dataclasses import dataclass, field, replace
from typing import Any

from hypothesis import strategies as st

from rhymeflow.core.cost import CostModel
from rhymeflow.core.strategies.base import (
    FleetView,
    InstanceView,
    NoLayout,
    Settings,
    TrajectoryView,
)
from rhymeflow.core.types import TrajectoryId

COST_14B = CostModel(
    k1=1.165e-7, k2=0.012303, k3=2.441e-4, c=0.0049, k4=0.00197,
    prefill_token=1e-4, train_token=1e-4, measure_token=1e-4, train_step=1, push=1, pull=1,
)  # fmt: skip
"""StaleFlow's fit of a 14B model on one device, made up where the strategies do not look."""

SETTINGS = Settings(COST_14B, group_size=2, throughput_ratio=5.0, max_slowdown=1.25)


def instance(
    name: str = "a",
    version: int = 0,
    running: int | list[int] = 0,
    *,
    tokens: int = 1000,
    waiting: int = 0,
    capacity: int = 64,
    kv_capacity: int = 200_000,
    accepts: bool = True,
) -> InstanceView:
    """An instance with so many trajectories of `tokens` each, or of these; the first few wait."""
    lengths = [tokens] * running if isinstance(running, int) else running
    base = 10_000 + sum(map(ord, name)) * 1000
    assigned = {TrajectoryId(base + i, 0): length for i, length in enumerate(lengths)}
    ids = tuple(assigned)[:waiting]
    kv_tokens = sum(lengths[waiting:])
    return InstanceView(name, version, capacity, kv_capacity, kv_tokens, assigned, ids, accepts)


def new(group: int, tokens: int = 1000, *, min_version: int = 0) -> TrajectoryView:
    return TrajectoryView(TrajectoryId(group, 0), None, min_version, tokens)


def partial(group: int, version: int, tokens: int = 1000) -> TrajectoryView:
    return TrajectoryView(TrajectoryId(group, 0), version, version, tokens)


@dataclass
class Predicted:
    """What each trajectory has generated, and each group is expected to come to."""

    tokens: dict[TrajectoryId, int] = field(default_factory=dict)
    means: dict[int, float] = field(default_factory=dict)
    explained_variance: float = 0.5

    def generated(self, trajectory: TrajectoryId) -> int:
        return self.tokens.get(trajectory, 0)

    def remaining(self, trajectory: TrajectoryId) -> float:
        return max(1.0, self.expected(trajectory.group) - self.generated(trajectory))

    def expected(self, group: int) -> float:
        return self.means.get(group, 1000.0)


def fleet(
    instances: list[InstanceView],
    queue: list[TrajectoryView] | None = None,
    *,
    admissible: set[int] | None = None,
    num_returning: int = 0,
    settings: Settings = SETTINGS,
    **weighed: Any,
) -> FleetView:
    queue = queue or []
    return FleetView(
        published=max((x.version for x in instances), default=0),
        instances=tuple(instances),
        queue=queue,
        lowest_waiting=min((t.min_version for t in queue), default=None),
        num_returning=num_returning,
        admissible=frozenset(admissible or ()),
        settings=replace(settings, **weighed),
        lengths=Predicted(explained_variance=0.0),
        layout=NoLayout(),
    )


SIZES = st.integers(1, 5000)


@st.composite
def instances(draw: Callable[..., Any], name: str, versions: int = 4) -> InstanceView:
    lengths = draw(st.lists(SIZES, max_size=6))
    made = instance(
        name,
        draw(st.integers(0, versions - 1)),
        lengths,
        waiting=draw(st.sampled_from([0, 0, 0, 1, 5]).map(lambda n: min(n, len(lengths)))),
        capacity=draw(st.integers(max(1, len(lengths)), 8)),
        accepts=draw(st.sampled_from([True, True, True, False])),
    )
    return made._replace(kv_capacity=made.kv_tokens + draw(st.integers(0, 15_000)))


@st.composite
def fleets(draw: Callable[..., Any]) -> FleetView:
    count = draw(st.integers(0, 8))
    there = [draw(instances(f"i{place}")) for place in range(count)]
    started = sorted(draw(st.lists(st.integers(0, 4), max_size=15)))
    homes = st.sampled_from([None, "gone", *(x.name for x in there)])
    queue = [
        partial(i, version, draw(SIZES))._replace(home=draw(homes))
        for i, version in enumerate(started)
    ]
    fresh = draw(st.lists(st.tuples(st.integers(0, 4), SIZES), max_size=15))
    queue += [new(100 + i, tokens, min_version=v) for i, (v, tokens) in enumerate(fresh)]
    cost = replace(COST_14B, k1=draw(st.sampled_from([1e-8, 1.165e-7, 1e-6, 1e-4])))
    return fleet(
        there,
        queue,
        admissible=draw(st.sets(st.integers(0, 4))),
        cost=cost,
        num_returning=draw(st.sampled_from([0, 0, 3])),
    )


def shown(view: FleetView) -> tuple[Any, ...]:
    """A deep copy of all there is in a view, to compare with."""
    return copy.deepcopy((view.published, view.instances, list(view.queue), view.admissible))
