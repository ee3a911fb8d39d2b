"""Taking a run up again where its log ends.

The coordinator is as it was (`replay.py`), and so is the store. Workers are new: instances of the
earlier attempt have left, and what they had continues elsewhere from the tokens that are stored.
Whatever had been asked for and not been answered is asked for again.

Holds true: a prompt that was drawn is drawn once, a response that is complete is not generated
again, and a reward or an answer that was reported is not asked for again. Knows nothing of
processes.
"""

from __future__ import annotations

from collections.abc import Iterator
from itertools import chain

from rhymeflow.core.commands import Drop, Train
from rhymeflow.core.events import Event, InstanceLeft, TrajectoryInterrupted
from rhymeflow.core.protocol.group import ABORTED, FINISHED, WAITING_ENV
from rhymeflow.core.types import GroupId, TrajectoryId
from rhymeflow.runtime.environments import Environments
from rhymeflow.runtime.evaluation import Evaluations
from rhymeflow.runtime.in_flight import InFlight
from rhymeflow.runtime.past import Past

REASON = "the run was interrupted, and resumed without it"


def take_up(
    past: Past, in_flight: InFlight, evaluations: Evaluations, environments: Environments
) -> list[Event]:
    """Bring back what was in flight; return what has happened since, as events.

    Raises:
        UserError: the data is not what it was.
    """
    state = past.coordinator.state
    in_flight.begin_at(state.next_group, past.num_drawn, state.published or 0)
    aborted: dict[GroupId, list[int]] = {group: [] for group in (*state.prompts, *_ended(past))}
    for group_id, group in state.groups.items():
        aborted[group_id] = [i for i, m in enumerate(group.members) if m.state is ABORTED]
    in_flight.restore(aborted)
    evaluations.restore()
    for group_id in in_flight.of_suites:
        for index in in_flight[group_id].reasons:
            environments.judge(TrajectoryId(group_id, index))
    for group_id, group in state.groups.items():
        for index, member in enumerate(group.members):
            trajectory = TrajectoryId(group_id, index)
            if member.turn:
                in_flight[group_id].turns_ended[index] = member.turn
            if member.state is WAITING_ENV:
                environments.turn_ended(trajectory)
            if member.state is FINISHED and index in in_flight[group_id].reasons:
                environments.judge(trajectory)
    plain = state.num_requested - len(state.retries)
    return [
        *_departures(past, in_flight),
        *chain.from_iterable(map(environments.retry, state.retries)),
        *chain.from_iterable(environments.request() for _ in range(plain)),
    ]


def _departures(past: Past, in_flight: InFlight) -> Iterator[Event]:
    """What a run says of instances that are gone: how much is stored of what each had, and that."""
    state = past.coordinator.state
    for name, instance in state.instances.items():
        for trajectory in (*instance.assigned, *sorted(instance.stopping)):
            yield TrajectoryInterrupted(trajectory, name, 0, in_flight.seal(trajectory))
        yield InstanceLeft(name, REASON)


def _ended(past: Past) -> list[GroupId]:
    """Groups that have ended for the coordinator and not yet in the store."""
    found: list[GroupId] = []
    for _, command in past.unrecorded:
        if isinstance(command, Drop):
            found.append(command.group)
        elif isinstance(command, Train):
            found += command.groups
    return found
