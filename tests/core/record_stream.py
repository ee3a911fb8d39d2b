"""Record the events and commands of a run as a stream for `test_streams.py`.

    python -m tests.core.record_stream RUN_DIR OUT.jsonl.gz "what the run was"
    python -m tests.core.record_stream --fake SCHEDULE SEED SECTION.FIELD=VALUE ... -- OUT ABOUT

The first takes the log of any run: a real one, a simulated one. The second carries a fake run
through its faults. The coordinator has to give the log's commands again, else nothing is written.

A stream is JSON, a line each: the header; `{"plan", "schedule"}` where an attempt begins; and for
each event `[event, commands, predictions]`. Events and commands are a kind and the values of its
fields, which the header names; predictions are what was asked about lengths upon the event.
"""

from __future__ import annotations

import dataclasses
import gzip
import json
import random
import sys
import tempfile
from collections import Counter
from collections.abc import Iterator
from contextlib import closing
from functools import partial
from itertools import groupby
from pathlib import Path
from typing import Any, get_args

import msgspec

from rhymeflow import build
from rhymeflow.config import Config
from rhymeflow.core.commands import Command
from rhymeflow.core.coordinator import Coordinator
from rhymeflow.core.events import Event
from rhymeflow.core.lengths import LengthPredictor
from rhymeflow.core.plan import Schedule
from rhymeflow.store.previous_run import config_of
from rhymeflow.store.reader import TrajectoryReader
from rhymeflow.store.schema import EVENTS
from tests.fake_run import run
from tests.fake_run.world import World


class Asked:
    """A length predictor that notes its answers."""

    def __init__(self, lengths: LengthPredictor) -> None:
        self._lengths = lengths
        self.answers: dict[str, float] = {}

    def __getattr__(self, name: str) -> Any:
        return getattr(self._lengths, name)

    def __getstate__(self) -> dict[str, Any]:
        return self._lengths.__getstate__()

    def _note(self, *question: Any, answer: float) -> float:
        self.answers[json.dumps(question)] = answer
        return answer

    @property
    def explained_variance(self) -> float:
        return self._note("explained_variance", answer=self._lengths.explained_variance)

    def expected(self, group: int) -> float:
        return self._note("expected", group, answer=self._lengths.expected(group))

    def remaining(self, trajectory: Any) -> float:
        return self._note("remaining", trajectory, answer=self._lengths.remaining(trajectory))

    def quantile(self, group: int, q: float) -> float:
        return self._note("quantile", group, q, answer=self._lengths.quantile(group, q))


def plain(value: Any) -> Any:
    """As JSON has it."""
    return json.loads(msgspec.json.encode(value))


def row(item: Event | Command) -> list[Any]:
    """A kind and its values."""
    fields = dataclasses.fields(item)
    return [type(item).__name__, *(plain(getattr(item, field.name)) for field in fields)]


def kinds(union: Any) -> dict[str, list[str]]:
    """The fields of each kind."""
    return {k.__name__: [field.name for field in dataclasses.fields(k)] for k in get_args(union)}


def rules(schedule: Schedule) -> dict[str, Any]:
    """A schedule as plain data: its rules by name."""
    values = {field.name: getattr(schedule, field.name) for field in dataclasses.fields(schedule)}
    for name in ("routing", "sync", "migration"):
        values[name] = values[name].__name__
    layout = values["layout"]
    values["layout"] = layout.keywords if isinstance(layout, partial) else None
    return plain(values)


def attempt(config: Config) -> dict[str, Any]:
    """What the coordinator is made of."""
    return {"plan": plain(build.plan(config)), "schedule": rules(build.schedule(config))}


def replayed(path: Path) -> Iterator[Any]:
    """The lines of a log, but for the header."""
    with closing(TrajectoryReader(path)) as reader:
        begins = {each.first_event: config_of(each, path) for each in reader.attempts()}
        stored = groupby(reader.commands_after(0), key=lambda recorded: recorded.event)
        logged = {event: [each.command for each in found] for event, found in stored}
        coordinator, asked = None, None
        for seq, _, event in reader.events(1):
            if config := begins.get(seq):
                yield attempt(config)
                build_args = build.plan(config), build.schedule(config)
                if coordinator is None:
                    coordinator = Coordinator(*build_args)
                    asked = coordinator.state.lengths = Asked(coordinator.state.lengths)
                else:
                    coordinator.reconfigure(*build_args)
            asked.answers = {}
            given, known = coordinator.handle(event), logged.get(seq, [])
            assert given[: len(known)] == known, f"event {seq}: {known} logged, {given} given"
            yield [row(event), [*map(row, given)], asked.answers]


def write(path: Path, out: Path, about: str) -> None:
    """Write the stream of a log."""
    lines = list(replayed(path))
    rows = [line for line in lines if isinstance(line, list)]
    head = {"about": about, "events": kinds(Event), "commands": kinds(Command)}
    text = "".join(json.dumps(line, separators=(",", ":")) + "\n" for line in [head, *lines])
    out.write_bytes(gzip.compress(text.encode(), 9, mtime=0))
    given = Counter(command[0] for _, commands, _ in rows for command in commands)
    print(f"{out}: {out.stat().st_size} bytes, {len(rows)} events, {dict(given)}")


def fake(schedule: str, seed: str, *settings: str) -> Path:
    """Carry a fake run through its faults; return its directory."""
    draw = random.Random(f"{seed} {schedule}")
    config = run.configuration(draw, schedule).model_dump()
    for setting in settings:
        name, _, value = setting.partition("=")
        section, field = name.split(".", 1)
        config[section][field] = json.loads(value)
    config = Config.model_validate(config)
    world = World(draw.getrandbits(64), draw.randint(*run.NUM_FAULTS), draw.uniform(*run.OFTEN))
    directory = Path(tempfile.mkdtemp())
    carried = run.FakeRun(world, directory, config, run.rates(draw), None)
    with run.adapted(100):
        carried.carry_through()
    print(dict(world.counts))
    return carried.path


def main(arguments: list[str]) -> None:
    """Record one stream."""
    if arguments[0] == "--fake":
        end = arguments.index("--")
        directory, (out, about) = fake(*arguments[1:end]), arguments[end + 1 :]
    else:
        where, out, about = arguments
        directory = Path(where)
    write(directory / EVENTS, Path(out), about)


if __name__ == "__main__":
    main(sys.argv[1:])
