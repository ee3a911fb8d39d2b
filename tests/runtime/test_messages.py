"""Commands as messages, and messages over the wire."""

from __future__ import annotations

import multiprocessing

from rhymeflow.core.commands import Abort, Hurry, Interrupt, Pull
from rhymeflow.core.types import TrajectoryId
from rhymeflow.runtime.instructions import message_for
from rhymeflow.runtime.messages import Forget, Halt, Prefer, PullWeights, receive, send

SOME = (TrajectoryId(3, 0), TrajectoryId(4, 2))
COMMANDS = {
    Interrupt("a", 1, SOME): Halt(1, SOME),
    Abort("a", 2, SOME): Forget(2, SOME),
    Pull("a", 3, 7): PullWeights(3, 7),
    Hurry("a", 4, SOME, 2.5): Prefer(4, SOME, 2.5),
    Hurry("a", 5, (), 4): Prefer(5, (), 4.0),
}


def test_a_command_arrives_as_it_was_given():
    ours, theirs = multiprocessing.Pipe()
    for command, expected in COMMANDS.items():
        send(ours, message_for(command, None, None))
        heard = receive(theirs)
        assert heard == expected
        assert type(heard) is type(expected)
        if command.number != 3:
            assert all(type(t) is TrajectoryId for t in heard.trajectories)
