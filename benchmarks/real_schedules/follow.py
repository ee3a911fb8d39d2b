"""Starts a training run, looks at its metrics now and then, and stops it once they are enough.

Holds true: a run that is stopped ends as Ctrl-C ends it, after the current step, so that its
directory is whole. Looking costs a small file's reading a second: the event log is left alone until
the run is over.
"""

from __future__ import annotations

import signal
import subprocess
import sys
import tempfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

from benchmarks.e2e import ROOT
from rhymeflow.errors import UserError
from rhymeflow.observe import metrics

SECONDS = 1.0
"""From one look to the next."""

Rows = dict[int, dict[str, Any]]
"""Metrics by step."""


def train(config: Path, run_dir: Path, is_enough: Callable[[Rows], bool]) -> None:
    """Train this configuration until its end, or until its metrics are enough.

    Raises:
        UserError: it failed; says its last words.
    """
    command = [sys.executable, "-m", "rhymeflow", "train", str(config.resolve())]
    with tempfile.TemporaryFile("w+", encoding="utf-8") as said:
        process = subprocess.Popen(
            command, cwd=ROOT, stdin=subprocess.DEVNULL, stdout=said, stderr=subprocess.STDOUT
        )
        try:
            is_stopped = _watch(process, run_dir, is_enough)
        except BaseException:  # its workers end with it
            process.kill()
            process.wait()
            raise
        if process.returncode and not (is_stopped and process.returncode == 130):
            said.seek(0)
            last = said.read().strip().splitlines()[-1:]
            raise UserError(f"bench schedules: {config} failed: {' '.join(last)}")


def _watch(
    process: subprocess.Popen[bytes], run_dir: Path, is_enough: Callable[[Rows], bool]
) -> bool:
    """Wait for its end; whether it was told to stop."""
    is_stopped = False
    while True:
        try:
            process.wait(SECONDS)
        except subprocess.TimeoutExpired:
            if not is_stopped and is_enough(metrics.read(run_dir)):
                process.send_signal(signal.SIGINT)
                is_stopped = True
        else:
            return is_stopped
