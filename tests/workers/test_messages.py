"""Commands as messages, and messages over the wire."""

from __future__ import annotations

import multiprocessing

from rhymeflow.core import commands
from rhymeflow.core.types import TrajectoryId
from rhymeflow.runtime.commands import message_for
from rhymeflow.workers import messages
from rhymeflow.workers.messages import receive, send

SOME = (TrajectoryId(3, 0), TrajectoryId(4, 2))
COMMANDS = {
    commands.Interrupt("a", 1, SOME): messages.Interrupt(1, SOME),
    commands.Abort("a", 2, SOME): messages.Abort(2, SOME),
    commands.Pull("a", 3, 7): messages.Pull(3, 7),
}


def test_a_command_arrives_as_it_was_given():
    ours, theirs = multiprocessing.Pipe()
    for command, expected in COMMANDS.items():
        send(ours, message_for(command, None))
        heard = receive(theirs)
        assert heard == expected
        assert type(heard) is type(expected)
        assert type(heard).__name__ == type(command).__name__, "one vocabulary"
        if command.number != 3:
            assert all(type(t) is TrajectoryId for t in heard.trajectories)
