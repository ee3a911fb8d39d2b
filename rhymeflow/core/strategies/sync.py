"""Synchronisation: when an instance that lags behind the weight store pulls.

A rule must let every instance that lags pull in the end, or the run stalls: its docstring says why.
"""

from __future__ import annotations

from functools import lru_cache

from rhymeflow.core.cost import CostModel
from rhymeflow.core.strategies.base import FleetView, InstanceView
from rhymeflow.core.types import InstanceId


def when_idle(instance: InstanceView, view: FleetView) -> bool:
    """When nothing is left on it.

    It pulls in the end where an instance that lags gets nothing new (`on_pull: drain`): what it has
    ends, since responses are of bounded length.
    """
    return not instance.assigned


def greedy(instance: InstanceView, view: FleetView) -> bool:
    """At once (the default of StaleFlow's authors)."""
    return True


def when_version_unusable(instance: InstanceView, view: FleetView) -> bool:
    """When its version is of no more use (StaleFlow, synchronisation strategy).

    It waits while something waits on it, while something in the queue may be routed to it, or, if
    the queue is empty, while the protocol has an entry for a new group at its version. New groups
    do not count while anything older waits: that goes first, and if it may not run here, nothing
    will (a block ends the tick). With nothing on it, it loses nothing by a pull.

    Why it pulls in the end. Until it does, it stays at one version v. What it can be given is what
    may run at v: trajectories of groups started at v or below, and new groups while a buffer up to
    v + bound is open, that is until batch v + bound is consumed. These are finitely many and each
    ends, so it pulls before, or runs empty and pulls then.
    """
    if not instance.assigned:
        return True
    if instance.waiting:
        return False
    if view.lowest_waiting is not None and instance.has_room():
        return view.lowest_waiting > instance.version
    return instance.version not in view.admissible


def gather_stragglers(instance: InstanceView, view: FleetView) -> bool:
    """When its version is of no more use, and others can take over its trajectories.

    As long as something may be started or continued at its version it does not pull: a pull makes
    it recompute all that is cached. After that it could only run empty. So of all in this state
    those with the most stay, as many as it takes for nothing there to be decoded more than
    `max_slowdown` times slower than alone; the others pull at once, and what they had is routed to
    those that stay (`on_pull: reroute`). An empty one pulls.

    Why it pulls in the end: one that stays can be given only what may run at its version, which is
    finitely much (see `when_version_unusable`); it ends, and it pulls when it is empty.
    """
    if not instance.assigned:
        return True
    if instance.waiting or instance.version in view.admissible:
        return False
    lowest = view.lowest_waiting
    if lowest is not None and lowest <= instance.version and instance.has_room():
        return False
    return instance.name not in _stay(view)


@lru_cache(maxsize=1)  # all instances that lag are asked about in turn
def _stay(view: FleetView) -> frozenset[InstanceId]:
    """The instances that keep a version of no more use, and take over what others have."""
    idle = [
        (-len(x.assigned), place, x)
        for place, x in enumerate(view.instances)
        if x.version < view.published and x.assigned and x.version not in view.admissible
    ]
    total = sum(len(x.assigned) for _, _, x in idle)
    if not total:
        return frozenset()
    tokens = sum(x.kv_tokens for _, _, x in idle) / total
    each = _max_together(view.settings.cost, tokens, view.settings.max_slowdown)
    most = len(view.instances) - 1  # one is to be fresh
    return frozenset(x.name for _, _, x in sorted(idle)[: min(most, -(-total // each))])


def _max_together(cost: CostModel, tokens: float, max_slowdown: float) -> int:
    """Most trajectories of so many tokens among which one is not slowed down by more than this."""
    most, slowest = 1, max_slowdown * cost.iteration(1, tokens)
    while most < _MOST and cost.iteration(most + 1, (most + 1) * tokens) <= slowest:
        most += 1
    return most


_MOST = 64
"""Trajectories that are gathered on one instance at most."""
