"""Who is told of a run's steps in the controller's process, and may ask it to stop or to save."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from rhymeflow.core.types import Version


class Observer:
    """Told of each version once, in order, after its metrics were written, while the controller
    waits; subclasses override what they want to hear."""

    stop_asked = False
    """The run is to end with the version that is published, as if it were its last."""
    save_asked = False
    """A checkpoint of the version that is published is wanted; reset when it is begun."""

    def begin(self, rows: Mapping[Version, Mapping[str, Any]]) -> None:
        """All is loaded; `rows` are the metrics of earlier attempts, by version."""

    def step_ended(self, version: Version, metrics: Mapping[str, float]) -> None:
        """A version was published."""

    def evaluated(self, version: Version, metrics: Mapping[str, float]) -> None:
        """Held-out prompts were answered under `version`."""

    def saved(self, version: Version, path: str) -> None:
        """A checkpoint is complete."""
