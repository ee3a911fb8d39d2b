"""The speculative state of an instance: as it will be once it has carried out its commands.

A command takes effect here as soon as it is given: a snapshot says which command it reflects, and
the effects of later ones are added to it. So late snapshots never let the planner fill the same
free capacity twice. A snapshot that is older than the last is ignored."""

from __future__ import annotations

from collections import deque
from dataclasses import dataclass, field

from rhymeflow.core.events import Snapshot
from rhymeflow.core.strategies.base import InstanceView
from rhymeflow.core.types import EvaluationId, InstanceId, TrajectoryId, Version


@dataclass(slots=True)
class Instance:
    """A rollout instance."""

    name: InstanceId
    version: Version  # after its last command
    capacity: int
    kv_capacity: int
    commands: int = 0  # number of its last command
    assigned: dict[TrajectoryId, int] = field(default_factory=dict)
    """Members RUNNING on it, with their tokens (prompt and response) when they were routed."""
    stopping: set[TrajectoryId] = field(default_factory=set)  # interrupted, not yet reported so
    evaluating: set[EvaluationId] = field(default_factory=set)  # commanded, not yet reported done
    waiting: tuple[TrajectoryId, ...] = ()  # those not decoded at the last snapshot
    decoded_tokens: float = 0.0  # at the last snapshot; see `Snapshot.decoded_tokens`
    _decoded_before: dict[TrajectoryId, float] = field(default_factory=dict)
    """Of each assigned trajectory: `decoded_tokens` when it was routed or was last seen waiting."""
    _last: Snapshot | None = None
    _kv_seen: int = 0
    _unreflected: deque[tuple[int, int]] = field(default_factory=deque)
    """(number, change of KV tokens) of commands that no snapshot reflects yet."""
    _kv_unreflected: int = 0  # sum of these changes
    shown: InstanceView | None = None  # cached by `view`; None: out of date

    @property
    def kv_tokens(self) -> int:
        """Tokens in its KV cache at the last snapshot, changed by the commands since."""
        return max(0, self._kv_seen + self._kv_unreflected)

    def next_number(self, kv_change: int = 0) -> int:
        """Count one more command, which changes its KV tokens by `kv_change`; return its number."""
        self.shown = None
        self.commands += 1
        if kv_change:
            self._unreflected.append((self.commands, kv_change))
            self._kv_unreflected += kv_change
        return self.commands

    def assign(self, trajectory: TrajectoryId, tokens: int) -> None:
        """Record that a trajectory of `tokens` tokens is routed here."""
        self.assigned[trajectory] = tokens
        self._decoded_before[trajectory] = self.decoded_tokens

    def take(self, trajectories: tuple[TrajectoryId, ...]) -> int:
        """Unassign these trajectories; return the number of the command that takes them away."""
        for trajectory in trajectories:
            del self._decoded_before[trajectory]
        return self.next_number(-sum(self.assigned.pop(t) for t in trajectories))

    def generated(self, trajectory: TrajectoryId) -> int:
        """Estimate how many tokens an assigned trajectory has generated here."""
        return max(0, int(self.decoded_tokens - self._decoded_before[trajectory]))

    def pulled(self, version: Version) -> None:
        """Record a pull, perhaps of a newer version than was commanded."""
        self.shown = None
        self.version = max(self.version, version)

    def reflect(self, seen: Snapshot) -> None:
        """Take over a snapshot, unless it equals the last or is older."""
        last = self._last
        if last == seen or (last is not None and _age(seen) < _age(last)):
            return
        self.shown, self._last = None, seen
        self._kv_seen, self.decoded_tokens = seen.kv_tokens, seen.decoded_tokens
        self.waiting = seen.waiting
        for trajectory in seen.waiting:
            if trajectory in self.assigned:
                self._decoded_before[trajectory] = seen.decoded_tokens
        while self._unreflected and self._unreflected[0][0] <= seen.number:
            self._kv_unreflected -= self._unreflected.popleft()[1]

    def finished(self, trajectory: TrajectoryId, tokens: int) -> None:
        """Record that a trajectory of `tokens` tokens (prompt and response) has ended here."""
        self.shown = None
        if self.assigned.pop(trajectory, None) is not None:
            del self._decoded_before[trajectory]
        self.stopping.discard(trajectory)
        self._kv_seen = max(0, self._kv_seen - tokens)

    def view(self, *, accepts: bool) -> InstanceView:
        """Return the instance as strategies see it; the same object until something changes."""
        if self.shown is None or self.shown.accepts != accepts:
            self.shown = InstanceView(
                self.name,
                self.version,
                self.capacity,
                self.kv_capacity,
                self.kv_tokens,
                self.assigned,
                tuple(t for t in self.waiting if t in self.assigned),
                accepts,
            )
        return self.shown


def _age(seen: Snapshot) -> tuple[int, float]:
    """Sort key of an instance's snapshots; neither number ever falls."""
    return seen.number, seen.decoded_tokens
