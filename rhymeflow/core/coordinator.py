"""The coordinator: events in, commands out.

The same events give the same commands. An event changes the state and returns only its immediate
commands (`handlers.py`); everything else is planned on `Tick` (`planner.py`), once for all events
of a round: the snapshot-command cycle of StaleFlow (arXiv 2601.12784)."""

from __future__ import annotations

from rhymeflow.core import planner
from rhymeflow.core.commands import Command
from rhymeflow.core.events import Event, Tick
from rhymeflow.core.handlers import HANDLERS
from rhymeflow.core.plan import Plan, Schedule
from rhymeflow.core.state import State


class Coordinator:
    """The deterministic state machine that schedules a run."""

    def __init__(self, plan: Plan, schedule: Schedule) -> None:
        self.state = State(plan, schedule)

    def reconfigure(self, plan: Plan, schedule: Schedule) -> None:
        """Begin another attempt at the run; see `State.reconfigure`."""
        self.state.reconfigure(plan, schedule)

    def handle(self, event: Event) -> list[Command]:
        """Process one event; return the commands to carry out, in order."""
        if isinstance(event, Tick):
            return list(planner.plan(self.state))
        return list(HANDLERS[type(event)](self.state, event) or ())
