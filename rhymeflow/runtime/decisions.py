"""The decisions that a log holds, in the place of the strategies that made them.

Where a strategy decides otherwise than it did (newer code, a function of the user's that was
edited), the past stays what it was: what was routed, pulled and interrupted in each tick is
proposed once more, as the log has it. Everything else follows from the events, so the state is what
it was, and the staleness protocol checks each proposal as it checked the strategy's.

Holds true: nothing is proposed that the log does not have. What the log does not say is where a
layout wanted what it moved: that goes back to its first place. Knows nothing of files.
"""

from __future__ import annotations

import sys
from collections.abc import Iterable, Sequence
from dataclasses import replace

from rhymeflow.core.commands import Command, Interrupt, Pull, Route
from rhymeflow.core.histopipe.pipeline import Pipeline
from rhymeflow.core.plan import Schedule
from rhymeflow.core.strategies.base import Assignment, FleetView, InstanceView, Migration


class LoggedDecisions:
    """Proposes the commands that were given upon one event; see `upon`."""

    def __init__(self) -> None:
        self._commands: Sequence[Command] = ()

    def upon(self, commands: Sequence[Command]) -> None:
        """These were given upon the event that is handled next."""
        self._commands = commands

    def in_place_of(self, schedule: Schedule) -> Schedule:
        """The schedule, with the log's decisions instead of its strategies."""
        return replace(
            schedule,
            routing=self._routing,
            sync=self._sync,
            migration=self._migration,
            pulls_to_evaluate=False,  # those are among the log's pulls
            max_interrupts=sys.maxsize,  # the log has what one tick did, whatever the limit was
        )

    def _routing(self, view: FleetView) -> Iterable[Assignment]:
        routes = [command for command in self._commands if isinstance(command, Route)]
        layout = view.layout
        for group in dict.fromkeys(route.trajectory.group for route in routes):
            # Strategies that read the layout pass over what is not in it.
            if isinstance(layout, Pipeline) and group not in layout:
                layout.join(group, [instance.name for instance in view.instances])
        return [Assignment(route.trajectory, route.instance) for route in routes]

    def _sync(self, instance: InstanceView, view: FleetView) -> bool:
        return any(isinstance(c, Pull) and c.instance == instance.name for c in self._commands)

    def _migration(self, view: FleetView) -> Iterable[Migration]:
        # What was interrupted for another reason is gone by now, and passed over.
        interrupts = [command for command in self._commands if isinstance(command, Interrupt)]
        return [Migration(each.instance, each.trajectories) for each in interrupts]
