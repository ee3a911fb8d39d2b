"""A group and its members: how far each response has come.

The commands and events that change a member's state (`TRANSITIONS`):

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

REWARDED and ABORTED are final. A group that is complete or dropped aborts all members that are not
REWARDED; an Abort command is sent only for those on an instance. An event that is not in the table
is late or repeated and changes nothing, with two exceptions: TrajectoryRewarded or RewardFailed of
a member that is not yet FINISHED takes effect when it is, and TrajectoryInterrupted always updates
the stored length. Of a RUNNING or STOPPING member, only events of its own instance count, and of
TrajectoryInterrupted only the one that the last Interrupt caused."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from enum import Enum

from rhymeflow.core import commands, events
from rhymeflow.core.types import GroupId, InstanceId, TrajectoryId, Version


class MemberState(Enum):
    """The state of a response; see the table above."""

    WAITING = "waiting"
    RUNNING = "running"
    STOPPING = "stopping"
    WAITING_ENV = "waiting_env"
    FINISHED = "finished"
    REWARDED = "rewarded"
    ABORTED = "aborted"

    def __reduce_ex__(self, protocol: object) -> tuple[type[MemberState], tuple[str]]:
        """Pickle by value: Python 3.11.2 would write a call of `getattr`, which snapshots of the
        coordinator must not contain."""
        return MemberState, (self.value,)


WAITING, RUNNING, STOPPING, WAITING_ENV, FINISHED, REWARDED, ABORTED = MemberState

ON_INSTANCE = (RUNNING, STOPPING)
"""The states in which the member is on an instance, or will be once commands are carried out."""

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
"""By command or event: from -> to."""


@dataclass(slots=True)
class Member:
    """One trajectory."""

    state: MemberState = WAITING
    version: Version | None = None
    """V_traj: the version of the instance it was first routed to; None: it is not routed yet."""
    length: int = 0  # response tokens reported as stored, which are never lost
    turn: int = 0  # number of the policy's turns that have ended
    observed: int = 0  # tokens of `length` that are observations from its environment
    instance: InstanceId | None = None  # where it is; None unless its state is in `ON_INSTANCE`
    home: tuple[InstanceId, Version] | None = None
    """The instance of its last turn, and that instance's version then."""
    stop: int = 0  # number of the last Interrupt sent for it
    early_result: events.TrajectoryRewarded | events.RewardFailed | None = None
    """The event about its reward, if that arrived before the member was FINISHED."""
    reward: float | None = None
    components: dict[str, tuple[float, float]] | None = None  # see `TrajectoryRewarded.components`

    @property
    def sampled(self) -> int:
        """Tokens that the policy generated."""
        return self.length - self.observed

    @property
    def is_before_first_call(self) -> bool:
        """Whether it is an agent's whose program has started and asked for nothing yet."""
        return self.turn > 0 and not self.length

    def apply(self, cause: type) -> bool:
        """Make the transition of this kind of command or event; False: the table has none."""
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
    retries: int  # number of earlier groups of the same prompt that were retried
    members: list[Member]
    finishing_early: bool = False  # whether its unfinished members are being truncated
    complete: bool = False  # whether it has all the rewards it needs, and an OCCUPIED entry

    def ids(self) -> list[TrajectoryId]:
        """Return the ids of all members."""
        return [TrajectoryId(self.id, member) for member in range(len(self.members))]

    def rewarded(self) -> tuple[int, ...]:
        """Return the indices of the rewarded members, in ascending order."""
        return tuple(i for i, m in enumerate(self.members) if m.state is REWARDED)

    def num_alive(self) -> int:
        """Return the number of members that are rewarded or still can be."""
        return sum(m.state is not ABORTED for m in self.members)
