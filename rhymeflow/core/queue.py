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
    """Partial trajectories by V_traj, new members by group, and groups that are not admitted."""

    def __init__(self) -> None:
        self.unadmitted: deque[GroupId] = deque()
        """Groups the data gave that are not admitted yet."""
        self._partial: dict[Version, dict[TrajectoryId, None]] = {}
        self._new: dict[GroupId, dict[TrajectoryId, None]] = {}

    def __bool__(self) -> bool:
        return bool(self._new or self._partial or self.unadmitted)

    def put(self, trajectory: TrajectoryId, version: Version | None) -> None:
        """Add a trajectory started under `version`; None: a new one."""
        if version is None:
            self._new.setdefault(trajectory.group, {})[trajectory] = None
        else:
            self._partial.setdefault(version, {})[trajectory] = None

    def take(self, trajectory: TrajectoryId, version: Version | None) -> None:
        """Take out a trajectory put in with this version."""
        if version is None:
            _take(self._new, trajectory.group, trajectory)
        else:
            _take(self._partial, version, trajectory)

    def partial(self) -> Iterator[tuple[Version, TrajectoryId]]:
        """Trajectories that were started before, oldest version first."""
        for version in sorted(self._partial):
            for trajectory in self._partial[version]:
                yield version, trajectory

    def new(self) -> Iterator[TrajectoryId]:
        """New members of admitted groups."""
        for members in self._new.values():
            yield from members

    def new_groups(self) -> Iterator[GroupId]:
        """The groups that have new members here."""
        yield from self._new

    def lowest_version(self) -> Version | None:
        """The least V_traj of those that were started before."""
        return min(self._partial, default=None)


def _take(levels: dict[int, dict[TrajectoryId, None]], key: int, trajectory: TrajectoryId) -> None:
    del levels[key][trajectory]
    if not levels[key]:
        del levels[key]
