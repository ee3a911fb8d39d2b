"""Where compiled code is kept when numba has no place for it.

numba keeps it beside the source or in the user's cache directory, and where neither can be written
(a container with a read-only image and no home), importing a function that is to be kept fails.

Holds true: `NUMBA_CACHE_DIR` is left alone if it is set; the directory chosen here can be written
by this user only, since numba trusts what it finds there.
"""

from __future__ import annotations

import os
import stat
import tempfile
from pathlib import Path

PACKAGE = Path(__file__).parents[1]


def ensure(package: Path = PACKAGE) -> None:
    """Name a directory to numba, which is imported later, if it would find none."""
    home = Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache")
    if "NUMBA_CACHE_DIR" not in os.environ and not (_can_write(package) or _can_write(home)):
        os.environ["NUMBA_CACHE_DIR"] = str(_own_directory())


def _can_write(folder: Path) -> bool:
    """Whether it can be written, or made where it is missing."""
    while not folder.exists():
        folder = folder.parent
    return folder.is_dir() and os.access(folder, os.W_OK)


def _own_directory() -> Path:
    folder = Path(tempfile.gettempdir()) / f"rhymeflow-numba-{os.getuid()}"
    folder.mkdir(mode=0o700, exist_ok=True)
    found = folder.lstat()
    if stat.S_ISDIR(found.st_mode) and found.st_uid == os.getuid() and not found.st_mode & 0o022:
        return folder
    return Path(tempfile.mkdtemp(prefix="rhymeflow-numba-"))
