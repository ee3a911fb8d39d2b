"""Migration: what is taken away from where it is, to be routed anew."""

from __future__ import annotations

from rhymeflow.core.strategies.view import FleetView, Migration


def none(view: FleetView) -> tuple[Migration, ...]:
    """Nothing moves."""
    return ()


def rebalance(view: FleetView) -> tuple[Migration, ...]:
    """Send back what waits on an instance, where that is more than `max_waiting`."""
    limit = view.weights.max_waiting
    return tuple(
        Migration(instance.name, instance.waiting)
        for instance in view.instances
        if len(instance.waiting) > limit
    )
