"""`rhymeflow dashboard` in a process of its own, asked over HTTP as its pages ask it.

Holds true: the process is ended with the block; each answer was one of JSON with status 200.
"""

from __future__ import annotations

import contextlib
import http.client
import json
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any
from urllib.parse import quote, urlencode, urlsplit

from benchmarks.training.train import ROOT
from rhymeflow.dashboard.server import COOKIE
from rhymeflow.errors import UserError

Question = tuple[str, dict[str, Any]]
"""The path below the run, and what is asked for."""


class Dashboard:
    """One that answers; `run` is how its addresses call the run."""

    def __init__(self, address: str, run: str) -> None:
        parts = urlsplit(address)
        self._connection = http.client.HTTPConnection(parts.hostname or "", parts.port, timeout=120)
        self._headers = {"cookie": f"{COOKIE}={parts.query.partition('=')[2]}"}
        self._path = f"/api/runs/{quote(run)}"

    def ask(self, path: str = "", **query: Any) -> Any:
        """The answer to one question."""
        search = urlencode({k: v for k, v in query.items() if v is not None}, doseq=True)
        self._connection.request("GET", f"{self._path}{path}?{search}", headers=self._headers)
        response = self._connection.getresponse()
        body = response.read()
        if response.status != 200:
            raise UserError(f"{path}?{search}: answered {response.status}: {body[:200]!r}")
        return json.loads(body)

    def timed(self, question: Question) -> float:
        """Seconds until one question is answered."""
        path, query = question
        began = time.perf_counter()
        self.ask(path, **query)
        return time.perf_counter() - began


@contextlib.contextmanager
def dashboard(run_dir: Path) -> Iterator[Dashboard]:
    """Start one over a run.

    Raises:
        UserError: it ended instead.
    """
    command = [sys.executable, "-m", "rhymeflow", "dashboard", str(run_dir)]
    process = subprocess.Popen(command, cwd=ROOT, stdout=subprocess.PIPE, text=True)
    assert process.stdout is not None
    try:
        address = process.stdout.readline().strip()
        if not address:
            raise UserError(f"{' '.join(command)}: ended with code {process.wait()}")
        yield Dashboard(address, run_dir.resolve().name)
    finally:
        process.send_signal(signal.SIGINT)
        try:
            process.wait(10)
        except subprocess.TimeoutExpired:
            process.kill()
            process.wait()
        process.stdout.close()
