"""Rebuilds the coordinator of a run from its log.

Events are replayed from the newest snapshot and must give the log's commands. The log may lack
commands upon its last event: they are returned, to be carried out. If this version of the code
decides otherwise, the log's own decisions are replayed; if commands still differ, it is refused."""

from __future__ import annotations

import pickle
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import replace
from itertools import groupby
from pathlib import Path

from rhymeflow import build
from rhymeflow.config import Config
from rhymeflow.config.load import read_config
from rhymeflow.core.commands import Command, Interrupt, Pull, Route, Train
from rhymeflow.core.coordinator import Coordinator
from rhymeflow.core.events import Event, GroupCreated
from rhymeflow.core.histopipe.pipeline import Pipeline
from rhymeflow.core.plan import Schedule
from rhymeflow.core.protocol.entries import ProtocolError
from rhymeflow.core.strategies.base import Assignment, FleetView, InstanceView, Migration
from rhymeflow.errors import UserError
from rhymeflow.runtime import snapshot
from rhymeflow.runtime.resume import Past
from rhymeflow.runtime.resume_options import changes, check_change, whole_paths
from rhymeflow.store.damage import open_undamaged
from rhymeflow.store.previous_run import config_of
from rhymeflow.store.reader import TrajectoryReader
from rhymeflow.store.schema import EVENTS

_IMPOSSIBLE = (ProtocolError, AssertionError, LookupError, TypeError, ValueError, AttributeError)
"""Errors that the coordinator raises upon an impossible event."""


class ReplayError(Exception):
    """The events do not give the log's commands; the message says where."""


def configured(config: Config, coordinator: Coordinator | None) -> Coordinator:
    """Return the coordinator with the plan of `config`; None makes a new one."""
    if coordinator is None:
        return Coordinator(build.plan(config), build.schedule(config))
    coordinator.reconfigure(build.plan(config), build.schedule(config))
    return coordinator


def beginning(config: Config) -> Past:
    """Return the past of a new run."""
    return Past(configured(config, None))


def recall(run_dir: Path, change: Callable[[Config], Config]) -> tuple[Past, Config]:
    """Return the run as it was at the end of its log, and the configuration to resume it with. A
    run that ended before it stored an attempt starts over, with its `config.yaml`. Raises
    `UserError` if the change is not possible, or a replay does not give the log's commands."""
    path = run_dir / EVENTS
    with open_undamaged(path) as reader:
        attempts = reader.attempts()
        if not attempts:
            config = whole_paths(change(read_config(str(run_dir / "config.yaml"))))
            return beginning(config), config
        past = replay(reader, path)
        before = config_of(attempts[-1], path)
    config = whole_paths(change(before))
    published = past.coordinator.state.published or 0
    check_change(before, config, published)
    configured(config, past.coordinator)
    return past._replace(notes=(*past.notes, *changes(before, config, published))), config


def replay(reader: TrajectoryReader, path: Path) -> Past:
    """Replay the log at `path` from its last snapshot, or its beginning, to its end. Raises
    `UserError` if it cannot be read, or if its events and decisions do not give its commands."""
    try:
        return _Replay(reader, path, None).run()
    except ReplayError as difference:
        first = difference
    try:
        past = _Replay(reader, path, LoggedDecisions()).run()
    except ReplayError as difference:
        raise UserError(
            f"{path}: cannot be resumed: {difference}. It is damaged, or was written by a version "
            f"in which these events led to something else ({reader.written_by}): resume with that"
        ) from None
    note = f"this version decides otherwise than the log ({first}); the log's decisions stay"
    return past._replace(notes=(*past.notes, note))


class _Replay:
    """One pass over the log; `decisions`, if given, replace the strategies."""

    def __init__(
        self, reader: TrajectoryReader, path: Path, decisions: LoggedDecisions | None
    ) -> None:
        self._reader, self._path, self._decisions = reader, path, decisions
        self._attempts = reader.attempts()
        self._done = 0  # the last event that need not be replayed: that of the snapshot
        self._num_drawn = 0  # prompts drawn so far, without retries
        self._training: Train | None = None  # the last batch so far
        self._unrecorded: list[tuple[int, Command]] = []
        self._unreadable = 0  # the event of the newest snapshot, if it cannot be read
        self._coordinator = self._begin()

    def _begin(self) -> Coordinator:
        """Return the coordinator of the newest readable snapshot, or of the beginning."""
        for event, blob in reversed(self._reader.snapshots()):
            try:
                saved = snapshot.read(blob)
            except pickle.UnpicklingError as error:
                raise UserError(
                    f"{self._path}: cannot be resumed: the coordinator's state after event {event} "
                    f"cannot be read: {error}"
                ) from None
            if saved is None:
                self._unreadable = max(self._unreadable, event)
                continue
            self._done, self._num_drawn, self._training = event, saved.num_drawn, saved.training
            coordinator = self._coordinator_at(event)
            saved.state.restore(coordinator.state.plan, coordinator.state.schedule)
            coordinator.state = saved.state
            return coordinator
        return self._coordinator_at(self._attempts[0].first_event)

    def _coordinator_at(self, event: int) -> Coordinator:
        """Return a new coordinator, with the configuration of the event's attempt."""
        begun = (attempt for attempt in self._attempts if attempt.first_event <= event)
        attempt = max(begun, key=lambda attempt: attempt.number)
        return configured(config_of(attempt, self._path), None)

    def run(self) -> Past:
        """Replay to the end. Raises `ReplayError`."""
        attempts_by_event = {attempt.first_event: attempt for attempt in self._attempts}
        seconds, last_event = self._attempts[-1].time, 0
        self._follow_decisions()
        recorded = self._recorded()
        upcoming = next(recorded, None)  # the log's next commands, with their event
        for seq, time, event in self._reader.events(max(self._done, 1)):
            seconds, last_event = max(seconds, time), seq
            if seq <= self._done:
                continue  # it is in the snapshot
            if (attempt := attempts_by_event.get(seq)) and seq > 1:
                configured(config_of(attempt, self._path), self._coordinator)
                self._follow_decisions()
            logged: list[Command] = []
            if upcoming is not None and upcoming[0] == seq:
                logged, upcoming = upcoming[1], next(recorded, None)
            self._handle(seq, event, logged, is_last=upcoming is None)
        if upcoming is not None:
            seq, (command, *_) = upcoming
            raise ReplayError(f"the log has {command} upon event {seq}, and no such event")
        state = self._coordinator.state
        state.schedule = build.schedule(config_of(self._attempts[-1], self._path))
        return Past(
            self._coordinator,
            attempts=len(self._attempts),
            seconds=seconds,
            num_drawn=self._num_drawn,
            unrecorded=tuple(self._unrecorded),
            training=None if state.training is None else self._training,
            last_event=last_event,
            notes=self._notes(),
        )

    def _handle(self, seq: int, event: Event, logged: list[Command], *, is_last: bool) -> None:
        """Handle an event; compare its commands with the log's. The last event's may be missing."""
        if self._decisions is not None:
            self._decisions.repeat(logged)
        try:
            replayed = self._coordinator.handle(event)
        except _IMPOSSIBLE as error:
            what = f"{type(error).__name__} {error}".strip()
            raise ReplayError(f"event {seq}, {event}, cannot have happened: {what}") from error
        self._num_drawn += isinstance(event, GroupCreated) and event.repeats is None
        count = len(logged)
        if replayed[:count] != logged or (len(replayed) > count and not is_last):
            raise _difference(seq, logged, replayed)
        self._unrecorded += ((seq, command) for command in replayed[count:])
        self._training = next((c for c in replayed if isinstance(c, Train)), self._training)

    def _recorded(self) -> Iterator[tuple[int, list[Command]]]:
        """Yield each event after the snapshot that has commands in the log, with these commands."""
        commands = self._reader.commands(self._done)
        for event, group in groupby(commands, key=lambda recorded: recorded.event):
            yield event, [recorded.command for recorded in group]

    def _follow_decisions(self) -> None:
        state = self._coordinator.state
        if self._decisions is not None:
            state.schedule = self._decisions.replace_strategies(state.schedule)

    def _notes(self) -> tuple[str, ...]:
        if not self._unreadable:
            return ()
        return (
            f"the coordinator's state after event {self._unreadable:,} was written by "
            f"another version; all events from {self._done + 1:,} on were replayed",
        )


def _difference(seq: int, logged: list[Command], replayed: list[Command]) -> ReplayError:
    """Return the error that names the first command in which log and replay differ."""
    pairs = enumerate(zip(logged, replayed, strict=False))
    shorter = min(len(logged), len(replayed))
    index = next((i for i, (a, b) in pairs if a != b), shorter)
    was, now = ([*commands, "nothing more"][index] for commands in (logged, replayed))
    return ReplayError(f"the log has upon event {seq} {was}, and its replay gives {now}")


class LoggedDecisions:
    """Replays logged decisions instead of calling strategies. Logged routes, pulls and interrupts
    are proposed again, and the protocol checks them. The log does not say where a layout wanted to
    move groups, so they are back in their first places."""

    def __init__(self) -> None:
        self._commands: Sequence[Command] = ()

    def repeat(self, commands: Sequence[Command]) -> None:
        """Propose these commands upon the event that is handled next."""
        self._commands = commands

    def replace_strategies(self, schedule: Schedule) -> Schedule:
        """Return the schedule with the log's decisions instead of its strategies."""
        return replace(
            schedule,
            routing=self._routing,
            sync=self._sync,
            migration=self._migration,
            is_replayed=True,
        )

    def _routing(self, view: FleetView) -> Iterable[Assignment]:
        routes = [command for command in self._commands if isinstance(command, Route)]
        layout = view.layout
        for group in dict.fromkeys(route.trajectory.group for route in routes):
            # Strategies that read the layout ignore groups that are not in it.
            if isinstance(layout, Pipeline) and group not in layout:
                layout.join(group, [instance.name for instance in view.instances])
        return [Assignment(route.trajectory, route.instance) for route in routes]

    def _sync(self, instance: InstanceView, view: FleetView) -> bool:
        return any(isinstance(c, Pull) and c.instance == instance.name for c in self._commands)

    def _migration(self, view: FleetView) -> Iterable[Migration]:
        # The coordinator ignores interrupts for another reason: it has given these by now.
        interrupts = [command for command in self._commands if isinstance(command, Interrupt)]
        return [Migration(command.instance, command.trajectories) for command in interrupts]
