"""Checks free space on the run directory's disk, before the first step and during the run.

Nothing is reserved: a disk that others write to can still become full."""

from __future__ import annotations

import os
from pathlib import Path

from rhymeflow.errors import UserError, counted
from rhymeflow.utils.disk import size_text

INTERVAL_SECONDS = 60.0  # time between two checks of the disk

LOG_BYTES = 64 * 2**20  # room for the log and other small files


class DiskSpace:
    """Compares the free space in `run_dir` with checkpoints of `checkpoint_bytes` each."""

    def __init__(self, run_dir: Path, checkpoint_bytes: int) -> None:
        self._run_dir, self._checkpoint_bytes = run_dir, checkpoint_bytes
        self._checked_at: float | None = None
        self._is_short = False

    def check(self, save_total_limit: int, num_existing: int) -> None:
        """Raise `UserError` unless there is room for `save_total_limit` checkpoints (0, no limit:
        for one), of which `num_existing` exist already, and for one more that is being written."""
        count = max(1, (save_total_limit or 1) + 1 - num_existing)
        needed, free = count * self._checkpoint_bytes + LOG_BYTES, free_bytes(self._run_dir)
        if free < needed:
            raise UserError(
                f"{self._run_dir}: the disk has {size_text(free)} free, and the run needs "
                f"{size_text(needed)}: {counted(count, 'checkpoint')} of "
                f"{size_text(self._checkpoint_bytes)} (run.save_total_limit = {save_total_limit}) "
                "and its log; free space, or name a run.output_dir on another disk"
            )

    def warning(self, now: float) -> str | None:
        """Return a warning if space has become short by `now`, in seconds; else None."""
        if self._checked_at is not None and now - self._checked_at < INTERVAL_SECONDS:
            return None
        self._checked_at = now
        if not self._run_dir.is_dir():
            return None  # the store reports that
        was_short, free = self._is_short, free_bytes(self._run_dir)
        self._is_short = free < 2 * self._checkpoint_bytes + LOG_BYTES
        if was_short or not self._is_short:
            return None
        return (
            f"{self._run_dir}: the disk has {size_text(free)} free, less than two checkpoints "
            f"need ({size_text(self._checkpoint_bytes)} each): free space, or the run will stop"
        )


def is_full(run_dir: Path) -> bool:
    """Whether less than 1 MiB can be written to the disk of `run_dir`."""
    return run_dir.is_dir() and free_bytes(run_dir) < 2**20


def free_bytes(run_dir: Path) -> int:
    """Return the bytes that this user can still write to the disk of `run_dir`."""
    disk = os.statvfs(run_dir)
    return disk.f_bavail * disk.f_frsize
