"""What a strategy sees, and what it may answer. All of it is read-only.

A strategy is a pure function of a view: it proposes, the protocol disposes. The coordinator checks
each proposal against the staleness protocol and leaves out what it does not allow, so no strategy,
a user's own included, can break the bound. The view is the fleet as it will be once every command
given so far is carried out (the speculative state), so a strategy never plans for one gap twice.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field
from typing import Any, NamedTuple, Protocol

from rhymeflow.core.cost import CostModel
from rhymeflow.core.types import GroupId, InstanceId, TrajectoryId, Version


class TrajectoryView(NamedTuple):
    """A trajectory that waits to be routed."""

    id: TrajectoryId
    version: Version | None
    """V_traj, the version it was started under; None: it is new."""
    min_version: Version
    """The lowest version an instance may hold to be given it."""
    tokens: int
    """Tokens to be taken in: the prompt, and what there is of the response."""


class InstanceView(NamedTuple):
    """An instance, once it has carried out what it was told."""

    name: InstanceId
    version: Version
    capacity: int
    """Trajectories that it decodes at a time."""
    kv_capacity: int
    """Tokens that its KV cache holds."""
    kv_tokens: int
    """Tokens in its KV cache, as last seen, with what was commanded since."""
    assigned: Mapping[TrajectoryId, int]
    """Trajectories that are there or on their way, with their tokens when they were routed."""
    waiting: tuple[TrajectoryId, ...]
    """Those of them that are not decoded: no room yet, or preempted."""
    accepts: bool
    """Whether anything may be routed to it now."""


@dataclass(frozen=True, slots=True)
class Weights:
    """The numbers that strategies weigh with; see the fields of the same names in the config."""

    cost: CostModel
    routing_gain: float
    kv_headroom: float
    max_waiting: int
    throughput_ratio: float
    crowding: float
    growth: float
    urgency: float
    group_size: int
    """Trajectories of a group."""


class Forecast(Protocol):
    """What is foretold of lengths, in response tokens."""

    @property
    def skill(self) -> float:
        """What predictions are worth: the share of the variance they explained lately, 0 to 1."""

    def made(self, trajectory: TrajectoryId) -> int:
        """Tokens it has, about."""

    def remaining(self, trajectory: TrajectoryId) -> float:
        """Tokens it is expected to need still, at least 1."""

    def length(self, group: GroupId) -> float:
        """Tokens that a response of this group, drawn or admitted, is expected to have."""

    def quantile(self, group: GroupId, q: float) -> float:
        """The q-quantile of the lengths of a group's responses, none of which has begun."""


class Layout(Protocol):
    """Where a schedule that lays its steps out wants things to be (`core/pipeline.py`)."""

    @property
    def num_steps(self) -> int:
        """Steps laid out; groups that are not admitted belong to the last one."""

    def place(self, trajectory: TrajectoryId) -> tuple[int, InstanceId] | None:
        """Step and instance; None: its group is not laid out yet."""

    def step(self, assigned: Iterable[TrajectoryId]) -> int | None:
        """The earliest step that any of these belongs to; None: there are none."""

    def has_moved(self, trajectory: TrajectoryId) -> bool:
        """Whether it was taken away from where it was laid out."""

    def share(self, instance: InstanceId) -> float:
        """Groups' worth of responses that the last layout gave it."""


@dataclass(frozen=True, slots=True)
class FleetView:
    """Everything at one tick."""

    published: Version
    """The newest version in the parameter server."""
    instances: tuple[InstanceView, ...]
    """In the order they joined."""
    queue: Iterable[TrajectoryView]
    """What waits: oldest V_traj first, then new members of admitted groups, then new groups.
    Made while it is read; reading it twice gives the same."""
    lowest_waiting: Version | None
    """The least `min_version` among what waits and is not of a new group; None: nothing is."""
    num_returning: int
    """Trajectories being interrupted: on no instance any more, not in the queue yet."""
    admissible: frozenset[Version]
    """Versions at which a new group could be started now, among those that instances hold."""
    weights: Weights
    forecast: Forecast
    gating: frozenset[GroupId]
    """Groups that an idle learner waits for; empty while it trains."""
    layout: Layout | None
    """None: the schedule lays nothing out."""
    worked_out: dict[str, Any] = field(default_factory=dict, compare=False)
    """What strategies have worked out of this view, for the next question about it."""


class Assignment(NamedTuple):
    """Route this trajectory to this instance."""

    trajectory: TrajectoryId
    instance: InstanceId


class Migration(NamedTuple):
    """Send these back from this instance to the queue, to be routed anew."""

    instance: InstanceId
    trajectories: tuple[TrajectoryId, ...]
    to: InstanceId | None = None
    """Where the layout is to have them from now on; None: it stays as it is."""
    later: bool = False
    """In the step after theirs."""


class Preference(NamedTuple):
    """Draft for these on this instance before others."""

    instance: InstanceId
    trajectories: tuple[TrajectoryId, ...]


Hurrying = Callable[[FleetView], Iterable[Preference]]
"""Whose tokens are worth more than others' where drafts are chosen; instances that are not named
prefer none."""

Routing = Callable[[FleetView], Iterable[Assignment]]
"""Which of what waits goes where, in the order it is to be done."""

Sync = Callable[[InstanceView, FleetView], bool]
"""Whether this instance, which lags behind the parameter server, is to pull now."""

Migrating = Callable[[FleetView], Iterable[Migration]]
"""What is to be taken away from where it is."""
