"""Logs of real runs, recorded under schema version 5, still give the same commands.

Each file of `replay/` is a tiny run with two instances: first its configuration, then one line for
each event, with the commands that the coordinator of that time gave. What was renamed since is
translated here and nowhere else, and fields that came later are left out. A change that is to
change decisions records anew and says so.
"""

from __future__ import annotations

import dataclasses
import gzip
import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from rhymeflow import build
from rhymeflow.config import Config
from rhymeflow.config.load import config_from_json
from rhymeflow.core import commands, events
from rhymeflow.core.coordinator import Coordinator
from rhymeflow.store import codec

LOGS = sorted((Path(__file__).parent / "replay").glob("*.jsonl.gz"))

FIELDS = {"Snapshot": {"made": "decoded_tokens"}}
VALUES = {
    "cut": "finished_early",
    "status": "when_version_unusable",
    "stuck; its prompt is drawn again": "stuck; its prompt is retried",
    "stuck, and there was nothing of it yet; its prompt is drawn again": (
        "stuck, and there was nothing of it yet; its prompt is retried"
    ),
}
EVENTS = {"GroupDrawn": "GroupCreated"}
COMMANDS = {"Draw": "RequestPrompts", "Redraw": "RetryPrompt", "Conclude": "FinishEarly"}
ROLLOUT = {"max_running": "max_num_seqs"}
SINCE = {"Route": "version", "Evaluate": "suite", "Train": "parts"}
THEN = {"batch_order": "finished", "accumulate_early": False}
"""What there was no choice of."""
LATER = {"CloseEnvironments", "Accumulate"}
"""No run had turns then, nor a learner that begins before its batch is complete."""


def lines(path: Path) -> Iterator[Any]:
    with gzip.open(path, "rt") as file:
        for line in file:
            yield json.loads(line)


def renamed(values: dict[str, Any], names: dict[str, str]) -> dict[str, Any]:
    return {
        names.get(name, name): VALUES.get(value, value) if isinstance(value, str) else value
        for name, value in values.items()
    }


def config_of(head: dict[str, Any]) -> Config:
    assert head["schema"] == 5
    sections = {name: head[name] for name in ("learner", "run", "data")}
    values = {
        **sections,
        "rollout": renamed(head["rollout"], ROLLOUT),
        "schedule": renamed(head["schedule"], {}) | THEN,
    }
    return config_from_json(json.dumps(values), where="the log")


def command_of(name: str, fields: dict[str, Any]) -> tuple[str, str]:
    """Its name, and its fields as JSON, which knows no tuples."""
    return COMMANDS.get(name, name), json.dumps(renamed(fields, {}), sort_keys=True)


def as_recorded(command: commands.Command) -> dict[str, Any]:
    """Its fields, as far as there were such then."""
    later = SINCE.get(type(command).__name__)
    return {name: x for name, x in dataclasses.asdict(command).items() if name != later}


def event_of(kind: str, body: dict[str, Any]) -> events.Event:
    return codec.decode(EVENTS.get(kind, kind), json.dumps(renamed(body, FIELDS.get(kind, {}))))


def recorded(path: Path) -> tuple[Config, list[events.Event]]:
    """The configuration and the events of a log."""
    head, *steps = lines(path)
    return config_of(head), [event_of(kind, body) for kind, body, _ in steps]


@pytest.mark.parametrize("path", LOGS, ids=lambda path: path.name.split(".")[0])
def test_a_recorded_log_gives_the_commands_that_it_gave(path: Path) -> None:
    head, *steps = lines(path)
    config = config_of(head)
    schedule = dataclasses.replace(build.schedule(config), pulls_to_evaluate=False)
    coordinator = Coordinator(build.plan(config), schedule)
    kinds = set()
    for number, (kind, body, given) in enumerate(steps):
        event = event_of(kind, body)
        found = [
            command_of(type(command).__name__, as_recorded(command))
            for command in coordinator.handle(event)
        ]
        assert found == [command_of(*command) for command in given], f"line {number + 2}: {event}"
        kinds |= {name for name, _ in found}
    assert coordinator.state.finished
    assert kinds >= {"RequestPrompts", "Route", "Train", "Pull", "Evaluate", "Finish"}


def test_every_command_is_in_some_log() -> None:
    given = {
        COMMANDS.get(name, name)
        for path in LOGS
        for _, _, commanded in list(lines(path))[1:]
        for name, _ in commanded
    }
    known = {kind.__name__ for kind in commands.Command.__args__}
    assert given == known - LATER
