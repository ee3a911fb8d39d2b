"""The speculative state of an instance: as it will be once it has carried out what it was told.

Holds true: what a command does to an instance is counted from the moment the command is given and
exactly once. A snapshot says up to which command it reflects; what was commanded since is added to
it. So nothing is planned twice for one gap, however late snapshots are. Knows no rules.
"""

from __future__ import annotations

from collections import deque
from dataclasses import dataclass, field

from rhymeflow.core.strategies.view import InstanceView
from rhymeflow.core.types import InstanceId, TrajectoryId, Version


@dataclass(slots=True)
class Instance:
    """A rollout instance."""

    name: InstanceId
    version: Version
    """What it holds after its last command."""
    capacity: int
    kv_capacity: int
    commands: int = 0
    """The number of the last command to it."""
    assigned: dict[TrajectoryId, int] = field(default_factory=dict)
    """Members RUNNING on it, with their tokens (prompt and response) when they were routed."""
    stopping: set[TrajectoryId] = field(default_factory=set)
    """Members STOPPING on it."""
    clock: float = 0.0
    """Response tokens that one decoded there all the time would have; see `Snapshot.made`."""
    routed_at: dict[TrajectoryId, float] = field(default_factory=dict)
    """By the clock, since when those assigned are decoded there."""
    hurried: frozenset[TrajectoryId] = frozenset()
    """What it was last told to draft for before others."""
    evaluating: Version | None = None
    waiting: tuple[TrajectoryId, ...] = ()
    """Of those assigned, the ones not decoded when last seen."""
    _kv_seen: int = 0
    _unreflected: deque[tuple[int, int]] = field(default_factory=deque)
    _kv_unreflected: int = 0
    _view: InstanceView | None = None
    """What strategies were last shown, while it still holds."""

    @property
    def kv_tokens(self) -> int:
        """Tokens in its KV cache: as last seen, with what was commanded since."""
        return max(0, self._kv_seen + self._kv_unreflected)

    def next_number(self, kv_change: int = 0) -> int:
        """The number of the next command to it, which changes its KV tokens by `kv_change`."""
        self._view = None
        self.commands += 1
        if kv_change:
            self._unreflected.append((self.commands, kv_change))
            self._kv_unreflected += kv_change
        return self.commands

    def take(self, trajectories: tuple[TrajectoryId, ...]) -> int:
        """Take these off what is assigned; the number of the command that does it."""
        for trajectory in trajectories:
            self.routed_at.pop(trajectory, None)
        return self.next_number(-sum(self.assigned.pop(t) for t in trajectories))

    def made_here(self, trajectory: TrajectoryId) -> int:
        """About how many tokens a trajectory assigned to it has got there."""
        return max(0, int(self.clock - self.routed_at.get(trajectory, self.clock)))

    def holds(self, version: Version) -> None:
        """It has pulled, and perhaps got a newer version than it was told to take."""
        self._view = None
        self.version = max(self.version, version)

    def reflect(
        self, number: int, waiting: tuple[TrajectoryId, ...], kv_tokens: int, made: float
    ) -> None:
        """Take in a snapshot. One that came late or twice is older than what is known."""
        self._view = None
        self._kv_seen, self.waiting, self.clock = kv_tokens, waiting, made
        for trajectory in waiting:  # not decoded: it makes nothing
            if trajectory in self.routed_at:
                self.routed_at[trajectory] = made
        while self._unreflected and self._unreflected[0][0] <= number:
            self._kv_unreflected -= self._unreflected.popleft()[1]

    def finished(self, trajectory: TrajectoryId, tokens: int) -> None:
        """A trajectory of `tokens` tokens (prompt and response) has ended there."""
        self._view = None
        self.assigned.pop(trajectory, None)
        self.routed_at.pop(trajectory, None)
        self.stopping.discard(trajectory)
        self._kv_seen = max(0, self._kv_seen - tokens)

    def view(self, *, accepts: bool) -> InstanceView:
        """What strategies see of it."""
        if self._view is None or self._view.accepts != accepts:
            self._view = InstanceView(
                self.name,
                self.version,
                self.capacity,
                self.kv_capacity,
                self.kv_tokens,
                self.assigned,
                tuple(t for t in self.waiting if t in self.assigned),
                accepts,
            )
        return self._view
