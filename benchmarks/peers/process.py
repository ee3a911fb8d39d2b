"""A peer in the python of another environment: a process that answers one JSON request at a time.

Holds true: its process group is stopped between requests, as the workers of some systems poll for
work, so it takes nothing from the side that is being measured. A peer prints a line `answer:` and a
JSON object when it is ready, and one for each request, a line of JSON on its stdin.
"""

from __future__ import annotations

import json
import os
import signal
import subprocess
import tempfile
from collections.abc import Sequence
from typing import Any

from benchmarks.training.train import ROOT
from rhymeflow.errors import UserError


class Peer:
    """A running peer."""

    def __init__(self, python: str, arguments: Sequence[str], num_threads: int = 1) -> None:
        self._python = python
        self._errors = tempfile.TemporaryFile("w+", encoding="utf-8")  # noqa: SIM115 - see close
        self._process = subprocess.Popen(
            [python, *arguments],
            cwd=ROOT,
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=self._errors,
            env={**os.environ, "OMP_NUM_THREADS": str(num_threads)},
            text=True,
            start_new_session=True,
        )
        self._answer()
        self._signal(signal.SIGSTOP)

    def ask(self, request: dict[str, Any]) -> dict[str, Any]:
        """Its answer to one request."""
        assert self._process.stdin is not None
        self._signal(signal.SIGCONT)
        self._process.stdin.write(json.dumps(request) + "\n")
        self._process.stdin.flush()
        answer = self._answer()
        self._signal(signal.SIGSTOP)
        return answer

    def close(self) -> None:
        """End the process."""
        assert self._process.stdin is not None
        self._signal(signal.SIGCONT)
        self._process.stdin.close()
        self._process.wait(timeout=60)
        self._errors.close()

    def _signal(self, number: signal.Signals) -> None:
        os.killpg(self._process.pid, number)

    def _answer(self) -> dict[str, Any]:
        assert self._process.stdout is not None
        for line in self._process.stdout:
            if line.startswith("answer:"):
                return dict(json.loads(line.removeprefix("answer:")))
        self._process.wait()
        self._errors.seek(0)
        last = self._errors.read().strip().splitlines()[-1:]
        raise UserError(f"{self._python}: {' '.join(last)}")
