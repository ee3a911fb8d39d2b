"""A group and its members: how far each response has come.

What moves a member, a command or an event, and whereto (`TRANSITIONS`):

| by | from | to |
| --- | --- | --- |
| Route | WAITING | RUNNING |
| Interrupt | RUNNING | STOPPING |
| TrajectoryInterrupted | STOPPING | WAITING |
| TrajectoryFinished | RUNNING, STOPPING | FINISHED |
| InstanceLeft | RUNNING, STOPPING | WAITING |
| TurnEnded | RUNNING, STOPPING | WAITING_ENV |
| Observed | WAITING_ENV | WAITING |
| EpisodeEnded | WAITING_ENV | FINISHED |
| EnvironmentFailed | WAITING_ENV | ABORTED |
| FinishEarly | WAITING, WAITING_ENV | FINISHED |
| TrajectoryRewarded | FINISHED | REWARDED |
| RewardFailed | FINISHED | ABORTED |
| Abort | WAITING, RUNNING, STOPPING, WAITING_ENV, FINISHED | ABORTED |

REWARDED and ABORTED are ends. A group that has what it needs, or is dropped, aborts all members
that can be; those on an instance by command. Whatever is not in the table is late or came twice,
and changes nothing, but for two things. TrajectoryRewarded or RewardFailed of a member that has not
FINISHED is early, and takes effect when it has. TrajectoryInterrupted always says how much is
stored. The instance of a RUNNING or STOPPING member is the only one whose word on it counts, and on
stopping only its word on the last Interrupt.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from enum import Enum

from rhymeflow.core import commands, events
from rhymeflow.core.types import GroupId, InstanceId, TrajectoryId, Version


class MemberState(Enum):
    """Where a response is; see the table."""

    WAITING = "waiting"
    RUNNING = "running"
    STOPPING = "stopping"
    WAITING_ENV = "waiting_env"
    FINISHED = "finished"
    REWARDED = "rewarded"
    ABORTED = "aborted"

    def __reduce_ex__(self, protocol: object) -> tuple[type[MemberState], tuple[str]]:
        """By its value in every Python: 3.11.2 writes a call of `getattr`, which no snapshot of the
        coordinator may hold."""
        return MemberState, (self.value,)


WAITING, RUNNING, STOPPING, WAITING_ENV, FINISHED, REWARDED, ABORTED = MemberState

ON_INSTANCE = (RUNNING, STOPPING)
"""The states in which an instance has the member, or will when it has carried out its commands."""

NOT_FINISHED = (WAITING, *ON_INSTANCE, WAITING_ENV)
"""The states in which the response is not complete."""

TRANSITIONS: Mapping[type, Mapping[MemberState, MemberState]] = {
    commands.Route: {WAITING: RUNNING},
    commands.Interrupt: {RUNNING: STOPPING},
    events.TrajectoryInterrupted: {STOPPING: WAITING},
    events.TrajectoryFinished: {RUNNING: FINISHED, STOPPING: FINISHED},
    events.InstanceLeft: {RUNNING: WAITING, STOPPING: WAITING},
    events.TurnEnded: {RUNNING: WAITING_ENV, STOPPING: WAITING_ENV},
    events.Observed: {WAITING_ENV: WAITING},
    events.EpisodeEnded: {WAITING_ENV: FINISHED},
    events.EnvironmentFailed: {WAITING_ENV: ABORTED},
    commands.FinishEarly: {WAITING: FINISHED, WAITING_ENV: FINISHED},
    events.TrajectoryRewarded: {FINISHED: REWARDED},
    events.RewardFailed: {FINISHED: ABORTED},
    commands.Abort: dict.fromkeys((*NOT_FINISHED, FINISHED), ABORTED),
}
"""By what: from -> to."""


@dataclass(slots=True)
class Member:
    """One trajectory."""

    state: MemberState = WAITING
    version: Version | None = None
    """V_traj: the version of the instance it was first routed to; None: it never was."""
    length: int = 0
    """Response tokens that are stored, as far as reported; they are never lost again."""
    turn: int = 0
    """The policy's turns that have ended."""
    observed: int = 0
    """Of `length`, the tokens that environments answered."""
    instance: InstanceId | None = None
    """The one that has it; None in a state that is not `ON_INSTANCE`."""
    home: tuple[InstanceId, Version] | None = None
    """The instance that had its last turn, and the version that was last commanded there then."""
    stop: int = 0
    """Number of the last Interrupt to it."""
    judged: events.TrajectoryRewarded | events.RewardFailed | None = None
    """What came early; see above."""
    reward: float | None = None
    components: dict[str, tuple[float, float]] | None = None
    """Weights and values of what the reward is the sum of, where these are compared one by one."""

    @property
    def sampled(self) -> int:
        """Tokens that the policy generated."""
        return self.length - self.observed

    def apply(self, cause: type) -> bool:
        """Make the transition that the table has for this kind of command or event, if any."""
        to = TRANSITIONS[cause].get(self.state)
        if to is None:
            return False
        self.state = to
        if to not in ON_INSTANCE:
            self.instance = None
        return True


@dataclass(slots=True)
class Group:
    """An admitted group."""

    id: GroupId
    prompt_tokens: int
    retries: int
    """Times its prompt was tried before."""
    members: list[Member]
    finishing_early: bool = False
    """Whether its members are to end where they are."""
    complete: bool = False
    """Whether it has all the rewards it needs, and holds an OCCUPIED entry."""

    def ids(self) -> list[TrajectoryId]:
        """All members' ids."""
        return [TrajectoryId(self.id, member) for member in range(len(self.members))]

    def rewarded(self) -> tuple[int, ...]:
        """The members that are rewarded, in ascending order."""
        return tuple(i for i, m in enumerate(self.members) if m.state is REWARDED)

    def num_alive(self) -> int:
        """Members that are rewarded or still can be."""
        return sum(m.state is not ABORTED for m in self.members)
