"""A small disk that can be filled: a file system in memory (Linux, by root).

Holds true: it is gone when its context ends, with all that is on it.
"""

from __future__ import annotations

import errno
import os
import subprocess
import sys
from pathlib import Path

NUM_BYTES = 2 * 2**30
"""Far more than a run of the demo writes."""
_BALLAST = "ballast"
_CHUNK = bytes(2**20)


def can_mount() -> bool:
    """Whether such a disk can be had here."""
    return sys.platform == "linux" and os.geteuid() == 0


class SmallDisk:
    """A disk at `folder`, which is made."""

    def __init__(self, folder: Path, num_bytes: int = NUM_BYTES) -> None:
        folder.mkdir()
        options = f"size={num_bytes}"
        subprocess.run(["mount", "-t", "tmpfs", "-o", options, "tmpfs", str(folder)], check=True)
        self.folder = folder

    def fill(self) -> None:
        """Take all that is left, to the last byte."""
        with (self.folder / _BALLAST).open("ab", buffering=0) as ballast:
            size = len(_CHUNK)
            while size:
                try:
                    ballast.write(_CHUNK[:size])
                except OSError as error:
                    if error.errno != errno.ENOSPC:
                        raise
                    size //= 2

    def free(self) -> None:
        """Give it back."""
        (self.folder / _BALLAST).unlink(missing_ok=True)

    def __enter__(self) -> SmallDisk:
        return self

    def __exit__(self, *_: object) -> None:
        subprocess.run(["umount", "--lazy", str(self.folder)], check=True)
        self.folder.rmdir()
