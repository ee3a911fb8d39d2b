"""What a strategy sees, and what it may answer. All of it is read-only.

A strategy is a pure function of a view: the fleet as it will be once every command given so far is
carried out. The coordinator drops proposals that the staleness protocol does not allow, so no
strategy, a user's own included, can break the bound.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, NamedTuple, Protocol

from rhymeflow.core.cost import CostModel
from rhymeflow.core.lengths import LengthPredictor
from rhymeflow.core.types import GroupId, InstanceId, TrajectoryId, Version

if TYPE_CHECKING:
    from rhymeflow.core.state import State


class TrajectoryView(NamedTuple):
    """A trajectory that waits to be routed."""

    id: TrajectoryId
    version: Version | None  # V_traj, the version it was started under; None: it is new
    min_version: Version  # the lowest version an instance may hold to be given it
    tokens: int
    """Tokens that it takes in a cache: the prompt, and what there is of the response."""
    home: InstanceId | None = None
    """The instance that may have most of them in its cache: the policy's last turn was there, and
    its weights have not changed since."""


class InstanceView(NamedTuple):
    """An instance, once it has carried out its commands."""

    name: InstanceId
    version: Version
    capacity: int  # trajectories that it decodes at a time
    kv_capacity: int  # tokens that its KV cache holds
    kv_tokens: int  # in its KV cache, as last seen, with what was commanded since
    assigned: Mapping[TrajectoryId, int]
    """Trajectories that are there or on their way, with their tokens when they were routed."""
    waiting: tuple[TrajectoryId, ...]
    """Those of them that are not decoded: no room yet, or preempted."""
    accepts: bool  # whether anything may be routed to it now

    def has_room(self) -> bool:
        """Whether anything at all may be routed to it."""
        return (
            self.accepts
            and len(self.assigned) < self.capacity
            and self.kv_tokens < self.kv_capacity
        )


@dataclass(frozen=True, slots=True)
class Settings:
    """The numbers that strategies weigh with."""

    cost: CostModel
    group_size: int  # trajectories of a group
    throughput_ratio: float
    """An instance gives work away to one with a load this many times smaller."""
    max_slowdown: float
    """How many times slower than alone a response may be decoded on the last instances of an old
    version."""


class Layout(Protocol):
    """What a schedule remembers of where trajectories are to run, for its own rules to read.

    The coordinator creates one when it starts, and knows no more of it than this.
    """

    def extend(self, state: State) -> None:
        """Lay out what waits to be admitted, if it is time to; called before rules are asked."""

    def move(self, trajectories: Iterable[TrajectoryId], to: InstanceId, *, later: bool) -> None:
        """These are taken away from where they run: see `Migration`."""

    def end(self, group: GroupId) -> None:
        """The group has ended."""


class NoLayout(Layout):
    """Remembers nothing: groups go wherever routing sends them."""


@dataclass(frozen=True, slots=True, eq=False)
class FleetView:
    """Everything at one tick."""

    published: Version  # the newest in the weight store
    instances: tuple[InstanceView, ...]
    """In the order they joined."""
    queue: Iterable[TrajectoryView]
    """What waits: oldest V_traj first, then new members of admitted groups, then new groups.
    Generated while it is read; reading it twice gives the same."""
    lowest_waiting: Version | None
    """The least `min_version` among what waits and is not of a new group; None: nothing is."""
    num_returning: int
    """Trajectories being interrupted, neither on an instance nor in the queue."""
    admissible: frozenset[Version]
    """Versions at which a new group could be started now, among those that instances hold."""
    settings: Settings
    lengths: LengthPredictor
    layout: Layout


class Assignment(NamedTuple):
    """Route this trajectory to this instance."""

    trajectory: TrajectoryId
    instance: InstanceId


class Migration(NamedTuple):
    """Send these back from this instance to the queue, to be routed again."""

    instance: InstanceId
    trajectories: tuple[TrajectoryId, ...]
    to: InstanceId | None = None
    """Where the layout is to have them from now on; None: it stays as it is."""
    later: bool = False  # in the step after theirs


KV_HEADROOM = 0.1
"""Share of an instance's KV cache that is left free, so that what runs can grow."""


def fits(kv_tokens: int, tokens: int, instance: InstanceView) -> bool:
    """Whether so many tokens fit beside so many, with headroom."""
    return kv_tokens + tokens <= (1 - KV_HEADROOM) * instance.kv_capacity


def weighed(tokens: int) -> int:
    """The number of tokens that instances are compared at: a power of two (or 0), at most a factor
    of two below."""
    return 1 << tokens.bit_length() >> 1


Routing = Callable[[FleetView], Iterable[Assignment]]
"""Assigns waiting trajectories, in the order in which they are to be routed. A rule may stop at
`most_assignments`: it is asked again at once, in a tick of its own."""

MAX_ASSIGNMENTS = 128
"""So that a tick is short also when a whole fleet is to be filled ..."""
INSTANCES_PER_ASSIGNMENT = 8
"""... of 1,024 instances. Each tick looks once at every instance, so with more it does more."""


def most_assignments(num_instances: int) -> int:
    """How many trajectories one tick routes at most, or interrupts before it stops."""
    return max(MAX_ASSIGNMENTS, num_instances // INSTANCES_PER_ASSIGNMENT)


Sync = Callable[[InstanceView, FleetView], bool]
"""Whether this instance, which lags behind the weight store, is to pull now."""

Migrating = Callable[[FleetView], Iterable[Migration]]
"""Trajectories to take away from their instances."""
