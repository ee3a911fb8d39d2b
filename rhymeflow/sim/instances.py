"""The simulated instances: who is at which place, who was lost, and who waits to join.

Holds true: at most one instance is at a place; one that comes back has a new name, as in real runs
(`rollout-0`, then `rollout-0.1`). One joins only while there is a learner to have weights from.
Knows nothing of the coordinator.
"""

from __future__ import annotations

from collections.abc import Callable

from rhymeflow.core.types import InstanceId
from rhymeflow.sim.instance import Instance
from rhymeflow.sim.response import Response


class Instances:
    """All instances of a cluster.

    `make` makes one of this name.
    """

    def __init__(self, make: Callable[[InstanceId], Instance], num_places: int) -> None:
        self.ever: list[Instance] = []
        """All that ever were, in the order they joined."""
        self.live: dict[InstanceId, Instance] = {}
        self._make = make
        self._at: list[InstanceId | None] = [None] * num_places
        self._joined = [0] * num_places
        self._losses = [0] * num_places
        self._waiting: set[int] = set()

    def losses(self, place: int) -> int:
        """How often this place was struck; whoever was started before the last time is gone."""
        return self._losses[place]

    def join(self, place: int) -> Instance:
        """One more is up, at a place that is free."""
        assert self._at[place] is None, f"place {place} is taken"
        name, before = f"rollout-{place}", self._joined[place]
        instance = self._make(f"{name}.{before}" if before else name)
        self._joined[place] += 1
        self._at[place] = instance.name
        self.live[instance.name] = instance
        self.ever.append(instance)
        return instance

    def wait(self, place: int) -> None:
        """One is up, but there is no learner."""
        self._waiting.add(place)

    def waiting(self) -> list[int]:
        """The places of those that wait, which wait no longer."""
        places, self._waiting = sorted(self._waiting), set()
        return places

    def lose(
        self, place: int, now: float, store_seconds: float | None
    ) -> tuple[InstanceId, list[Response]] | None:
        """Whoever is at this place is gone; its name and what it had, as far as it was stored."""
        self._losses[place] += 1
        self._waiting.discard(place)
        name, self._at[place] = self._at[place], None
        if name is None:
            return None
        return name, self.live.pop(name).crash(now, store_seconds)
