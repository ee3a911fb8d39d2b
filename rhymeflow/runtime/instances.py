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

Stopped = messages.TrajectoryFinished | messages.TurnEnded | messages.TrajectoryInterrupted


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
            case messages.Joined():
                self._snapshots[name] = None
                yield InstanceJoined(
                    name,
                    message.version,
                    message.max_num_seqs,
                    message.kv_capacity,
                    message.checksum,
                )
            case messages.TokensGenerated():
                for part in message.parts:
                    self._in_flight.take(name, part)
                    if part.trajectory.group >= 0:
                        self._throughput.add(part)
            case (
                messages.TrajectoryFinished()
                | messages.TurnEnded()
                | messages.TrajectoryInterrupted()
            ):
                if message.trajectory in self._in_flight:
                    yield self._stopped(name, message)
            case messages.Pulled():
                self._throughput.pull_seconds.append(message.seconds)
                yield Pulled(name, message.number, message.version, message.checksum)
            case messages.InstanceStatus():
                self._throughput.statuses[name] = message
                yield from self._snapshot(name, message)
            case _:
                raise AssertionError(f"unexpected message {message}")

    def _stopped(self, name: InstanceId, message: Stopped) -> Event:
        """The instance has nothing more to do with a response for now; its tokens are stored."""
        trajectory = message.trajectory
        if isinstance(message, messages.TrajectoryFinished):
            length = self._environments.finished(trajectory, message.reason)
        else:
            length = self._in_flight.seal(trajectory)
        assert length == message.length, (message, length)
        match message:
            case messages.TrajectoryFinished():
                return TrajectoryFinished(trajectory, name, length, message.reason)
            case messages.TrajectoryInterrupted():
                return TrajectoryInterrupted(trajectory, name, message.number, length)
            case messages.TurnEnded():
                self._environments.turn_ended(trajectory)
                return TurnEnded(trajectory, name, message.turn, length)

    def _snapshot(self, name: InstanceId, status: messages.InstanceStatus) -> Iterator[Event]:
        snapshot = Snapshot(
            name,
            status.number,
            status.waiting,
            status.kv_tokens,
            status.clock,
            status.prefill_seconds,
        )
        if snapshot != self._snapshots[name]:  # one with nothing to do says the same for long
            self._snapshots[name] = snapshot
            yield snapshot

    def leave(self, name: InstanceId, reason: str) -> Iterator[Event]:
        """An instance is gone: keep the tokens it has sent; events only if it had joined."""
        for trajectory, length in self._in_flight.seal_all(name):
            yield TrajectoryInterrupted(trajectory, name, 0, length)
        self._evaluations.leave(name)
        self._throughput.leave(name)
        if name in self._snapshots:
            del self._snapshots[name]
            yield InstanceLeft(name, reason)
