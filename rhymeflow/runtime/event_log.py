"""The run's log: events, and the commands that the coordinator gives upon them.

Events are stored before the coordinator handles them, each command before it is carried out, and a
version is on the disk before anything follows from it. Replays begin at a snapshot of the
coordinator's state, taken after `SNAPSHOT_EVENTS` events, with each checkpoint, and at the
beginning and end of an attempt, once all commands are carried out."""

from __future__ import annotations

import time
from collections.abc import Iterator, Sequence
from typing import TYPE_CHECKING

from rhymeflow.config import Config
from rhymeflow.core.commands import Command
from rhymeflow.core.events import Event, GroupCreated, LearnerReady, Tick, VersionPublished
from rhymeflow.runtime import snapshot
from rhymeflow.runtime.in_flight import InFlight
from rhymeflow.runtime.resume import Past
from rhymeflow.runtime.snapshot import StateSnapshot
from rhymeflow.runtime.training import Training

if TYPE_CHECKING:
    from rhymeflow.store.writer import SqliteTrajectoryStore

SNAPSHOT_EVENTS = 100_000  # Most events between two snapshots. A replay of this many takes seconds.

COMMIT_SECONDS = 1.0
"""Time between commits; a version is committed at once. A commit writes whole pages, so few large
commits cost less than many small ones."""


class EventLog:
    """Records events in `store` and has the coordinator act on them."""

    def __init__(
        self,
        config: Config,
        store: SqliteTrajectoryStore,
        past: Past,
        in_flight: InFlight,
        training: Training,
    ) -> None:
        self._scale = config.emulation.scale
        """Seconds that are logged per second of this machine, by which all arguments are."""
        self._keep_tokens, drafting = config.run.keep_tokens, config.drafting
        self._history_tokens = 0 if drafting.window == "off" else drafting.history_tokens
        self._store, self._coordinator = store, past.coordinator
        self._in_flight, self._training = in_flight, training
        self._num_drawn = past.num_drawn  # in the log; `InFlight` may have drawn more by now
        self._last_handled = past.last_event
        self._num_events = 0  # since the last snapshot
        self.is_snapshot_due = False
        self._committed_at = 0.0
        self.coordinator_seconds = 0.0  # time that the coordinator has taken, in all

    def record(self, events: Sequence[Event], now: float) -> int:
        """Record events; return the number of the first. A version is committed at once, since a
        learner that replaces another reads the published versions."""
        first = self._store.record(now * self._scale, events)
        if any(isinstance(event, VersionPublished | LearnerReady) for event in events):
            self.commit(now, durable=True)
        return first

    def act_on(self, events: list[Event], now: float) -> Iterator[Command]:
        """Record events and a `Tick`; yield each command once it is recorded."""
        events = [*events, Tick()]
        first = self.record(events, now)
        for number, event in enumerate(events, start=first):
            self._num_drawn += isinstance(event, GroupCreated) and event.repeats is None
            self._last_handled = number
            started = time.perf_counter()
            commands = self._coordinator.handle(event)
            self.coordinator_seconds += time.perf_counter() - started
            for command in commands:
                self._store.record_command(number, command)
                yield command
        self._num_events += len(events)

    def end_round(self, now: float) -> None:
        """Take a snapshot, prune and commit, if due, once all commands are carried out."""
        if self.is_snapshot_due or self._num_events >= SNAPSHOT_EVENTS:
            self.take_snapshot()
        if now - self._committed_at >= COMMIT_SECONDS:
            self._in_flight.seal_all()  # so a crash costs at most the tokens since the last commit
            self._prune()
            self.commit(now)

    def take_snapshot(self) -> None:
        """Store the coordinator's state after the last event that it handled."""
        if not self._last_handled:
            return  # a replay begins with the same state
        current = StateSnapshot(self._coordinator.state, self._num_drawn, self._training.batch)
        self._store.put_snapshot(self._last_handled, snapshot.write(current))
        self._num_events, self.is_snapshot_due = 0, False

    def commit(self, now: float, *, durable: bool = False) -> None:
        """Show readers all that is recorded; see `SqliteTrajectoryStore.commit`."""
        self._committed_at = now
        self._store.commit(durable=durable)

    def _prune(self) -> None:
        """Delete tokens that the run no longer needs, within the next commit.

        The run needs the batches since the newest checkpoint, on which a restored learner trains
        again, responses in flight, and the newest tokens, for drafts. A loss of power that undoes
        the end of the log undoes the deletions too: they are in the same transaction."""
        newest = self._training.checkpoints.newest
        if self._keep_tokens is None or newest is None:
            return
        first_kept = min(newest, self._training.published - self._keep_tokens)
        if first_kept > 0:
            self._store.prune(before=first_kept, history_tokens=self._history_tokens)
