"""A simulated rollout instance, advanced from event to event.

It computes many iterations of continuous batching at once, with the same result as one by one
(`continuous_batching.py`). Commands are carried out between iterations, in order."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable
from math import inf
from typing import TYPE_CHECKING

from rhymeflow.core.commands import Abort, InstanceCommand, Interrupt, Pull, Route
from rhymeflow.core.events import (
    Event,
    Pulled,
    Snapshot,
    TrajectoryFinished,
    TrajectoryInterrupted,
    TurnEnded,
)
from rhymeflow.core.types import FinishReason, InstanceId, TrajectoryId, Version
from rhymeflow.sim.continuous_batching import ContinuousBatch, DecodeSpan, Hardware, Tally
from rhymeflow.sim.response import Response

if TYPE_CHECKING:
    from rhymeflow.sim.timeline import Kind, TimelineRow


class SimulatedInstance:
    """One instance, up and idle at `now`. Its driver calls `advance` at the time `next`, and
    `deliver` for each command, which may change `next`. `find` returns the response of a
    trajectory; `published` returns the newest version, which a pull loads."""

    def __init__(
        self,
        name: InstanceId,
        hardware: Hardware,
        *,
        version: Version,
        now: float,
        find: Callable[[TrajectoryId], Response],
        published: Callable[[], Version],
        row: TimelineRow | None = None,
    ) -> None:
        self.name, self.hardware, self.version = name, hardware, version
        self.next = inf  # the time at which it must be advanced
        self.last_number = 0
        self.tally = Tally()
        self.joined, self.left = now, inf
        self._batch = ContinuousBatch(hardware, self.tally)
        self._find, self._published, self._row = find, published, row
        self._inbox: deque[InstanceCommand] = deque()
        self._decode_span: DecodeSpan | None = None
        self._pulling: tuple[Pull, Version] | None = None
        self._since = now  # when the decode span or the pull that is under way began
        self._reported = 0.0  # the clock in its last snapshot

    @property
    def pulling(self) -> bool:
        """Whether it pulls weights, during which it does nothing else."""
        return self._pulling is not None

    @property
    def busy(self) -> bool:
        """Whether it has anything to do."""
        return self.next < inf

    @property
    def has_news(self) -> bool:
        """Whether it has generated anything since its last snapshot, or may now."""
        return self.busy or self._batch.clock(0) > self._reported

    def snapshot(self, now: float) -> Snapshot:
        """Return the snapshot that it reports at `now`."""
        waiting = tuple(self._batch.waiting)
        over = 0 if self._decode_span is None else self._decode_span.over(now)
        kv_tokens, generated = self._batch.kv_tokens(over), self._batch.clock(over)
        prefilled = self.tally.prefilled
        self._reported = generated
        return Snapshot(self.name, self.last_number, waiting, kv_tokens, generated, prefilled)

    def deliver(self, command: InstanceCommand, now: float) -> None:
        """Queue a command; it is carried out between two iterations."""
        assert command.instance == self.name
        self._inbox.append(command)
        if self._decode_span is not None:
            self._decode_span.cut(now)
            self.next = self._decode_span.end
        elif self._pulling is None:
            self.next = now

    def advance(self, now: float) -> list[Event]:
        """Do what is due at `now`, which must be `next`; return the events, in order."""
        assert now == self.next, (now, self.next)
        events: list[Event] = []
        if self._pulling is not None:
            events.append(self._end_pull(now))
        elif self._decode_span is not None:
            self._end_decode_span(now, events)
        self._obey(now, events)
        if self._pulling is None:
            self._begin(now)
        return events

    def busy_seconds(self, now: float) -> float:
        """Return the seconds until `now` in which it was busy."""
        under_way = self._decode_span is not None or self._pulling is not None
        return self.tally.busy + (now - self._since if under_way else 0.0)

    def idle_share(self, now: float) -> float:
        """Return the share of its time until `now` in which it was idle."""
        lifetime = min(now, self.left) - self.joined
        return 1 - self.busy_seconds(now) / lifetime if lifetime > 0 else 0.0

    def crash(self, now: float, store_seconds: float) -> list[Response]:
        """Die; return the responses here, cut to the tokens that were stored: at each multiple of
        `store_seconds`, at pulls, and when complete or interrupted."""
        over = unstored = 0
        if self._pulling is not None:
            self.tally.pull += now - self._since
        elif self._decode_span is not None:
            self.tally.decode += now - self._since
            over = self._decode_span.over(now)
            stored_at = now // store_seconds * store_seconds
            unstored = over - self._decode_span.over_before(stored_at)
        lost = self._batch.lose(over, unstored, self.version)
        self._decode_span = self._pulling = None
        self.next, self.left = inf, now
        if self._row is not None:
            self._row.left = now
            self._row.loads.append((now, 0, 0))
        return lost

    # -- commands ----------------------------------------------------------------------------

    def _obey(self, now: float, events: list[Event]) -> None:
        while self._inbox and self._pulling is None:
            command = self._inbox.popleft()
            assert command.number > self.last_number, f"{command} after {self.last_number}"
            self.last_number = command.number
            match command:
                case Route(trajectory=trajectory):
                    self._batch.submit(self._find(trajectory))
                case Interrupt(number=number, trajectories=trajectories):
                    for response in self._batch.stop(trajectories):
                        response.store()
                        self.tally.interrupts += 1
                        length = response.generated
                        events.append(TrajectoryInterrupted(response.id, self.name, number, length))
                case Abort(trajectories=trajectories):
                    self._batch.stop(trajectories)
                case Pull():
                    self._begin_pull(command, now)
                case _:
                    raise AssertionError(f"{command}: the simulator does not evaluate")

    def _begin_pull(self, command: Pull, now: float) -> None:
        self._batch.store()
        self._pulling = command, self._published()
        self._since = now
        self.next = now + self.hardware.cost.pull

    def _end_pull(self, now: float) -> Pulled:
        assert self._pulling is not None
        command, self.version = self._pulling
        assert self.version >= command.version, f"{command}, but {self.version} is the newest"
        self._pulling = None
        self.tally.pull += now - self._since
        self.tally.pulls += 1
        if self._row is not None:
            self._row.append("pull", self._since, now, self.version)
        self._batch.change_weights(self.version)
        return Pulled(self.name, command.number, self.version)

    # -- iterations --------------------------------------------------------------------------

    def _begin(self, now: float) -> None:
        self._decode_span = self._batch.begin(now)
        self._since = now
        self.next = inf if self._decode_span is None else self._decode_span.end
        if self._row is not None:
            self._row.loads.append((now, len(self._batch.running), self._batch.kv_tokens(0)))

    def _end_decode_span(self, now: float, events: list[Event]) -> None:
        is_prefill, decode_span = bool(self._batch.chunks), self._decode_span
        assert decode_span is not None
        self._decode_span = None
        if is_prefill:
            self.tally.prefill += now - self._since
        else:
            self.tally.decode += now - self._since
        if self._row is not None and now > self._since:
            kind: Kind = "prefill" if is_prefill else "decode"
            self._row.append(kind, self._since, now, self.version)
        for response in self._batch.end(decode_span.iterations, self.version):
            response.store()
            if not response.is_last_turn:
                turn = response.turn + 1
                events.append(TurnEnded(response.id, self.name, turn, response.length))
                continue
            reason: FinishReason = (
                "length" if response.sampled_length >= self.hardware.max_length else "stop"
            )
            events.append(TrajectoryFinished(response.id, self.name, response.length, reason))
