"""Commands, events and messages over the wire."""

from __future__ import annotations

import multiprocessing

import pytest

from rhymeflow.core import commands, events
from rhymeflow.core.types import TrajectoryId
from rhymeflow.histospec.draft import DraftStats
from rhymeflow.weights.base import SharedMemoryWeightHandle
from rhymeflow.workers.messages import (
    Alive,
    Carried,
    Continuation,
    Model,
    Publication,
    Status,
    receive,
    send,
)

FIRST, OTHER = TrajectoryId(3, 0), TrajectoryId(-4, 2)
HANDLE = SharedMemoryWeightHandle("name", ())
SENT = [
    Alive(3),
    commands.Abort("a", 2, (FIRST, OTHER)),
    commands.Train(4, (3, 5), ((0, 1), (2,)), (1,)),
    events.TurnEnded(FIRST, "a", 2, 7),
    Carried(commands.Route("a", 1, OTHER, 5), Continuation(0, 1, [2, 3], [4], 2, 1, "math")),
    Carried(events.Pulled("a", 3, 7, "ff"), 0.5),
    Carried(
        events.Snapshot("a", 4, (FIRST,), 9, 2.5), Status(1, 1, 12, 0.25, DraftStats(drafted=3))
    ),
    Carried(events.LearnerReady(0, "ff"), Model(HANDLE, "cpu", "float32", 64, 10)),
    Carried(events.VersionPublished(1, "ff", (0,), "nan"), Publication(0.1, {"params/x": 1.0})),
]


@pytest.mark.parametrize("sent", SENT)
def test_what_is_sent_arrives_as_it_was(sent: object) -> None:
    ours, theirs = multiprocessing.Pipe()
    send(ours, sent)
    heard = receive(theirs)
    assert heard == sent
    assert type(heard) is type(sent)
    if isinstance(heard, commands.Abort):
        assert all(type(each) is TrajectoryId for each in heard.trajectories)
