"""Resumes a run where its log ends.

Coordinator and store are as they were; workers are new. Responses of earlier instances continue
from their stored tokens, but an agent's programs are gone, so that their groups begin again.
Requests that were not answered are made again, and no others."""

from __future__ import annotations

from collections.abc import Iterator
from typing import NamedTuple

from rhymeflow.core.commands import Command, Drop, Train
from rhymeflow.core.coordinator import Coordinator
from rhymeflow.core.events import Event, InstanceLeft, ProgramLost, TrajectoryInterrupted
from rhymeflow.core.protocol.group import ABORTED, FINISHED, REWARDED, WAITING_ENV
from rhymeflow.core.types import GroupId, TrajectoryId
from rhymeflow.runtime.environments import Environments
from rhymeflow.runtime.in_flight import InFlight

REASON = "the run was interrupted, and resumed without it"

_OVER = (REWARDED, ABORTED)


class Past(NamedTuple):
    """The state of a run at the end of its log."""

    coordinator: Coordinator
    attempts: int = 0  # how many there were
    seconds: float = 0.0  # how long all attempts ran, without the time between them
    num_drawn: int = 0
    """Groups whose prompt was taken from the data; a retried prompt does not count."""
    unrecorded: tuple[tuple[int, Command], ...] = ()
    """Commands upon the last event that the log lacks, each with the number of that event."""
    training: Train | None = None  # the batch that is being trained on
    last_event: int = 0  # its number
    notes: tuple[str, ...] = ()  # warnings for the user about the replay


def restore(past: Past, in_flight: InFlight) -> None:
    """Restore the groups in flight. Raises `UserError` if the data has changed."""
    state = past.coordinator.state
    in_flight.begin_at(state.next_group, past.num_drawn, state.published or 0)
    aborted: dict[GroupId, list[int]] = {group: [] for group in (*state.prompts, *_ended(past))}
    for group_id, group in state.groups.items():
        aborted[group_id] = [i for i, m in enumerate(group.members) if m.state is ABORTED]
    in_flight.restore(aborted)


def ask_again(past: Past, in_flight: InFlight, environments: Environments) -> Iterator[Event]:
    """Repeat requests without a reply; yield the events of lost instances and of new groups."""
    state = past.coordinator.state
    for group_id in in_flight.suite_groups:
        for index in in_flight[group_id].reasons:
            environments.judge(TrajectoryId(group_id, index))
    for group_id, group in state.groups.items():
        begun = [i for i, m in enumerate(group.members) if m.turn and m.state not in _OVER]
        if environments.has_agent and begun:
            yield ProgramLost(TrajectoryId(group_id, begun[0]), REASON)
            continue
        for index, member in enumerate(group.members):
            trajectory = TrajectoryId(group_id, index)
            if member.turn:
                in_flight[group_id].turns_ended[index] = member.turn
            if member.state is WAITING_ENV:
                environments.turn_ended(trajectory)
            if member.state is FINISHED and index in in_flight[group_id].reasons:
                environments.judge(trajectory)
    yield from _departures(past, in_flight)
    for group_id in state.retries:
        yield from environments.request(in_flight.draw_again(group_id))
    for _ in range(state.num_requested - len(state.retries)):
        yield from environments.request(in_flight.draw())


def _departures(past: Past, in_flight: InFlight) -> Iterator[Event]:
    """For each instance, yield the interruptions of its responses and its departure."""
    state = past.coordinator.state
    for name, instance in state.instances.items():
        for trajectory in (*instance.assigned, *sorted(instance.stopping)):
            yield TrajectoryInterrupted(trajectory, name, 0, in_flight.seal(trajectory))
        yield InstanceLeft(name, REASON)


def _ended(past: Past) -> list[GroupId]:
    """Return the groups that have ended for the coordinator but not yet in the store."""
    groups: list[GroupId] = []
    for _, command in past.unrecorded:
        if isinstance(command, Drop):
            groups.append(command.group)
        elif isinstance(command, Train):
            groups += command.groups
    return groups
