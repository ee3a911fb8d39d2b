"""The coordinator gives the commands of recorded runs for their events, one by one.

The streams are of real, fake and simulated runs. Lengths are predicted as they
were then, so that a change of the predictor is no difference."""

import dataclasses
import gzip
import json
from collections.abc import Iterator
from functools import partial
from pathlib import Path
from typing import Any

import msgspec
import pytest

from rhymeflow.core import commands, events
from rhymeflow.core.coordinator import Coordinator
from rhymeflow.core.cost import CostModel
from rhymeflow.core.histopipe import strategies as outliers
from rhymeflow.core.histopipe.pipeline import Pipeline
from rhymeflow.core.plan import Plan, Schedule
from rhymeflow.core.strategies.base import NoLayout, Settings
from rhymeflow.core.strategies.schedules import MIGRATION, ROUTING, SCHEDULES, SYNC
from tests.core import invariants

STREAMS = sorted((Path(__file__).parent / "streams").glob("*.jsonl.gz"))

GONE = {
    "layout": {"alternate_order", "balance_instances"},
    "schedule": {"name", "max_interrupts", "pulls_to_evaluate"},
    "settings": {"routing_gain", "kv_headroom", "max_waiting", "outlier_ratio"},
}
"""By recorded kind, or `plan`, `schedule`, `settings`, `cost`, `layout`: fields that are gone."""
NEW = {"TurnEnded": {"observed"}}
"""Fields that came since, which have a default."""

Row = list[Any]


def today(kind: str, recorded: dict[str, Any]) -> dict[str, Any]:
    """The fields that there still are."""
    return {name: x for name, x in recorded.items() if name not in GONE.get(kind, ())}


class Stream:
    """A recorded run."""

    def __init__(self, path: Path) -> None:
        with gzip.open(path, "rt") as file:
            self.head, *self.lines = map(json.loads, file)

    def item(self, table: str, module: Any, row: Row) -> Any:
        """An event or a command."""
        kind, *values = row
        fields = today(kind, dict(zip(self.head[table][kind], values, strict=True)))
        return msgspec.convert(fields, getattr(module, kind))


def plan(recorded: dict[str, Any]) -> Plan:
    return Plan(**today("plan", recorded))


def schedule(recorded: dict[str, Any]) -> Schedule:
    values = today("schedule", recorded)
    settings = today("settings", values["settings"])
    cost = CostModel(**today("cost", settings["cost"]))
    rules = {"routing": ROUTING, "sync": SYNC, "migration": MIGRATION}
    layout = values["layout"] and today("layout", values["layout"])
    return Schedule(
        **values
        | {name: known[values[name]] for name, known in rules.items()}
        | {"settings": Settings(**settings | {"cost": cost})}
        | {"layout": NoLayout if layout is None else partial(Pipeline, **layout)}
    )


class Predictions:
    """Answers as recorded, whatever was learned; `upon` is told the answers of an event."""

    def __init__(self, lengths: Any) -> None:
        self._lengths, self._answers = lengths, dict[str, float]()

    def upon(self, answers: dict[str, float]) -> None:
        self._answers = answers

    def __getattr__(self, name: str) -> Any:
        return getattr(self._lengths, name)

    def _answer(self, *question: Any) -> float:
        return self._answers[json.dumps(question)]

    @property
    def explained_variance(self) -> float:
        return self._answer("explained_variance")

    def expected(self, group: int) -> float:
        return self._answer("expected", group)

    def remaining(self, trajectory: Any) -> float:
        return self._answer("remaining", trajectory)

    def quantile(self, group: int, q: float) -> float:
        return self._answer("quantile", group, q)


def differences(stream: Stream) -> Iterator[str]:
    """Where today's commands differ, with lengths predicted as recorded."""
    coordinator: Any = None
    for number, line in enumerate(stream.lines, start=1):
        if isinstance(line, dict):
            rules = plan(line["plan"]), schedule(line["schedule"])
            outliers.OUTLIER_RATIO = line["schedule"]["settings"]["outlier_ratio"]
            if coordinator is None:
                coordinator = Coordinator(*rules)
                coordinator.state.lengths = Predictions(coordinator.state.lengths)
            else:
                coordinator.reconfigure(*rules)
            continue
        coordinator.state.lengths.upon(line[2])
        event = stream.item("events", events, line[0])
        then = [stream.item("commands", commands, row) for row in line[1]]
        now = coordinator.handle(event)
        if number % 50 == 0:
            invariants.check(coordinator.state)
        if now != then:
            yield f"line {number}, {event}: {then} then, {now} now"


@pytest.mark.parametrize("path", STREAMS, ids=lambda path: path.name.partition(".")[0])
def test_the_events_of_recorded_runs_give_their_commands(path, monkeypatch):
    monkeypatch.setattr(outliers, "OUTLIER_RATIO", outliers.OUTLIER_RATIO)  # as recorded, then back
    assert next(differences(Stream(path)), None) is None


def test_the_streams_have_every_rule_event_and_command():
    rules, kinds = set[str](), set[str]()
    for path in STREAMS:
        for line in Stream(path).lines:
            if isinstance(line, dict):
                names = ("name", "routing", "sync", "migration")
                rules |= {line["schedule"][name] for name in names}
            else:
                kinds |= {row[0] for row in (line[0], *line[1])}

    assert rules == {*SCHEDULES, *ROUTING, *SYNC, *MIGRATION}
    assert kinds == {*Stream(STREAMS[0]).head["events"], *Stream(STREAMS[0]).head["commands"]}


def test_a_stream_names_all_fields_there_were():
    head = Stream(STREAMS[0]).head
    for table, module in (("events", events), ("commands", commands)):
        for kind, fields in head[table].items():
            found = {field.name for field in dataclasses.fields(getattr(module, kind))}
            assert found == {*today(kind, dict.fromkeys(fields)), *NEW.get(kind, ())}
