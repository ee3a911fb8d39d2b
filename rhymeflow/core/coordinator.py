"""The mind: facts in, intents out.

    commands = coordinator.handle(event, now)

Holds true: deterministic (the same events give the same commands); plans on what it has already
commanded, so nothing is planned twice; every admitted group ends in exactly one of consumed,
filtered or aborted-with-reason (law 2); a fact about something that has ended changes nothing.

Facts change the books, and only what follows from them at once is commanded with them (`facts.py`).
Everything else is planned on `Tick` (`planner.py`), once for all facts of a round: this is the
snapshot-command cycle of StaleFlow (arXiv 2601.12784, section on the rollout coordinator).

Knows no clock (`now` is an argument), no torch, no network, no tokens.
"""

from __future__ import annotations

from rhymeflow.core import planner
from rhymeflow.core.books import Books
from rhymeflow.core.commands import Command
from rhymeflow.core.events import Event, Tick
from rhymeflow.core.facts import TABLE
from rhymeflow.core.plan import Plan, Schedule
from rhymeflow.core.types import Version


class Coordinator:
    """The deterministic state machine that decides everything."""

    def __init__(self, plan: Plan, schedule: Schedule) -> None:
        self.books = Books(plan, schedule)

    @property
    def published(self) -> Version | None:
        """The newest version in the parameter server; None before there is one."""
        return self.books.published

    @property
    def training(self) -> Version | None:
        """The batch being trained on."""
        return self.books.training

    @property
    def finished(self) -> bool:
        """Whether the run is complete."""
        return self.books.finished

    def handle(self, event: Event, now: float) -> list[Command]:
        """Take in one fact; return what is to be done. `now` is in seconds since any origin."""
        if isinstance(event, Tick):
            return list(planner.plan(self.books))
        return list(TABLE[type(event)](self.books, event))
