"""A command of the coordinator as the message that carries it, with the data an instance needs.

Holds true: a response is sent with all that is stored of it, whichever instance generated it.
Decides nothing.
"""

from __future__ import annotations

from rhymeflow.core import commands
from rhymeflow.core.types import TrajectoryId
from rhymeflow.runtime.in_flight import InFlight
from rhymeflow.workers import messages


def route(trajectory: TrajectoryId, in_flight: InFlight, number: int = 0) -> messages.Route:
    """Return the message that has an instance go on with a response."""
    group, tokens = in_flight[trajectory.group], in_flight.tokens(trajectory)
    turns = in_flight.turns(trajectory)
    return messages.Route(
        number,
        trajectory,
        group.prompt.row,
        group.epoch,
        group.prompt_ids,
        tokens,
        turn=len(turns) + 1,
        turn_start=turns[-1][1] if turns else 0,
        suite=group.suite,
    )


def message_for(command: commands.InstanceCommand, in_flight: InFlight) -> messages.Message:
    """Return the message for the instance."""
    number = command.number
    match command:
        case commands.Route(trajectory=trajectory):
            return route(trajectory, in_flight, number)
        case commands.Interrupt(trajectories=trajectories):
            return messages.Interrupt(number, trajectories)
        case commands.Abort(trajectories=trajectories):
            return messages.Abort(number, trajectories)
        case commands.Pull(version=version):
            return messages.Pull(number, version)
        case commands.Evaluate():
            return messages.Evaluate(number)
    raise AssertionError(f"unexpected command {command}")
