"""Migration: which running trajectories to interrupt.

Routing then decides where they go; `rebalance` moves none that routing would send back."""

from __future__ import annotations

from collections.abc import Iterable, Iterator

from rhymeflow.core.cost import CostModel
from rhymeflow.core.strategies.base import (
    FleetView,
    InstanceView,
    Migration,
    Settings,
    fits,
    size_class,
)
from rhymeflow.core.types import TrajectoryId

MAX_WAITING = 3
"""If more than this many trajectories wait on an instance, all that wait may be moved."""


def none(view: FleetView) -> tuple[Migration, ...]:
    """Move nothing."""
    return ()


def rebalance(view: FleetView) -> tuple[Migration, ...]:
    """Reroute trajectories that wait, and balance loads (StaleFlow, migration strategy).

    If more than `MAX_WAITING` trajectories wait on an instance while another has room and none
    waiting, all that wait on the first are rerouted. (If all are full, moving gains nothing.)

    An instance is starved if it has room, nothing in the queue could fill it, and another instance
    of its version, the donor, has more than `throughput_ratio` times its load. The load is the
    decoding throughput. The donor's shortest trajectories move, the cheapest to recompute.

    Why it ends. Each trajectory that moves must leave the donor at least as loaded as the starved
    instance, gain more there than it would back on the donor, and gain enough for routing to accept
    it there. So routing does not send it back, and the pair is then balanced: the donor donates
    again only after the loads have drifted apart by the whole ratio. Loads are balanced only while
    nothing waits or is being moved, so no free capacity is filled twice."""
    overfull = {x.name for x in view.instances if len(x.waiting) > MAX_WAITING}
    if not any(x.has_room() and not x.waiting for x in view.instances):
        overfull = set()
    if overfull:
        return tuple(Migration(x.name, x.waiting) for x in view.instances if x.name in overfull)
    if view.lowest_waiting is None and not view.num_returning:
        return tuple(_balance_loads(view))
    return ()


def skip_nearly_done(view: FleetView) -> tuple[Migration, ...]:
    """Like `rebalance`, but leave responses that are about to end where they are. A response moves
    if its expected remaining time is more than `MIN_REMAINING` times the time to recompute its
    cache. If history predicts nothing (`explained_variance` is 0), all move."""
    migrations = rebalance(view)
    if view.lengths.explained_variance <= 0 or not migrations:
        return migrations
    by_name = {x.name: x for x in view.instances}
    chosen = []
    for migration in migrations:
        donor = by_name[migration.instance]
        kept = tuple(
            t for t in migration.trajectories if t in donor.waiting or _is_worth_it(t, donor, view)
        )
        if kept:
            chosen.append(Migration(donor.name, kept))
    return tuple(chosen)


MIN_REMAINING = 4.0
"""Least expected remaining time of a response that moves, in times of recomputing its cache."""


def _is_worth_it(trajectory: TrajectoryId, donor: InstanceView, view: FleetView) -> bool:
    cost = view.settings.cost
    remaining = view.lengths.remaining(trajectory) * cost.iteration(
        _num_decoded(donor), donor.kv_tokens
    )
    tokens = donor.assigned[trajectory] + view.lengths.generated(trajectory)
    return remaining > MIN_REMAINING * cost.prefill_token * tokens


def _balance_loads(view: FleetView) -> Iterator[Migration]:
    versions = dict.fromkeys(
        x.version
        for x in view.instances
        if not x.waiting and x.version not in view.admissible and x.has_room()
    )
    for version in versions:
        same_version = [x for x in view.instances if x.version == version]
        yield from _balance_pairs(same_version, view.settings)


def _balance_pairs(instances: Iterable[InstanceView], settings: Settings) -> Iterator[Migration]:
    """Migrate between instances of one version: from the most loaded to the least loaded with room,
    from the second most loaded to the second least, and so on."""
    throughput = settings.cost.throughput
    loads = [(throughput(_num_decoded(x), x.kv_tokens), i, x) for i, x in enumerate(instances)]
    least_first = sorted(each for each in loads if not each[2].waiting and each[2].has_room())
    most_first = sorted(loads, key=lambda each: (-each[0], each[1]))
    for (low, _, starved), (high, _, donor) in zip(least_first, most_first, strict=False):
        if high <= settings.throughput_ratio * low:
            return
        if trajectories := _moved(donor, starved, settings.cost):
            yield Migration(donor.name, trajectories)


def _moved(donor: InstanceView, starved: InstanceView, cost: CostModel) -> tuple[TrajectoryId, ...]:
    """Choose trajectories to move, shortest first, until the two loads are balanced."""
    decoded = sorted(
        (tokens, trajectory)
        for trajectory, tokens in donor.assigned.items()
        if trajectory not in donor.waiting
    )
    # Loads of the donor without, and of the starved instance with, the trajectories so far.
    donor_num, donor_kv = len(decoded), donor.kv_tokens
    num, kv_tokens = _num_decoded(starved), starved.kv_tokens
    donated: list[TrajectoryId] = []
    for tokens, trajectory in decoded:
        donor_num, donor_kv = donor_num - 1, max(0, donor_kv - tokens)
        size = size_class(tokens)  # as routing compares
        has_room = num < starved.capacity and fits(kv_tokens, tokens, starved)
        gains_more = cost.gain(num, kv_tokens, size) > cost.gain(donor_num, donor_kv, size)
        accepted = not num or cost.gain(num, kv_tokens, tokens) >= 0
        num, kv_tokens = num + 1, kv_tokens + tokens
        is_reversed = cost.throughput(num, kv_tokens) > cost.throughput(donor_num, donor_kv)
        if not (has_room and gains_more and accepted) or is_reversed:
            break
        donated.append(trajectory)
    return tuple(donated)


def _num_decoded(instance: InstanceView) -> int:
    return len(instance.assigned) - len(instance.waiting)
