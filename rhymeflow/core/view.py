"""The state as strategies see it.

Holds true: a view is read from the speculative state while it is looked at, and changes nothing.
"""

from __future__ import annotations

from collections.abc import Iterator

from rhymeflow.core.state import State
from rhymeflow.core.strategies.base import FleetView, InstanceView, TrajectoryView
from rhymeflow.core.types import TrajectoryId, Version


def view_of(state: State) -> FleetView:
    """What strategies are shown now."""
    assert state.published is not None
    instances = _instances(state)
    admissible: frozenset[Version] = frozenset()
    if state.queue.unadmitted:
        versions = {i.version for i in instances if i.accepts}
        admissible = frozenset(v for v in versions if state.admits(v))
    waiting = [state.min_version(group) for group in state.queue.new_groups()]
    lowest = state.queue.lowest_version()
    if lowest is not None:
        waiting.append(lowest)
    return FleetView(
        published=state.published,
        instances=instances,
        queue=_Queue(state, admissible),
        lowest_waiting=min(waiting, default=None),
        num_returning=sum(len(i.stopping) for i in state.instances.values()),
        admissible=admissible,
        settings=state.schedule.settings,
        lengths=state.lengths,
        layout=state.layout,
        memo=state.memo,
    )


def _instances(state: State) -> tuple[InstanceView, ...]:
    """Most have not changed since they were last shown: no call for each, for they are many."""
    every = state.instances.values()
    if state.all_accept:
        return tuple([i.shown or i.view(accepts=True) for i in every])
    return tuple([i.view(accepts=state.accepts(i)) for i in every])


class _Queue:
    """What waits to be routed, read from the state while it is iterated over."""

    def __init__(self, state: State, admissible: frozenset[Version]) -> None:
        self._state, self._admissible = state, admissible

    def __iter__(self) -> Iterator[TrajectoryView]:
        state = self._state
        for version, trajectory in state.queue.partial():
            group = state.groups[trajectory.group]
            member = group.members[trajectory.member]
            tokens = group.prompt_tokens + member.length
            yield TrajectoryView(trajectory, version, version, tokens, state.home(member))
        for trajectory in state.queue.new():
            tokens = state.groups[trajectory.group].prompt_tokens
            yield TrajectoryView(trajectory, None, state.min_version(trajectory.group), tokens)
        if self._admissible:
            yield from self._unadmitted(min(self._admissible))

    def _unadmitted(self, min_version: Version) -> Iterator[TrajectoryView]:
        state = self._state
        size = state.plan.num_generations + state.plan.extra_generations
        for _, group_id in zip(range(state.room()), state.queue.unadmitted, strict=False):
            for member in range(size):
                tokens = state.prompts[group_id].tokens
                yield TrajectoryView(TrajectoryId(group_id, member), None, min_version, tokens)
