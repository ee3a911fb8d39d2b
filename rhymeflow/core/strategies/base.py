"""The interface of strategies: the views they read and the proposals they return.

A strategy is a pure function of a read-only view: the fleet as it will be once every command given
so far is carried out. The coordinator drops proposals that the staleness protocol does not allow,
so no strategy, not even a user's, can break the bound."""

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
    min_version: Version  # the lowest version of an instance that may generate it
    tokens: int  # that it needs in a cache: the prompt and the response so far
    home: InstanceId | None = None
    """The instance that may still cache most of these tokens: the policy's last turn was there, and
    its weights have not changed since."""


class InstanceView(NamedTuple):
    """An instance as it will be once it has carried out its commands."""

    name: InstanceId
    version: Version
    capacity: int  # trajectories that it decodes at a time
    kv_capacity: int  # tokens that its KV cache holds
    kv_tokens: int  # in its KV cache at the last snapshot, changed by the commands since
    assigned: Mapping[TrajectoryId, int]  # routed to it, with their tokens when they were
    waiting: tuple[TrajectoryId, ...]  # assigned but not decoded: no room yet, or preempted
    accepts: bool  # whether the schedule lets trajectories be routed to it now

    def has_room(self) -> bool:
        """Whether it accepts trajectories and has a free place and free cache."""
        return (
            self.accepts
            and len(self.assigned) < self.capacity
            and self.kv_tokens < self.kv_capacity
        )


@dataclass(frozen=True, slots=True)
class Settings:
    """The parameters of strategies."""

    cost: CostModel
    group_size: int  # trajectories of a group
    throughput_ratio: float
    """An instance donates trajectories to one whose load is this many times smaller."""
    max_slowdown: float
    """How many times slower a response may decode than it would alone, when the responses of an old
    version are gathered on few instances."""


class Layout(Protocol):
    """A schedule's record of where trajectories are to run, which its rules read. The coordinator
    creates one when it starts, and uses only these methods."""

    def extend(self, state: State) -> None:
        """Lay out unadmitted groups if it is time to; called before the rules."""

    def move(self, trajectories: Iterable[TrajectoryId], to: InstanceId, *, later: bool) -> None:
        """Change the places of trajectories that are interrupted; see `Migration`."""

    def end(self, group: GroupId) -> None:
        """Forget a group that has ended."""


class NoLayout(Layout):
    """Keeps no record: groups go wherever routing sends them."""


@dataclass(frozen=True, slots=True, eq=False)
class FleetView:
    """The fleet and the queue at one tick."""

    published: Version  # the newest in the weight store
    instances: tuple[InstanceView, ...]  # in the order they joined
    queue: Iterable[TrajectoryView]
    """Waiting trajectories: oldest V_traj first, then new members of admitted groups, then members
    of unadmitted groups. Computed while it is iterated over; it can be iterated over again."""
    lowest_waiting: Version | None
    """The least `min_version` of waiting trajectories of admitted groups; None: there are none."""
    num_returning: int  # number of trajectories being interrupted: they will be in the queue soon
    admissible: frozenset[Version]
    """Versions, held by some instance that accepts, at which a new group could start now."""
    settings: Settings
    lengths: LengthPredictor
    layout: Layout


class Assignment(NamedTuple):
    """Route this trajectory to this instance."""

    trajectory: TrajectoryId
    instance: InstanceId


class Migration(NamedTuple):
    """Interrupt these trajectories on this instance, to be routed again."""

    instance: InstanceId
    trajectories: tuple[TrajectoryId, ...]
    to: InstanceId | None = None
    """Their new instance in the layout; None: the layout does not change."""
    later: bool = False  # whether they move to the next step of the layout


KV_HEADROOM = 0.1
"""Share of an instance's KV cache that is left free, so that running responses can grow."""


def fits(kv_tokens: int, tokens: int, instance: InstanceView) -> bool:
    """Whether `tokens` fit into the instance's cache beside `kv_tokens`, with headroom."""
    return kv_tokens + tokens <= (1 - KV_HEADROOM) * instance.kv_capacity


def size_class(tokens: int) -> int:
    """Round down to a power of two (0 stays 0), so that instances of similar load compare equal."""
    return 1 << tokens.bit_length() >> 1


Routing = Callable[[FleetView], Iterable[Assignment]]
"""Assigns waiting trajectories, in the order in which they are to be routed. A rule may stop after
`assignment_limit`: another tick follows at once and calls it again."""

LEAST_LIMIT = 128
"""The limit for up to 1,024 instances: it keeps a tick short even if it has to fill all of them."""
INSTANCES_PER_ASSIGNMENT = 8
"""Above 1,024 instances the limit grows with the fleet, since every tick looks at each of them."""


def assignment_limit(num_instances: int) -> int:
    """Most trajectories that one tick routes, or interrupts before it stops."""
    return max(LEAST_LIMIT, num_instances // INSTANCES_PER_ASSIGNMENT)


Sync = Callable[[InstanceView, FleetView], bool]
"""Decides whether an instance that lags behind the weight store pulls now."""

Migrating = Callable[[FleetView], Iterable[Migration]]
"""Chooses trajectories to interrupt, so that they are routed again."""
