"""A worker's process that is an interpreter of its own, see `workers/launch.py`.

Holds true: it has the methods of `multiprocessing.Process` that `LocalWorker` uses, so the two are
looked after alike; the package that it imports is the controller's. Knows nothing of what workers
do.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Mapping
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

import rhymeflow
from rhymeflow.config import Config

PACKAGES = str(Path(rhymeflow.__file__).parents[1])
"""Where the package is imported from."""


def is_needed(role: str, config: Config) -> bool:
    """Whether such a worker cannot be forked."""
    rollout = config.rollout
    return role == "rollout" and (rollout.engine == "vllm" or rollout.python is not None)


class Interpreter:
    """A worker's process; `start` begins it."""

    def __init__(
        self,
        config: Config,
        role: str,
        name: str,
        ours: Connection,
        theirs: Connection,
        given: Mapping[str, Any],
        environment: Mapping[str, str],
    ) -> None:
        """`ours`, `theirs`: the two ends of its pipe. `given`: its first message."""
        self._python = config.rollout.python or sys.executable
        self._options = ["openmp"] if config.rollout.engine == "vllm" else []
        self._role, self._name, self._given = role, name, dict(given)
        self._ours, self._theirs = ours, theirs
        found = environment.get("PYTHONPATH")
        path = f"{PACKAGES}{os.pathsep}{found}" if found else PACKAGES
        self._environment = {**environment, "PYTHONPATH": path}
        self._process: subprocess.Popen[bytes]

    def start(self) -> None:
        """Begin it. What it prints before it has a log of its own goes there too."""
        command = [self._python, "-m", "rhymeflow.workers.launch", str(self._theirs.fileno())]
        log = Path(self._given["log"])
        log.parent.mkdir(parents=True, exist_ok=True)
        with log.open("ab") as output:
            self._process = subprocess.Popen(
                [*command, self._role, self._name, *self._options],
                env=self._environment,
                stdin=subprocess.DEVNULL,
                stdout=output,
                stderr=output,
                pass_fds=[self._theirs.fileno()],
            )
        self._ours.send_bytes(json.dumps(self._given).encode())

    @property
    def pid(self) -> int:
        """Process id."""
        return self._process.pid

    @property
    def exitcode(self) -> int | None:
        """How it ended, None while it runs; a signal's number negated."""
        return self._process.poll()

    def is_alive(self) -> bool:
        """Whether it runs."""
        return self._process.poll() is None

    def join(self, timeout: float | None = None) -> None:
        """Wait for its end, so many seconds at most."""
        try:
            self._process.wait(timeout)
        except subprocess.TimeoutExpired:
            return

    def kill(self) -> None:
        """End it at once."""
        self._process.kill()
