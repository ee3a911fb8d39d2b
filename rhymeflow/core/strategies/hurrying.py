"""Whose drafts go first, where `schedule.urgency` is above 1.

Holds true: only what runs on an instance is preferred there. What is sampled does not depend on it.
"""

from __future__ import annotations

from collections.abc import Iterator

from rhymeflow.core.strategies.view import FleetView, Preference


def nobody(view: FleetView) -> tuple[Preference, ...]:
    """All the same."""
    return ()


def gating(view: FleetView) -> Iterator[Preference]:
    """What an idle learner waits for, on instances that have something else too."""
    if not view.gating:
        return
    for instance in view.instances:
        chosen = tuple(t for t in instance.assigned if t.group in view.gating)
        if 0 < len(chosen) < len(instance.assigned):
            yield Preference(instance.name, chosen)
