"""A command of the mind as the message that carries it to an instance, with the data it needs.

Holds true: a response is sent with all that is stored of it, whoever made it. Decides nothing.
"""

from __future__ import annotations

from rhymeflow.core import commands
from rhymeflow.runtime import messages
from rhymeflow.runtime.evaluation import Evaluations
from rhymeflow.runtime.underway import UnderWay


def message_for(
    command: commands.InstanceCommand, under_way: UnderWay, evaluations: Evaluations
) -> messages.Message:
    """Return what the instance is to be told."""
    number = command.number
    match command:
        case commands.Route(trajectory=trajectory):
            group, tokens = under_way[trajectory.group], under_way.tokens(trajectory)
            return messages.Produce(
                number, trajectory, group.prompt.row, group.epoch, group.prompt_ids, tokens
            )
        case commands.Interrupt(trajectories=trajectories):
            return messages.Halt(number, trajectories)
        case commands.Abort(trajectories=trajectories):
            return messages.Forget(number, trajectories)
        case commands.Pull(version=version):
            return messages.PullWeights(number, version)
        case commands.Hurry(trajectories=trajectories, urgency=urgency):
            return messages.Prefer(number, trajectories, urgency)
        case commands.Evaluate(version=version):
            return messages.Answer(number, version, evaluations.prompt_ids)
