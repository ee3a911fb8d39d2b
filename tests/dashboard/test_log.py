"""The log, chosen by what people ask for: the same as by hand, and as by the SQL that is shown."""

import json
import sqlite3
from contextlib import closing
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from rhymeflow.core.commands import Abort, Command, Drop, Interrupt, Route, Train
from rhymeflow.core.events import (
    Event,
    GroupCreated,
    InstanceJoined,
    InstanceLeft,
    Tick,
    TrajectoryRewarded,
    VersionPublished,
)
from rhymeflow.core.types import TrajectoryId
from rhymeflow.dashboard import log
from rhymeflow.dashboard.log import LogQuery, listed
from rhymeflow.dashboard.run import Run
from rhymeflow.store.writer import SqliteTrajectoryStore

IDS = st.integers(0, 3)
INSTANCES = st.sampled_from(["rollout-0", "rollout-1"])
TRAJECTORIES = st.builds(TrajectoryId, IDS, IDS)
SOME = st.lists(TRAJECTORIES, max_size=3).map(tuple)
EVENTS = st.one_of(
    st.just(Tick()),
    st.builds(GroupCreated, IDS, IDS, IDS, IDS),
    st.builds(InstanceJoined, INSTANCES, IDS, IDS, IDS),
    st.builds(InstanceLeft, INSTANCES, st.sampled_from(["it's gone", "Hangs"])),
    st.builds(TrajectoryRewarded, TRAJECTORIES, st.sampled_from([0.5, 1.0])),
    st.builds(VersionPublished, IDS),
)
COMMANDS = st.one_of(
    st.builds(Route, INSTANCES, IDS, TRAJECTORIES, IDS),
    st.builds(Interrupt, INSTANCES, IDS, SOME),
    st.builds(Abort, INSTANCES, IDS, SOME),
    st.builds(Train, IDS, st.lists(IDS, max_size=3).map(tuple), st.just(())),
    st.builds(Drop, IDS, st.just("aborted"), st.just("it's gone")),
)
LOGS = st.lists(st.tuples(EVENTS, st.lists(COMMANDS, max_size=3)), max_size=12)
QUESTIONS = st.builds(
    LogQuery,
    kind=st.sampled_from(["", "", "Route", "Tick", "Train", "Abort", "InstanceLeft"]),
    group=st.none() | IDS,
    instance=st.sampled_from(["", "", "rollout-1"]),
    text=st.sampled_from(["", "", "it's", "hangs", "[2", "\0"]),
    time=st.none() | st.integers(0, 30).map(float),
    after=st.none(),
)


def write(path: Path, lines: list[tuple[Event, list[Command]]], *, first: int = 0) -> None:
    store = SqliteTrajectoryStore(path)
    for i, (event, commands) in enumerate(lines, start=first):
        seq = store.record(2.0 * i, [event])
        for command in commands:
            store.record_command(seq, command)
        store.commit()
    store.close()


def paged(run: Run, asked: LogQuery) -> list[tuple[int, bool, int, float, str]]:
    """All rows, page by page."""
    names, found = ("event", "command", "number", "time", "kind"), []
    while True:
        answer = listed(run, asked)
        found += [tuple(each[name] for name in names) for each in answer["rows"]]
        if answer["after"] is None:
            return found
        asked = asked._replace(after=tuple(answer["after"]))


def rows_of(path: Path, asked: LogQuery) -> list[tuple[Any, ...]]:
    """What the SQL of the question finds."""
    with closing(sqlite3.connect(path)) as connection:
        return connection.execute(log.sql(asked)).fetchall()


def fits(asked: LogQuery, time: float, kind: str, body: str) -> bool:
    fields = json.loads(body)
    groups = {fields.get("trajectory", [None])[0], fields.get("group"), *fields.get("groups", [])}
    groups |= {group for group, _ in fields.get("trajectories", [])}
    return (
        asked.kind in ("", kind)
        and asked.instance in ("", fields.get("instance"))
        and (asked.group is None or asked.group in groups)
        and asked.text.lower() in body.lower()
        and (asked.time is None or time >= asked.time)
    )


@settings(max_examples=60, deadline=None)
@given(LOGS, LOGS, st.lists(QUESTIONS, min_size=1, max_size=6), st.integers(1, 5))
def test_the_same_as_by_hand_and_by_sql(tmp_path_factory, lines, more, questions, size):
    run_dir, run = tmp_path_factory.mktemp("run"), None
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(log, "PAGE", size)
        patch.setattr(log, "LOOKED_AT", size)
        for first, part in ((0, lines), (len(lines), more)):
            write(run_dir / "events.db", part, first=first)
            run = run or Run(run_dir, "a")  # the same one finds what is new
            for asked in questions:
                known = listed(run, LogQuery())
                if asked.kind not in ("", *known["kinds"]):
                    asked = asked._replace(kind="")
                if asked.instance not in ("", *known["instances"]):
                    asked = asked._replace(instance="")
                rows = rows_of(run.store, LogQuery())
                expected = [row for row in rows if fits(asked, *row[3:])]
                assert rows_of(run.store, asked) == expected, asked
                assert expected == sorted(expected, reverse=True)
                shown = [(seq, bool(is_command), *rest) for seq, is_command, *rest, _ in expected]
                assert paged(run, asked) == shown, asked


def test_no_answer_looks_at_many_lines(tmp_path, monkeypatch):
    """What is rare among much is found page by page, and no page goes through all."""
    monkeypatch.setattr(log, "LOOKED_AT", 10)
    lines: Any = [(TrajectoryRewarded(TrajectoryId(i, 0), 0.5), [Drop(i, "aborted", "x")])
                  for i in range(40)]  # fmt: skip
    write(tmp_path / "events.db", [*lines, (InstanceLeft("rollout-0", "gone"), [])])
    run = Run(tmp_path, "a")
    for asked in (LogQuery(text="[0,0]"), LogQuery(kind="TrajectoryRewarded", text="[0,0]")):
        pages = [listed(run, asked)]
        while (after := pages[-1]["after"]) is not None:
            pages.append(listed(run, asked._replace(after=after)))
        (row,) = [row for page in pages for row in page["rows"]]
        assert row["body"]["trajectory"] == [0, 0]
        assert len(pages) >= 40 / 10
