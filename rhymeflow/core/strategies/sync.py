"""Synchronisation: when an instance that lags behind the weight store pulls.

A rule must eventually let every lagging instance pull, or the run stalls; its docstring proves it.
"""

from __future__ import annotations

from functools import lru_cache

from rhymeflow.core.cost import CostModel
from rhymeflow.core.strategies.base import FleetView, InstanceView
from rhymeflow.core.types import InstanceId, Version


def when_idle(instance: InstanceView, view: FleetView) -> bool:
    """Pull when nothing is left on the instance. Why it pulls eventually. With `on_pull: drain` a
    lagging instance gets nothing new, and its trajectories end, since responses are of bounded
    length."""
    return not instance.assigned


def greedy(instance: InstanceView, view: FleetView) -> bool:
    """Pull at once (the default of StaleFlow's authors)."""
    return True


def when_version_unusable(instance: InstanceView, view: FleetView) -> bool:
    """Pull when nothing more can start at the instance's version (StaleFlow, synchronisation).

    The instance does not pull while trajectories wait on it, while one in the queue may be routed
    to it, or, if the queue is empty or the instance has no room, while the protocol has an entry
    for a new group at its version. If it has room, new groups do not count while older trajectories
    wait: those are routed first, and routing stops at the first that has no place. An empty
    instance loses nothing by a pull.

    Why it pulls eventually. Until it does, it stays at one version v. It can be given only what may
    run at v: trajectories of groups started at v or below, and new groups while a buffer up to v +
    bound is open, that is until batch v + bound is consumed. These are finitely many and each ends,
    so the instance pulls before they have all ended, or at the latest when it is empty."""
    if not instance.assigned:
        return True
    if instance.waiting:
        return False
    if view.lowest_waiting is not None and instance.has_room():
        return view.lowest_waiting > instance.version
    return instance.version not in view.admissible


def gather_stragglers(instance: InstanceView, view: FleetView) -> bool:
    """Pull when nothing more can start at the instance's version and others can finish its work.

    The instance does not pull while a trajectory may start or continue at its version: a pull makes
    it recompute its cache. Once nothing more may start or continue there, it can only drain. Of
    such instances of each version the fullest stay, as few as possible so that no response is
    decoded more than `max_slowdown` times slower than alone. The others pull at once, and their
    trajectories are routed to those that stay (`on_pull: reroute`). An empty instance pulls.

    Why it pulls eventually. An instance that stays can be given only what may run at its version,
    which is finite (see `when_version_unusable`) and ends; it pulls once it is empty."""
    if not instance.assigned:
        return True
    if instance.waiting or instance.version in view.admissible:
        return False
    lowest = view.lowest_waiting
    if lowest is not None and lowest <= instance.version and instance.has_room():
        return False
    return instance.name not in _keepers(view)


@lru_cache(maxsize=1)  # called for each lagging instance in turn
def _keepers(view: FleetView) -> frozenset[InstanceId]:
    """Choose the instances that keep an unusable version and take over the others' trajectories.

    Each version has instances for its own: routing sends a trajectory to the lowest version that
    may run it, however full that is and however empty those of the next."""
    draining: dict[Version, list[InstanceView]] = {}
    for x in view.instances:
        if x.version < view.published and x.assigned and x.version not in view.admissible:
            draining.setdefault(x.version, []).append(x)
    chosen: list[InstanceView] = []
    for version in sorted(draining):
        of_version = sorted(draining[version], key=lambda x: -len(x.assigned))
        total = sum(len(x.assigned) for x in of_version)
        tokens = sum(x.kv_tokens for x in of_version) / total
        most_each = _max_together(view.settings.cost, tokens, view.settings.max_slowdown)
        chosen += of_version[: -(-total // most_each)]
    return frozenset(x.name for x in chosen[: len(view.instances) - 1])  # at least one pulls


_MOST_TOGETHER = 64  # most trajectories that are gathered on one instance


def _max_together(cost: CostModel, tokens: float, max_slowdown: float) -> int:
    """Most trajectories of `tokens` tokens that one instance decodes within `max_slowdown`."""
    most, slowest = 1, max_slowdown * cost.iteration(1, tokens)
    while most < _MOST_TOGETHER and cost.iteration(most + 1, (most + 1) * tokens) <= slowest:
        most += 1
    return most
