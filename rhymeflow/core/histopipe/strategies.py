"""HistoPipe's routing and migration, by the layout of each step."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence

from rhymeflow.core.histopipe.pipeline import Pipeline
from rhymeflow.core.strategies.base import (
    Assignment,
    FleetView,
    InstanceView,
    Migration,
    TrajectoryView,
    fits,
)
from rhymeflow.core.strategies.routing import fewest_requests
from rhymeflow.core.types import InstanceId

LAST_SHARE = 0.1
"""Of an instance's responses: those among the last of them may be outliers (RhymeRL)."""
OUTLIER_RATIO = 1.5
"""Times the tokens that its prompt's history predicted, from which a response is an outlier."""


def planned(view: FleetView) -> list[Assignment]:
    """Each to the place its layout says, once that instance has come to its step.

    On an instance the earliest step goes first, then what was begun before, then the longest.
    """
    pipeline = view.layout
    if not isinstance(pipeline, Pipeline):
        return fewest_requests(view)
    able = {x.name: x for x in view.instances if x.has_room() and not x.waiting}
    if view.lowest_waiting is None:  # all that waits is of the last step, or not laid out
        steps = {name: pipeline.step(x.assigned) for name, x in able.items()}
        able = {n: x for n, x in able.items() if steps[n] in (None, pipeline.num_steps - 1)}
    if not able:
        return []
    waiting: dict[InstanceId, list[_Waiting]] = {}
    for number, trajectory in enumerate(view.queue):
        place = pipeline.place(trajectory.id)
        if place is None or place[1] not in able:
            continue
        step, name = place
        if able[name].version >= trajectory.min_version:
            length = view.lengths.expected(trajectory.id.group)
            is_new = trajectory.version is None
            waiting.setdefault(name, []).append((step, is_new, -length, number, trajectory))
    proposals: list[Assignment] = []
    for name, found in waiting.items():
        found.sort()
        proposals += _started(able[name], found, pipeline)
    return proposals


_Waiting = tuple[int, bool, float, int, TrajectoryView]
"""Step, whether it is new, minus the expected length, and its number in the queue."""


def _started(
    instance: InstanceView, found: Sequence[_Waiting], pipeline: Pipeline
) -> Iterator[Assignment]:
    """What this instance begins now, of what waits for it in order."""
    current = pipeline.step(instance.assigned)
    if current is None:
        current = found[0][0]
    count, kv_tokens = len(instance.assigned), instance.kv_tokens
    for step, *_, trajectory in found:
        if step > current or count == instance.capacity:
            return
        if count and not fits(kv_tokens, trajectory.tokens, instance):
            return
        count, kv_tokens = count + 1, kv_tokens + trajectory.tokens
        yield Assignment(trajectory.id, instance.name)


def migrate_outliers(view: FleetView) -> Iterator[Migration]:
    """Move what keeps an instance from its next share (RhymeRL, HistoPipe, tier 2).

    An outlier is among the last tenth of its instance's share and has `OUTLIER_RATIO` times the
    tokens that its prompt's history predicted. It goes to an instance that has longer to go, of
    those that are as fresh the one with the fewest responses; if there is none, it
    continues where it is, with the next step. Each moves once.
    """
    pipeline = view.layout
    if not isinstance(pipeline, Pipeline) or view.lengths.explained_variance <= 0:
        return
    counts = {x.name: len(x.assigned) for x in view.instances}
    for instance in view.instances:
        share = pipeline.share(instance.name)
        if not share or len(instance.assigned) > LAST_SHARE * view.settings.group_size * share:
            continue
        for trajectory in instance.assigned:
            if pipeline.place(trajectory) is None or pipeline.has_moved(trajectory):
                continue
            generated = view.lengths.generated(trajectory)
            if generated <= OUTLIER_RATIO * view.lengths.expected(trajectory.group):
                continue
            target = _longer(view, counts, instance, view.lengths.remaining(trajectory))
            if target is None:
                yield Migration(instance.name, (trajectory,), instance.name, later=True)
            else:
                counts[target] += 1
                yield Migration(instance.name, (trajectory,), target)


def _longer(
    view: FleetView, counts: Mapping[InstanceId, int], giver: InstanceView, remaining: float
) -> InstanceId | None:
    """The instance with the fewest responses, of those that go on for longer than this."""
    able = []
    for place, other in enumerate(view.instances):
        if other.name == giver.name or not other.has_room() or other.version < giver.version:
            continue
        if len(other.assigned) <= len(giver.assigned):
            continue  # it would be kept from its next share in turn
        if any(view.lengths.remaining(trajectory) > remaining for trajectory in other.assigned):
            able.append((counts[other.name], place, other.name))
    return min(able)[-1] if able else None
