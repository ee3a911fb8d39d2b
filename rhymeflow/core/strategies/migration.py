"""Migration: trajectories that are taken away from their instances.

Routing decides where they go; `rebalance` takes only what routing would not give back.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator

from rhymeflow.core.cost import CostModel
from rhymeflow.core.strategies.base import (
    FleetView,
    InstanceView,
    Migration,
    Settings,
    fits,
    weighed,
)
from rhymeflow.core.types import TrajectoryId

MAX_WAITING = 3
"""With more than this many waiting on an instance, they are sent back to be routed anew."""


def none(view: FleetView) -> tuple[Migration, ...]:
    """Nothing moves."""
    return ()


def rebalance(view: FleetView) -> tuple[Migration, ...]:
    """Send back what waits in vain, and share with the starved (StaleFlow, migration strategy).

    More than `MAX_WAITING` waiting on an instance, and another that nothing waits on has room: all
    that waits there is sent back. (If all are full, it waits as well where it is.)

    An instance is starved if it has room, nothing in the queue could fill it, and another of its
    version has more than `throughput_ratio` times its load, the throughput of what is decoded
    there. The other gives away the fewest tokens first, for they are the cheapest to recompute.

    Why it ends. Each that is taken must leave the donor at least as loaded as the starved one, must
    gain more on the starved one than it would back on the donor, and enough to be accepted there.
    So routing does not give it back, and a pair that has shared is even: it shares again only after
    the loads have come apart by the whole ratio. Nothing is shared while anything waits or is on
    its way back, so no gap is filled twice.
    """
    overfull = {x.name for x in view.instances if len(x.waiting) > MAX_WAITING}
    if not any(x.has_room() and not x.waiting for x in view.instances):
        overfull = set()
    if overfull:
        return tuple(Migration(x.name, x.waiting) for x in view.instances if x.name in overfull)
    if view.lowest_waiting is None and not view.num_returning:
        return tuple(_shares(view))
    return ()


def skip_nearly_done(view: FleetView) -> tuple[Migration, ...]:
    """As `rebalance`, without responses that are about to end.

    A response moves if the time it is expected to need is `MIN_REMAINING` times that of recomputing
    its cache. If nothing is known of lengths (`explained_variance` 0), all move.
    """
    migrations = rebalance(view)
    if view.lengths.explained_variance <= 0 or not migrations:
        return migrations
    by_name = {x.name: x for x in view.instances}
    chosen = []
    for migration in migrations:
        giver = by_name[migration.instance]
        kept = tuple(
            t for t in migration.trajectories if t in giver.waiting or _lasts(t, giver, view)
        )
        if kept:
            chosen.append(Migration(giver.name, kept))
    return tuple(chosen)


MIN_REMAINING = 4.0
"""Expected remaining time over recomputation time from which a response moves."""


def _lasts(trajectory: TrajectoryId, giver: InstanceView, view: FleetView) -> bool:
    cost = view.settings.cost
    remaining = view.lengths.remaining(trajectory) * cost.iteration(
        _num_decoded(giver), giver.kv_tokens
    )
    tokens = giver.assigned[trajectory] + view.lengths.generated(trajectory)
    return remaining > MIN_REMAINING * cost.prefill_token * tokens


def _shares(view: FleetView) -> Iterator[Migration]:
    starved = dict.fromkeys(
        x.version
        for x in view.instances
        if not x.waiting and x.version not in view.admissible and x.has_room()
    )
    for version in starved:
        yield from _pairs([x for x in view.instances if x.version == version], view.settings)


def _pairs(instances: Iterable[InstanceView], settings: Settings) -> Iterator[Migration]:
    """The least loaded that is starved beside the most loaded, the second least beside the second
    most, ..."""
    throughput = settings.cost.throughput
    loads = [(throughput(_num_decoded(x), x.kv_tokens), i, x) for i, x in enumerate(instances)]
    least_first = sorted(load for load in loads if not load[2].waiting and load[2].has_room())
    most_first = sorted(loads, key=lambda load: (-load[0], load[1]))
    for (little, _, taker), (much, _, giver) in zip(least_first, most_first, strict=False):
        if much <= settings.throughput_ratio * little:
            return
        if taken := _taken(giver, taker, settings.cost):
            yield Migration(giver.name, taken)


def _taken(giver: InstanceView, taker: InstanceView, cost: CostModel) -> tuple[TrajectoryId, ...]:
    """What the giver gives away: as many as the two can be evened out with."""
    decoded = sorted(
        (tokens, trajectory)
        for trajectory, tokens in giver.assigned.items()
        if trajectory not in giver.waiting
    )
    left, left_kv = len(decoded), giver.kv_tokens
    count, kv_tokens = _num_decoded(taker), taker.kv_tokens
    taken: list[TrajectoryId] = []
    for tokens, trajectory in decoded:
        left, left_kv = left - 1, max(0, left_kv - tokens)
        size = weighed(tokens)  # as routing does when it compares
        has_place = count < taker.capacity and fits(kv_tokens, tokens, taker)
        stays = cost.gain(count, kv_tokens, size) > cost.gain(left, left_kv, size)
        accepted = not count or cost.gain(count, kv_tokens, tokens) >= 0
        count, kv_tokens = count + 1, kv_tokens + tokens
        is_even = cost.throughput(count, kv_tokens) > cost.throughput(left, left_kv)
        if not (has_place and stays and accepted) or is_even:
            break
        taken.append(trajectory)
    return tuple(taken)


def _num_decoded(instance: InstanceView) -> int:
    return len(instance.assigned) - len(instance.waiting)
