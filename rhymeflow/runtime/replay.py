"""The past of a run, from its log: the coordinator as it was, and what it had asked for.

Replaying an attempt's events under its configuration gives the coordinator exactly as it was, and
its commands once more; they are compared with those in the log. The log may end between an event
and its commands, so the last of them can be missing there: they are given back, to be carried out.
A long log has snapshots of the coordinator's state, and is replayed from the last one.

Holds true: nothing here writes. Knows nothing of workers, tokens or text.
"""

from __future__ import annotations

import pickle
from collections.abc import Callable
from contextlib import closing
from itertools import chain, repeat
from pathlib import Path

from rhymeflow import build
from rhymeflow.config import Config
from rhymeflow.config.load import read_config
from rhymeflow.core.commands import Command, Train
from rhymeflow.core.coordinator import Coordinator
from rhymeflow.core.events import GroupCreated
from rhymeflow.errors import UserError
from rhymeflow.observe.summary import EVENTS
from rhymeflow.runtime import snapshot
from rhymeflow.runtime.past import Past
from rhymeflow.runtime.resume_options import check_change
from rhymeflow.store.reader import Attempt, TrajectoryReader


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
    """What the run was when its log ended, and the configuration that it goes on with.

    A run that ended before anything of it was stored begins anew, as `config.yaml` says.

    Raises:
        UserError: the change is not possible, or the log gives other commands than it has.
    """
    with closing(TrajectoryReader(run_dir / EVENTS)) as reader:
        attempts = reader.attempts()
        if not attempts:
            config = change(read_config(str(run_dir / "config.yaml")))
            return beginning(config), config
        past = replay(reader, run_dir / EVENTS)
    before = Config.model_validate_json(attempts[-1].config)
    config = change(before)
    check_change(before, config, past.coordinator.state.published or 0)
    configured(config, past.coordinator)
    return past, config


def replay(reader: TrajectoryReader, path: Path) -> Past:
    """Read the log at `path` from its last snapshot, or its beginning, to its end.

    Raises:
        UserError: the events give other commands than the log has.
    """
    attempts = reader.attempts()
    begins = {attempt.first_event: attempt for attempt in attempts}
    done, coordinator, num_drawn, training = _start(reader, attempts, path)
    seconds = attempts[-1].time
    recorded = chain(((c.event, c.command) for c in reader.commands_after(done)), repeat(None))
    expected = next(recorded)
    unrecorded: list[tuple[int, Command]] = []
    for seq, time, event in reader.events(max(done, 1)):
        seconds = max(seconds, time)
        if seq <= done:
            continue  # the snapshot knows it
        if (attempt := begins.get(seq)) and seq > 1:
            configured(_config(attempt), coordinator)
        num_drawn += isinstance(event, GroupCreated) and event.repeats is None
        for command in coordinator.handle(event):
            if isinstance(command, Train):
                training = command
            if expected is None:
                unrecorded.append((seq, command))
            elif expected == (seq, command):
                expected = next(recorded)
            else:
                raise _differs(path, expected, (seq, command))
    if expected is not None:
        raise _differs(path, expected, None)
    if coordinator.state.training is None:
        training = None
    return Past(coordinator, len(attempts), seconds, num_drawn, tuple(unrecorded), training)


def _start(
    reader: TrajectoryReader, attempts: list[Attempt], path: Path
) -> tuple[int, Coordinator, int, Train | None]:
    """The last event that need not be replayed (0: none), and what was after it."""
    snapshots = reader.snapshots()
    if not snapshots:
        return 0, configured(_config(attempts[0]), None), 0, None
    done, blob = snapshots[-1]
    try:
        state, num_drawn, training = snapshot.read(blob)
    except (pickle.UnpicklingError, AttributeError) as error:
        raise UserError(
            f"{path}: cannot be resumed: the state of the coordinator in it was written by another "
            f"version of Rhymeflow: {error}"
        ) from error
    config = _config(max((a for a in attempts if a.first_event <= done), key=lambda a: a.number))
    coordinator = configured(config, None)
    state.restore(coordinator.state.plan, coordinator.state.schedule)
    coordinator.state = state
    return done, coordinator, num_drawn, training


def _config(attempt: Attempt) -> Config:
    return Config.model_validate_json(attempt.config)


def _differs(
    path: Path, expected: tuple[int, Command], found: tuple[int, Command] | None
) -> UserError:
    was = f"event {expected[0]} {expected[1]}"
    now = "nothing more" if found is None else f"upon event {found[0]} {found[1]}"
    return UserError(
        f"{path}: cannot be resumed: the log has upon {was}, and its replay gives {now}. It was "
        "written by another version of Rhymeflow, or is damaged"
    )
