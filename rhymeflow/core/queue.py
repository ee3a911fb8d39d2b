"""What waits to be routed, oldest first.

Holds true: a trajectory stands in it at most once; the order is V_traj, then the order in which
they came; new members of admitted groups follow, then groups that are not admitted. Adding and
taking out cost O(1), the least version O(number of versions), which staleness bounds.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Iterator

from rhymeflow.core.types import GroupId, TrajectoryId, Version


class Queue:
    """Partial trajectories by V_traj, new members, and groups drawn from the data."""

    def __init__(self) -> None:
        self.drawn: deque[GroupId] = deque()
        """Groups the data gave that are not admitted yet."""
        self._partial: dict[Version, dict[TrajectoryId, None]] = {}
        self._new: dict[TrajectoryId, None] = {}
        self._new_groups: dict[GroupId, int] = {}

    def __bool__(self) -> bool:
        return bool(self._new or self._partial or self.drawn)

    def __contains__(self, trajectory: TrajectoryId) -> bool:
        return trajectory in self._new or any(trajectory in p for p in self._partial.values())

    def put(self, trajectory: TrajectoryId, version: Version | None) -> None:
        """Add a trajectory started under `version`; None: a new one."""
        if version is None:
            self._new[trajectory] = None
            self._new_groups[trajectory.group] = self._new_groups.get(trajectory.group, 0) + 1
        else:
            self._partial.setdefault(version, {})[trajectory] = None

    def take(self, trajectory: TrajectoryId, version: Version | None) -> None:
        """Take out a trajectory put in with this version."""
        if version is None:
            del self._new[trajectory]
            self._new_groups[trajectory.group] -= 1
            if not self._new_groups[trajectory.group]:
                del self._new_groups[trajectory.group]
            return
        level = self._partial[version]
        del level[trajectory]
        if not level:
            del self._partial[version]

    def partial(self) -> Iterator[tuple[Version, TrajectoryId]]:
        """Trajectories that were started before, oldest version first."""
        for version in sorted(self._partial):
            for trajectory in self._partial[version]:
                yield version, trajectory

    def new(self) -> Iterator[TrajectoryId]:
        """New members of admitted groups."""
        yield from self._new

    def new_groups(self) -> Iterator[GroupId]:
        """The groups that have new members here."""
        yield from self._new_groups

    def lowest_version(self) -> Version | None:
        """The least V_traj of those that were started before."""
        return min(self._partial, default=None)
