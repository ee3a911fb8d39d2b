"""A command of the coordinator as the message that carries it, with the data an instance needs.

Holds true: a response is sent with all that is stored of it, whichever instance generated it.
Decides nothing.
"""

from __future__ import annotations

from rhymeflow.core import commands
from rhymeflow.runtime.evaluation import Evaluations
from rhymeflow.runtime.in_flight import InFlight
from rhymeflow.workers import messages


def message_for(
    command: commands.InstanceCommand,
    in_flight: InFlight,
    evaluations: Evaluations,
) -> messages.Message:
    """Return the message for the instance."""
    number = command.number
    match command:
        case commands.Route(trajectory=trajectory):
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
            )
        case commands.Interrupt(trajectories=trajectories):
            return messages.Interrupt(number, trajectories)
        case commands.Abort(trajectories=trajectories):
            return messages.Abort(number, trajectories)
        case commands.Pull(version=version):
            return messages.Pull(number, version)
        case commands.Evaluate(version=version, suite=suite):
            known = evaluations.suites[suite]
            # Where environments open prompts, the answers are begun one by one (`openings.py`).
            opens = bool(known.suite.config.environment.classes)
            return messages.Evaluate(number, version, suite, [] if opens else known.prompt_ids)
    raise AssertionError(f"unexpected command {command}")
