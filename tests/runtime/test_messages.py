"""Commands as messages, and messages over the wire."""

from __future__ import annotations

import multiprocessing

from rhymeflow.core.commands import Abort, Hurry, Interrupt, Pull
from rhymeflow.core.types import TrajectoryId
from rhymeflow.runtime.commands import message_for
from rhymeflow.workers import messages

SOME = (TrajectoryId(3, 0), TrajectoryId(4, 2))
COMMANDS = {
    Interrupt("a", 1, SOME): messages.Interrupt(1, SOME),
    Abort("a", 2, SOME): messages.Abort(2, SOME),
    Pull("a", 3, 7): messages.Pull(3, 7),
    Hurry("a", 4, SOME, 2.5): messages.Prefer(4, SOME, 2.5),
    Hurry("a", 5, (), 4): messages.Prefer(5, (), 4.0),
}


def test_a_command_arrives_as_it_was_given():
    ours, theirs = multiprocessing.Pipe()
    for command, expected in COMMANDS.items():
        messages.send(ours, message_for(command, None, None))
        heard = messages.receive(theirs)
        assert heard == expected
        assert type(heard) is type(expected)
        if command.number != 3:
            assert all(type(t) is TrajectoryId for t in heard.trajectories)
