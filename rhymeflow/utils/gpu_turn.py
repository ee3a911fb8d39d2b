"""Turns at the memory of a GPU that a learner and sleeping engines share (`rollout.vllm_sleeps`).

Whoever computes holds a lock of a file in the run's directory: engines together, or the learner. A
second file says that the learner waits: engines without work then sleep. A process that ends, in
whatever way, gives its turn back."""

from __future__ import annotations

import fcntl
import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

from rhymeflow.utils import progress

_WAIT_SECONDS = 0.02


class GpuTurn:
    """The turn of one process. Waiting counts as work, so that it is no hang."""

    def __init__(self, run_dir: Path, *, is_learner: bool) -> None:
        self._file = (run_dir / "gpu-turn.lock").open("a")
        self._wanted = run_dir / "gpu-turn.wanted"
        self._kind = fcntl.LOCK_EX if is_learner else fcntl.LOCK_SH

    @property
    def is_wanted(self) -> bool:
        """Whether the learner waits for its turn."""
        return self._wanted.exists()

    def take(self) -> None:
        """Wait for the turn."""
        while True:
            with suppress(BlockingIOError):
                fcntl.flock(self._file, self._kind | fcntl.LOCK_NB)
                return
            progress.advance()
            time.sleep(_WAIT_SECONDS)

    def give(self) -> None:
        """End the turn."""
        fcntl.flock(self._file, fcntl.LOCK_UN)

    @contextmanager
    def wanted(self) -> Iterator[None]:
        """As a context, a turn of the learner, for which engines go to sleep."""
        self._wanted.touch()
        self.take()
        self._wanted.unlink(missing_ok=True)
        try:
            yield
        finally:
            self.give()
