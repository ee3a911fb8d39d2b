"""The interface of an observer of a run's steps, which may ask the run to stop or to save."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from rhymeflow.core.types import Version
from rhymeflow.observe.learning import Verdict


class Observer:
    """Is called in the controller's process, once for each version, in order, after its metrics are
    written; the controller waits. Subclasses override the calls that they want."""

    stop_asked = False  # set it to end the run with the version published by then
    save_asked = False
    """Set it to save a checkpoint of the published version; reset when that begins."""

    def begin(self, rows: Mapping[Version, Mapping[str, Any]]) -> None:
        """Training begins; `rows` are the metrics of earlier attempts, by version."""

    def step_ended(self, version: Version, metrics: Mapping[str, float]) -> None:
        """A version was published."""

    def evaluated(self, version: Version, metrics: Mapping[str, float]) -> None:
        """Held-out prompts were answered under `version`."""

    def judged(self, version: Version, verdict: Verdict) -> None:
        """A verdict on learning begins to hold."""

    def saved(self, version: Version, path: str) -> None:
        """A checkpoint is complete."""
