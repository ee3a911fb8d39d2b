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
"""Outliers are among the last of an instance's responses: at most this share of them (RhymeRL)."""
OUTLIER_RATIO = 1.5  # a response is an outlier above this multiple of its predicted length


def planned(view: FleetView) -> list[Assignment]:
    """Route each trajectory to its instance in the layout, once that instance has reached its step.
    On an instance the earliest step goes first, then interrupted trajectories, then the longest."""
    pipeline = view.layout
    if not isinstance(pipeline, Pipeline):
        return fewest_requests(view)
    able = {x.name: x for x in view.instances if x.has_room() and not x.waiting}
    if view.lowest_waiting is None:
        # Only unadmitted groups wait; they are of the last step, or not laid out yet.
        steps = {name: pipeline.step(x.assigned) for name, x in able.items()}
        able = {n: x for n, x in able.items() if steps[n] in (None, pipeline.num_steps - 1)}
    if not able:
        return []
    waiting: dict[InstanceId, list[_Waiting]] = {}
    for number, trajectory in enumerate(view.queue):
        place = pipeline.place(trajectory.id)
        if place is None or place.instance not in able:
            continue
        step, name = place
        if able[name].version >= trajectory.min_version:
            length = view.lengths.expected(trajectory.id.group)
            is_new = trajectory.version is None
            waiting.setdefault(name, []).append((step, is_new, -length, number, trajectory))
    proposals: list[Assignment] = []
    for name, candidates in waiting.items():
        candidates.sort()
        proposals += _assign_fitting(able[name], candidates, pipeline)
    return proposals


_Waiting = tuple[int, bool, float, int, TrajectoryView]
"""Sorts by: step, whether it is new, minus the expected length, number in the queue, trajectory."""


def _assign_fitting(
    instance: InstanceView, candidates: Sequence[_Waiting], pipeline: Pipeline
) -> Iterator[Assignment]:
    """Assign trajectories of the instance's current step, in order, while they fit."""
    current = pipeline.step(instance.assigned)
    if current is None:
        current = candidates[0][0]
    count, kv_tokens = len(instance.assigned), instance.kv_tokens
    for step, *_, trajectory in candidates:
        if step > current or count == instance.capacity:
            return
        if count and not fits(kv_tokens, trajectory.tokens, instance):
            return
        count, kv_tokens = count + 1, kv_tokens + trajectory.tokens
        yield Assignment(trajectory.id, instance.name)


def migrate_outliers(view: FleetView) -> Iterator[Migration]:
    """Move outliers that keep an instance from starting its next step (RhymeRL, HistoPipe, tier 2).

    An outlier is among the last tenth of its instance's share of a step, and is longer than
    `OUTLIER_RATIO` times its predicted length. It moves to an instance that holds the donor's
    version or a newer one and has a response expected to run longer: of those, the one with the
    fewest responses. If there is none, it stays and joins the next step. It moves only once."""
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
            target = _target(view, counts, instance, view.lengths.remaining(trajectory))
            if target is None:
                yield Migration(instance.name, (trajectory,), instance.name, later=True)
            else:
                counts[target] += 1
                yield Migration(instance.name, (trajectory,), target)


def _target(
    view: FleetView, counts: Mapping[InstanceId, int], donor: InstanceView, remaining: float
) -> InstanceId | None:
    """Choose where to move an outlier that needs about `remaining` more tokens; None: nowhere."""
    able = []
    for index, other in enumerate(view.instances):
        if other.name == donor.name or not other.has_room() or other.version < donor.version:
            continue
        if len(other.assigned) <= len(donor.assigned):
            continue  # the outlier would delay that instance's next step instead
        if any(view.lengths.remaining(trajectory) > remaining for trajectory in other.assigned):
            able.append((counts[other.name], index, other.name))
    return min(able)[-1] if able else None
