"""What rollout instances say, as events; the data that comes with them is stored first.

Holds true: events are in the order in which the instance reported them; what is heard of a response
that is over makes none. Knows nothing of processes or connections.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from rhymeflow.core.events import (
    Event,
    InstanceJoined,
    InstanceLeft,
    Pulled,
    Snapshot,
    TrajectoryFinished,
    TrajectoryInterrupted,
    TurnEnded,
)
from rhymeflow.core.types import InstanceId
from rhymeflow.runtime.environments import Environments
from rhymeflow.runtime.evaluation import Evaluations
from rhymeflow.runtime.in_flight import InFlight
from rhymeflow.runtime.throughput import Throughput
from rhymeflow.workers import messages


class Instances:
    """The instances that have joined, as the controller hears them."""

    def __init__(
        self,
        in_flight: InFlight,
        evaluations: Evaluations,
        environments: Environments,
        throughput: Throughput,
    ) -> None:
        self._in_flight, self._environments = in_flight, environments
        self._evaluations, self._throughput = evaluations, throughput
        self._snapshots: dict[InstanceId, Snapshot | None] = {}

    def events(self, name: InstanceId, message: Any) -> Iterator[Event]:
        """Receive one message of instance `name`."""
        match message:
            case InstanceJoined():
                self._snapshots[name] = None
                yield message
            case messages.TokensGenerated():
                for part in message.parts:
                    self._in_flight.take(name, part)
                    if part.trajectory.group >= 0:
                        self._throughput.add(part)
            case TrajectoryFinished() | TurnEnded() | TrajectoryInterrupted():
                if message.trajectory in self._in_flight:
                    self._stopped(message)
                    yield message
            case messages.Carried(Pulled() as pulled, seconds):
                self._throughput.pull_seconds.append(seconds)
                yield pulled
            case messages.Carried(Snapshot() as snapshot, status):
                self._throughput.statuses[name] = status
                if snapshot != self._snapshots[name]:  # with nothing to do it is the same for long
                    self._snapshots[name] = snapshot
                    yield snapshot
            case _:
                raise AssertionError(f"unexpected message {message}")

    def _stopped(self, event: TrajectoryFinished | TurnEnded | TrajectoryInterrupted) -> None:
        """The instance has nothing more to do with a response for now; its tokens are stored."""
        if isinstance(event, TrajectoryFinished):
            length = self._environments.finished(event.trajectory, event.reason)
        else:
            length = self._in_flight.seal(event.trajectory)
        assert length == event.length, (event, length)
        if isinstance(event, TurnEnded):
            self._environments.turn_ended(event.trajectory)

    def leave(self, name: InstanceId, reason: str) -> Iterator[Event]:
        """An instance is gone: keep the tokens it has sent; events only if it had joined."""
        for trajectory, length in self._in_flight.seal_all(name):
            yield TrajectoryInterrupted(trajectory, name, 0, length)
        self._evaluations.leave(name)
        self._throughput.leave(name)
        if name in self._snapshots:
            del self._snapshots[name]
            yield InstanceLeft(name, reason)
