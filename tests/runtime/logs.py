"""What the log of a run says: commands by replay, and how stale what was trained on had begun."""

from __future__ import annotations

import io
from collections.abc import Iterator
from pathlib import Path

from rich.console import Console

from rhymeflow.config import Config
from rhymeflow.core.commands import Command, Pull, Route, Train
from rhymeflow.core.events import Event, GroupCreated, InstanceJoined, Pulled
from rhymeflow.observe.summary import Summary
from rhymeflow.runtime.replay import configured
from rhymeflow.runtime.train import train as run
from rhymeflow.store.reader import TrajectoryReader


def train(config: Config, console: Console | None = None) -> Summary:
    return run(config, console=console or Console(file=io.StringIO()))


def reader(config: Config) -> TrajectoryReader:
    return TrajectoryReader(Path(config.run.output_dir) / "events.db")


def replayed(log: TrajectoryReader) -> Iterator[tuple[int, Event, list[Command]]]:
    """Each event of the log with its number, and what a fresh coordinator commands upon it, under
    the configuration that is recorded for its attempt.
    """
    attempts = {attempt.first_event: attempt for attempt in log.attempts()}
    coordinator = None
    for seq, _, event in log.events():
        if attempt := attempts.get(seq):
            coordinator = configured(Config.model_validate_json(attempt.config), coordinator)
        yield seq, event, coordinator.handle(event)


def replay(config: Config) -> list[tuple[Event, list[Command]]]:
    """Each event of the run's log, and what a replay commands upon it."""
    log = reader(config)
    found = [(event, commands) for _, event, commands in replayed(log)]
    log.close()
    return found


def check_replay(config: Config) -> None:
    """A replay of the recorded events, under the recorded configurations, gives the commands that
    are recorded beside them: each upon its event, and no others.
    """
    log = reader(config)
    recorded: dict[int, list[Command]] = {}
    numbers = [(r.seq, r.event) for r in log.commands()]
    assert [seq for seq, _ in numbers] == list(range(1, len(numbers) + 1))
    assert [event for _, event in numbers] == sorted(event for _, event in numbers)
    for _, event, command in log.commands():
        recorded.setdefault(event, []).append(command)
    for seq, event, commands in replayed(log):
        assert commands == recorded.pop(seq, []), (seq, event)
    assert not recorded, "commands upon events that are not there"
    log.close()


def check_bound(config: Config) -> None:
    """Law 1, seen three times: from the tokens, from the log, and in how groups ended (law 2)."""
    log, bound = reader(config), config.schedule.bound
    ages = {age for (age,) in log.query("SELECT DISTINCT staleness FROM trained")}
    assert ages <= set(range(bound + 1))
    steps = replay(config)
    commands = [command for _, caused in steps for command in caused]
    # What an instance was to hold when it was given a response for the first time. It holds that
    # or what is newer by then; if it dies before, no token is generated there.
    pulls = {(c.instance, c.number): c.version for c in commands if isinstance(c, Pull)}
    for event in (e for e, _ in steps if isinstance(e, Pulled)):
        assert event.version >= pulls[event.instance, event.number]
    held = {e.instance: e.version for e, _ in steps if isinstance(e, InstanceJoined)}
    begun: dict = {}
    for route in (c for c in commands if isinstance(c, Route)):
        before = [v for (i, n), v in pulls.items() if i == route.instance and n < route.number]
        begun.setdefault(route.trajectory, route.version)
        assert route.version >= max([held[route.instance], *before])
    ended = []
    for train in (c for c in commands if isinstance(c, Train)):
        ended += train.groups
        for group, members in zip(train.groups, train.members, strict=True):
            assert len(members) == config.rollout.num_generations
            assert all(0 <= train.version - begun[group, m] <= bound for m in members)
    assert (
        len(ended) == len(set(ended)) == config.learner.max_steps * config.learner.groups_per_batch
    )
    consumed = log.query("SELECT group_id FROM groups WHERE ending = 'consumed' ORDER BY 1")
    assert [group for (group,) in consumed] == sorted(ended)
    requested = {e.group for e, _ in steps if isinstance(e, GroupCreated)}
    assert requested == {
        group for (group,) in log.query("SELECT group_id FROM groups WHERE suite IS NULL")
    }
    log.close()
