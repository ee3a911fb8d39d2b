"""What rollout instances say, as facts for the mind; the data that comes with it is stored first.

Holds true: facts are in the order in which the instance made them; what is heard of a response that
is over is no fact. Knows nothing of processes or connections.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from rhymeflow.config import RolloutConfig
from rhymeflow.core.events import (
    Event,
    InstanceJoined,
    InstanceLeft,
    Pulled,
    Snapshot,
    TrajectoryFinished,
    TrajectoryInterrupted,
)
from rhymeflow.core.types import InstanceId
from rhymeflow.runtime import messages
from rhymeflow.runtime.evaluation import Evaluations
from rhymeflow.runtime.judging import Judge
from rhymeflow.runtime.pace import Pace
from rhymeflow.runtime.underway import UnderWay


class Instances:
    """The instances that have joined, as the controller hears them."""

    def __init__(
        self,
        rollout: RolloutConfig,
        under_way: UnderWay,
        evaluations: Evaluations,
        judge: Judge,
        pace: Pace,
    ) -> None:
        self._rollout, self._under_way = rollout, under_way
        self._evaluations, self._judge, self._pace = evaluations, judge, pace
        self._snapshots: dict[InstanceId, Snapshot | None] = {}

    def facts(self, name: InstanceId, message: Any) -> Iterator[Event]:
        """Take in one message of instance `name`."""
        match message:
            case messages.Joined():
                rollout = self._rollout
                kv_capacity = rollout.max_kv_tokens or rollout.max_running * message.max_length
                self._snapshots[name] = None
                yield InstanceJoined(name, message.version, rollout.max_running, kv_capacity)
            case messages.Made():
                for part in message.parts:
                    self._under_way.take(name, part)
                    self._pace.made(part)
            case messages.ResponseDone(trajectory=trajectory):
                if trajectory in self._under_way:
                    length = self._judge.finished(trajectory, message.reason)
                    assert length == message.length, (message, length)
                    yield TrajectoryFinished(trajectory, name, length, message.reason)
            case messages.Halted(trajectory=trajectory):
                if trajectory in self._under_way:
                    length = self._under_way.seal(trajectory)
                    assert length == message.length, (message, length)
                    yield TrajectoryInterrupted(trajectory, name, message.number, length)
            case messages.WeightsPulled():
                self._pace.pull_seconds.append(message.seconds)
                yield Pulled(name, message.number, message.version)
            case messages.Answered():
                self._judge.answered(name, message)
            case messages.InstanceStatus():
                self._pace.statuses[name] = message
                yield from self._snapshot(name, message)
            case _:
                raise AssertionError(f"unexpected message {message}")

    def _snapshot(self, name: InstanceId, status: messages.InstanceStatus) -> Iterator[Event]:
        snapshot = Snapshot(name, status.number, status.waiting, status.kv_tokens, status.made)
        if snapshot != self._snapshots[name]:  # one with nothing to do says the same for long
            self._snapshots[name] = snapshot
            yield snapshot

    def leave(self, name: InstanceId, reason: str) -> Iterator[Event]:
        """An instance is gone: keep the tokens it has sent; a fact only if it had joined."""
        self._under_way.seal_all(name)
        self._evaluations.leave(name)
        self._pace.leave(name)
        if name in self._snapshots:
            del self._snapshots[name]
            yield InstanceLeft(name, reason)
