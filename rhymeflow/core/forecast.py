"""What strategies are told of lengths to come: the history's expectation of what the state holds.

Holds true: reads only; what it says of a trajectory is of this moment, its progress included. How
far a running trajectory is, is known from when it was routed and by its instance's clock.
"""

from __future__ import annotations

from rhymeflow.core.protocol.group import MemberState
from rhymeflow.core.state import State
from rhymeflow.core.types import GroupId, TrajectoryId


class Forecast:
    """Expected lengths, in response tokens."""

    def __init__(self, state: State) -> None:
        self._state = state

    @property
    def skill(self) -> float:
        """What predictions are worth, 0 to 1; see `LengthHistory.skill`."""
        return self._state.history.skill

    def made(self, trajectory: TrajectoryId) -> int:
        """Tokens it has, about."""
        member = self._state.member(trajectory)
        if member is None:
            return 0
        if member.state is MemberState.RUNNING and member.instance is not None:
            return member.length + self._state.instances[member.instance].generated(trajectory)
        return member.length

    def remaining(self, trajectory: TrajectoryId) -> float:
        """Tokens it is expected to need still, at least 1."""
        made = self.made(trajectory)
        return max(1.0, self._state.history.expected(trajectory.group, made) - made)

    def quantile(self, group: GroupId, q: float) -> float:
        """The q-quantile of the lengths of a group's responses, none of which has begun."""
        return self._state.history.quantile(group, q)

    def length(self, group: GroupId) -> float:
        """Tokens that a response of this group, drawn or admitted, is expected to have."""
        return self._state.history.expected(group)
