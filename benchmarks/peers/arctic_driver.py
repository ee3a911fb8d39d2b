"""arctic-inference as a peer of the drafter benchmark: asks `arctic_side.py`, in its own python."""

from __future__ import annotations

import json
import os
import subprocess
import tempfile
from pathlib import Path
from typing import Any

from benchmarks.rollouts.lockstep import Count
from rhymeflow.errors import UserError

ROOT = Path(__file__).resolve().parent.parent.parent
DEFAULT = {"depth": 24, "factor": 1.0, "least": 0.1}
"""What vLLM sets if the user sets nothing."""
CANDIDATES = (
    DEFAULT,
    {"depth": 24, "factor": 2.0, "least": 0.1},
    {"depth": 24, "factor": 4.0, "least": 0.1},
    {"depth": 24, "factor": 4.0, "least": 0.0},
    {"depth": 64, "factor": 1.0, "least": 0.0},
)
"""Settings among which the best is looked for."""


class Answer:
    """Counts by epoch, and the memory of the shared tree where it was asked for."""

    def __init__(self, answer: dict[str, Any]) -> None:
        self.counts = [Count(**count) for count in answer["counts"]]
        self.bytes_per_token: float | None = answer.get("bytes_per_token")


class Arctic:
    """The other environment."""

    def __init__(self, python: str) -> None:
        self.python = python

    def replay(self, path: Path, *, groups: int, limit: int, **settings: Any) -> Answer:
        """Replay a recording; `settings`: `max_draft`, `tree`, and those of `DEFAULT`."""
        return self._ask(
            {"what": "replay", "path": str(path), "groups": groups, "limit": limit}, settings
        )

    def latency(
        self, path: Path, *, running: int, iterations: int, limit: int, **settings: Any
    ) -> Answer:
        """Some iterations of the last `running` rollouts; those before them are history."""
        request = {"what": "latency", "path": str(path), "limit": limit}
        return self._ask({**request, "running": running, "iterations": iterations}, settings)

    def _ask(self, request: dict[str, Any], settings: dict[str, Any]) -> Answer:
        with tempfile.NamedTemporaryFile("w", suffix=".json") as file:
            json.dump({**request, "settings": settings}, file)
            file.flush()
            done = subprocess.run(
                [self.python, "-m", "benchmarks.peers.arctic_side", file.name],
                cwd=ROOT,
                env={**os.environ, "OMP_NUM_THREADS": "1"},
                capture_output=True,
                text=True,
                check=False,
            )
        if done.returncode:
            last = done.stderr.strip().splitlines()[-1:]
            raise UserError(f"--arctic-python {self.python}: {' '.join(last)}")
        return Answer(json.loads(done.stdout))


__all__ = ["CANDIDATES", "DEFAULT", "Answer", "Arctic"]
