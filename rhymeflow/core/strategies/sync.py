"""Synchronisation: when an instance that lags behind the parameter server pulls.

Each rule answers for one instance whose version is below the newest. A rule must let every instance
that lags pull in the end, or the run stalls: its docstring says why it does.
"""

from __future__ import annotations

from rhymeflow.core.strategies.routing import has_room
from rhymeflow.core.strategies.view import FleetView, InstanceView


def drained(instance: InstanceView, view: FleetView) -> bool:
    """When nothing is left on it.

    It comes to that where an instance that lags is given nothing new (`on_pull: drain`): what it
    has ends, for responses are of bounded length.
    """
    return not instance.assigned


def greedy(instance: InstanceView, view: FleetView) -> bool:
    """At once (the default of StaleFlow's authors)."""
    return True


def status(instance: InstanceView, view: FleetView) -> bool:
    """When its version is of no more use (StaleFlow, synchronisation strategy).

    An instance at an old version is useful for partial trajectories, which have no need of a newer
    one, and for new groups as long as the protocol has an entry for them at that version. So it
    waits while something waits on it, while something in the queue may be routed to it, or, if the
    queue is empty, while a new group could start on it. New groups do not count while anything
    older waits: that goes first, and if it may not run here, nothing will (a block ends the tick).
    An instance with nothing on it loses nothing by a pull, so it does not wait.

    Why it pulls in the end. Until it does, it stays at one version v. What it can be given is what
    may run at v: trajectories of groups started at v or below, and new groups while a buffer up to
    v + bound is open, that is until batch v + bound is consumed. These are finitely many and each
    ends, so it pulls before, or runs empty and pulls then.
    """
    if not instance.assigned:
        return True
    if instance.waiting:
        return False
    if view.lowest_waiting is not None and has_room(instance):
        return view.lowest_waiting > instance.version
    return instance.version not in view.admissible
