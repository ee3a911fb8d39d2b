"""A group and its members: how far each response has come.

States of a member, and what moves it (a command where it is named so, else a fact):

| from | by | to |
| --- | --- | --- |
| WAITING | Route (command) | RUNNING |
| RUNNING | Interrupt (command) | STOPPING |
| STOPPING | TrajectoryInterrupted, of that very Interrupt | WAITING |
| RUNNING, STOPPING | TrajectoryFinished | FINISHED |
| RUNNING, STOPPING | InstanceLeft | WAITING |
| WAITING | Conclude (command) | FINISHED |
| FINISHED | TrajectoryRewarded | REWARDED |
| any but REWARDED | the group has what it needs, or RewardFailed | ABORTED |

REWARDED and ABORTED are ends. Whatever is not in the table is late or came twice, and changes
nothing. The instance of a RUNNING or STOPPING member is the only one whose word on it counts.
"""

from __future__ import annotations

from dataclasses import dataclass
from enum import Enum

from rhymeflow.core.types import GroupId, InstanceId, TrajectoryId, Version


class State(Enum):
    """Where a response is; see the table."""

    WAITING = "waiting"
    RUNNING = "running"
    STOPPING = "stopping"
    FINISHED = "finished"
    REWARDED = "rewarded"
    ABORTED = "aborted"


ON_INSTANCE = (State.RUNNING, State.STOPPING)
"""The states in which an instance has the member, or will when it has carried out its commands."""


@dataclass(slots=True)
class Member:
    """One trajectory."""

    state: State = State.WAITING
    version: Version | None = None
    """V_traj: the version of the instance it was first routed to; None: it never was."""
    length: int = 0
    """Response tokens, as last reported."""
    instance: InstanceId | None = None
    stop: int = 0
    """Number of the Interrupt that made it STOPPING."""
    reward: float | None = None


@dataclass(slots=True)
class Group:
    """An admitted group."""

    serial: GroupId
    prompt_tokens: int
    retries: int
    """Times its prompt was drawn again before."""
    members: list[Member]
    cut: bool = False
    """Whether its members are to end where they are."""
    num_rewarded: int = 0
    """Members that are judged."""
    complete: bool = False
    """Whether it has all the rewards it needs, and holds an OCCUPIED entry."""

    def ids(self) -> list[TrajectoryId]:
        """All members' ids."""
        return [TrajectoryId(self.serial, member) for member in range(len(self.members))]

    def rewarded(self) -> tuple[int, ...]:
        """The members that are judged, in ascending order."""
        return tuple(i for i, m in enumerate(self.members) if m.state is State.REWARDED)

    def num_alive(self) -> int:
        """Members that are judged or still can be."""
        return sum(m.state is not State.ABORTED for m in self.members)
