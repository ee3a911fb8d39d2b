"""Who is told how a run goes on, in the controller's process, and may ask it to stop or to save.

It is told of each version once, in order, after its metrics were written, and holds up the
controller meanwhile; what it asks for is done before anything else is begun.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from rhymeflow.core.types import Version


class Observer:
    """Is told, and does nothing; what a class of its kind overrides, it hears."""

    stop_asked = False
    """The run is to end with the version that is published, as if it were its last."""
    save_asked = False
    """A checkpoint of the version that is published is wanted; taken back when it is begun."""

    def begin(self, rows: Mapping[Version, Mapping[str, Any]]) -> None:
        """All is loaded; `rows` are the metrics of earlier attempts, by version."""

    def step_ended(self, version: Version, metrics: Mapping[str, float]) -> None:
        """A version was published."""

    def evaluated(self, version: Version, metrics: Mapping[str, float]) -> None:
        """Held-out prompts were answered under `version`."""

    def saved(self, version: Version, path: str) -> None:
        """A checkpoint is complete."""
