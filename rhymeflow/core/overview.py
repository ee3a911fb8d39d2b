"""The books as strategies see them.

Holds true: a view shows the speculative state, the fleet as it will be once every command given so
far is carried out; it is read from the books while it is looked at, and changes nothing.
"""

from __future__ import annotations

from collections.abc import Iterator

from rhymeflow.core.books import Books
from rhymeflow.core.fleet import Instance
from rhymeflow.core.forecast import Forecast
from rhymeflow.core.strategies.view import FleetView, TrajectoryView
from rhymeflow.core.types import GroupId, TrajectoryId, Version


def accepts(books: Books, instance: Instance) -> bool:
    """Under `drain`, an instance that lags takes in nothing new; in lockstep, of the next batch."""
    schedule = books.schedule
    if schedule.on_pull != "drain" or schedule.admission == "lockstep":
        return True
    assert books.published is not None
    return instance.version >= books.published


def view(books: Books) -> FleetView:
    """What strategies are shown now."""
    assert books.published is not None
    instances = tuple(i.view(accepts=accepts(books, i)) for i in books.instances.values())
    admissible: frozenset[Version] = frozenset()
    if books.queue.drawn:
        versions = {i.version for i in instances if i.accepts}
        admissible = frozenset(v for v in versions if books.admits(v))
    waiting = [min_version(books, group) for group in books.queue.new_groups()]
    lowest = books.queue.lowest_version()
    if lowest is not None:
        waiting.append(lowest)
    return FleetView(
        published=books.published,
        instances=instances,
        queue=Waiting(books, admissible),
        lowest_waiting=min(waiting, default=None),
        num_returning=sum(len(i.stopping) for i in books.instances.values()),
        admissible=admissible,
        weights=books.schedule.weights,
        forecast=Forecast(books),
        gating=gating(books),
        layout=None if books.schedule.tiers is None else books.pipeline,
    )


def gating(books: Books) -> frozenset[GroupId]:
    """Groups whose batch is next, while nothing is trained on."""
    buffers = books.buffers
    if books.training is not None or buffers.first not in buffers.books():
        return frozenset()
    return frozenset(buffers.reserved_in(buffers.first))


def min_version(books: Books, group: GroupId) -> Version:
    """The lowest version at which a new member of an admitted group may start."""
    place = books.buffers.place(group)
    assert place is not None
    return max(0, place - books.plan.max_staleness)


class Waiting:
    """What waits to be routed, read from the books while it is iterated over."""

    def __init__(self, books: Books, admissible: frozenset[Version]) -> None:
        self._books, self._admissible = books, admissible

    def __iter__(self) -> Iterator[TrajectoryView]:
        books = self._books
        for version, trajectory in books.queue.partial():
            group = books.groups[trajectory.group]
            tokens = group.prompt_tokens + group.members[trajectory.member].length
            yield TrajectoryView(trajectory, version, version, tokens)
        for trajectory in books.queue.new():
            tokens = books.groups[trajectory.group].prompt_tokens
            yield TrajectoryView(trajectory, None, min_version(books, trajectory.group), tokens)
        yield from self._not_admitted()

    def _not_admitted(self) -> Iterator[TrajectoryView]:
        if not self._admissible:
            return
        books, lowest = self._books, min(self._admissible)
        room = books.buffers.num_empty()
        if books.schedule.admission == "lockstep":
            room = min(room, books.round_left)
        room = min(room, books.schedule.max_under_way - books.num_incomplete)
        size = books.plan.num_generations + books.plan.extra_generations
        for _, serial in zip(range(room), books.queue.drawn, strict=False):
            tokens, _ = books.prompts[serial]
            for member in range(size):
                yield TrajectoryView(TrajectoryId(serial, member), None, lowest, tokens)
