"""Whose drafts go first: what is expected to last longest on its instance."""

from __future__ import annotations

import os
from collections.abc import Iterator

from rhymeflow.core.strategies.view import FleetView, Preference

FACTOR = float(os.environ.get("FACTOR", "1.5"))


def nobody(view: FleetView) -> tuple[Preference, ...]:
    """All the same."""
    return ()


def tails(view: FleetView) -> Iterator[Preference]:
    """Those that have `TAIL` times the remaining tokens of their instance's mean."""
    if view.forecast.skill <= 0:
        return
    for instance in view.instances:
        if len(instance.assigned) < 2:
            continue
        remaining = {t: view.forecast.remaining(t) for t in instance.assigned}
        least = FACTOR * sum(remaining.values()) / len(remaining)
        yield Preference(instance.name, tuple(t for t, r in remaining.items() if r > least))
