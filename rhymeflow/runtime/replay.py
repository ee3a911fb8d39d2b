"""The past of a run, from its log: the coordinator as it was, and what it had asked for.

Events are replayed from the newest snapshot and must give the log's commands; commands on the last
event that the log lacks are returned, to be carried out. Where this version decides otherwise, the
log's own decisions are replayed instead; if its events still give other commands, it is refused.
"""

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
from rhymeflow.runtime.resume_options import check_change
from rhymeflow.store.damage import open_undamaged
from rhymeflow.store.previous_run import config_of
from rhymeflow.store.reader import TrajectoryReader
from rhymeflow.store.schema import EVENTS

_IMPOSSIBLE = (ProtocolError, AssertionError, LookupError, TypeError, ValueError, AttributeError)
"""What the coordinator raises upon events that cannot have happened as they stand there."""


class Differs(Exception):  # noqa: N818 - it is what happened
    """The events do not give the commands that the log has: the message says where."""


def configured(config: Config, coordinator: Coordinator | None) -> Coordinator:
    """The coordinator at the beginning of an attempt; None: there was none before."""
    if coordinator is None:
        return Coordinator(build.plan(config), build.schedule(config))
    coordinator.reconfigure(build.plan(config), build.schedule(config))
    return coordinator


def beginning(config: Config) -> Past:
    """The past of a run that has none."""
    return Past(configured(config, None))


def recall(run_dir: Path, change: Callable[[Config], Config]) -> tuple[Past, Config]:
    """What the run was when its log ended, and the configuration to resume it with.

    A run that ended before anything was stored begins anew, with its `config.yaml`.

    Raises:
        UserError: the change is not possible, or the log gives other commands than it has.
    """
    path = run_dir / EVENTS
    with open_undamaged(path) as reader:
        attempts = reader.attempts()
        if not attempts:
            config = change(read_config(str(run_dir / "config.yaml")))
            return beginning(config), config
        past = replay(reader, path)
        before = config_of(attempts[-1], path)
    config = change(before)
    check_change(before, config, past.coordinator.state.published or 0)
    configured(config, past.coordinator)
    return past, config


def replay(reader: TrajectoryReader, path: Path) -> Past:
    """Replay the log at `path` from its last snapshot, or its beginning, to its end. Raises
    `UserError` if it cannot be read, or if its events and decisions do not give its commands."""
    try:
        return _Replay(reader, path, None).run()
    except Differs as difference:
        first = difference
    try:
        past = _Replay(reader, path, LoggedDecisions()).run()
    except Differs as difference:
        raise UserError(
            f"{path}: cannot be resumed: {difference}. It is damaged, or was written by a version "
            f"in which these events led to something else ({reader.written_by}): resume with that"
        ) from None
    note = f"this version decides otherwise than the log ({first}); what was decided stays"
    return past._replace(notes=(*past.notes, note))


class _Replay:
    """One pass over the log; with `decisions`, those of the log in the place of strategies."""

    def __init__(
        self, reader: TrajectoryReader, path: Path, decisions: LoggedDecisions | None
    ) -> None:
        self._reader, self._path, self._decisions = reader, path, decisions
        self._attempts = reader.attempts()
        self._done = self._num_drawn = 0
        """The last event that need not be replayed; prompts drawn by then."""
        self._training: Train | None = None
        self._unrecorded: list[tuple[int, Command]] = []
        self._unreadable = 0
        """The event of the newest snapshot, if that cannot be read."""
        self._coordinator = self._begin()

    def _begin(self) -> Coordinator:
        """The coordinator of the newest snapshot that can be read, or of the beginning."""
        for done, blob in reversed(self._reader.snapshots()):
            try:
                found = snapshot.read(blob)
            except pickle.UnpicklingError as error:
                raise UserError(
                    f"{self._path}: cannot be resumed: the coordinator's state after event {done} "
                    f"is none: {error}"
                ) from None
            if found is None:
                self._unreadable = max(self._unreadable, done)
                continue
            self._done, self._num_drawn, self._training = done, found.num_drawn, found.training
            coordinator = self._coordinator_at(done)
            found.state.restore(coordinator.state.plan, coordinator.state.schedule)
            coordinator.state = found.state
            return coordinator
        return self._coordinator_at(self._attempts[0].first_event)

    def _coordinator_at(self, event: int) -> Coordinator:
        """A new one, under the configuration of the attempt that the event is of."""
        begun = (attempt for attempt in self._attempts if attempt.first_event <= event)
        attempt = max(begun, key=lambda attempt: attempt.number)
        return configured(config_of(attempt, self._path), None)

    def run(self) -> Past:
        """Replay to the end. Raises `Differs`."""
        begins = {attempt.first_event: attempt for attempt in self._attempts}
        seconds, last = self._attempts[-1].time, 0
        self._follow_decisions()
        recorded = self._recorded()
        upon = next(recorded, None)
        for seq, time, event in self._reader.events(max(self._done, 1)):
            seconds, last = max(seconds, time), seq
            if seq <= self._done:
                continue  # the snapshot knows it
            if (attempt := begins.get(seq)) and seq > 1:
                configured(config_of(attempt, self._path), self._coordinator)
                self._follow_decisions()
            logged: list[Command] = []
            if upon is not None and upon[0] == seq:
                logged, upon = upon[1], next(recorded, None)
            self._take(seq, event, logged, is_last=upon is None)
        if upon is not None:
            raise Differs(f"the log has {upon[1][0]} upon event {upon[0]}, and no such event")
        state = self._coordinator.state
        state.schedule = build.schedule(config_of(self._attempts[-1], self._path))
        return Past(
            self._coordinator,
            len(self._attempts),
            seconds,
            self._num_drawn,
            tuple(self._unrecorded),
            None if state.training is None else self._training,
            last,
            self._notes(),
        )

    def _take(self, seq: int, event: Event, logged: list[Command], *, is_last: bool) -> None:
        """Handle an event; the log has these commands upon it, perhaps not all if they are last."""
        if self._decisions is not None:
            self._decisions.upon(logged)
        try:
            given = self._coordinator.handle(event)
        except _IMPOSSIBLE as error:
            what = f"{type(error).__name__} {error}".strip()
            raise Differs(f"event {seq}, {event}, cannot have happened: {what}") from error
        self._num_drawn += isinstance(event, GroupCreated) and event.repeats is None
        known = len(logged)
        if given[:known] != logged or (len(given) > known and not is_last):
            raise _difference(seq, logged, given)
        self._unrecorded += ((seq, command) for command in given[known:])
        self._training = next((c for c in given if isinstance(c, Train)), self._training)

    def _recorded(self) -> Iterator[tuple[int, list[Command]]]:
        """The commands of the log after the start, by the event upon which they were given."""
        commands = self._reader.commands(self._done)
        for event, found in groupby(commands, key=lambda recorded: recorded.event):
            yield event, [recorded.command for recorded in found]

    def _follow_decisions(self) -> None:
        state = self._coordinator.state
        if self._decisions is not None:
            state.schedule = self._decisions.in_place_of(state.schedule)

    def _notes(self) -> tuple[str, ...]:
        if not self._unreadable:
            return ()
        return (
            f"the coordinator's state after event {self._unreadable:,} was written by "
            f"another version; all events from {self._done + 1:,} on were replayed",
        )


def _difference(seq: int, logged: list[Command], given: list[Command]) -> Differs:
    """What is said of an event upon which this version commands something else."""
    index = next((i for i, (a, b) in enumerate(zip(logged, given, strict=False)) if a != b), None)
    if index is None:
        index = min(len(logged), len(given))
    was, now = ([*commands, "nothing more"][index] for commands in (logged, given))
    return Differs(f"the log has upon event {seq} {was}, and its replay gives {now}")


class LoggedDecisions:
    """Replays logged decisions instead of calling strategies.

    What was routed, pulled and interrupted is proposed again, and the protocol checks it. The log
    does not say where a layout wanted what it moved: that returns to its first place.
    """

    def __init__(self) -> None:
        self._commands: Sequence[Command] = ()

    def upon(self, commands: Sequence[Command]) -> None:
        """These were given upon the event that is handled next."""
        self._commands = commands

    def in_place_of(self, schedule: Schedule) -> Schedule:
        """The schedule, with the log's decisions instead of its strategies."""
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
            # Strategies that read the layout pass over what is not in it.
            if isinstance(layout, Pipeline) and group not in layout:
                layout.join(group, [instance.name for instance in view.instances])
        return [Assignment(route.trajectory, route.instance) for route in routes]

    def _sync(self, instance: InstanceView, view: FleetView) -> bool:
        return any(isinstance(c, Pull) and c.instance == instance.name for c in self._commands)

    def _migration(self, view: FleetView) -> Iterable[Migration]:
        # What was interrupted for another reason is gone by now, and passed over.
        interrupts = [command for command in self._commands if isinstance(command, Interrupt)]
        return [Migration(each.instance, each.trajectories) for each in interrupts]
