"""Chooses numba's cache directory, by a hash of the sources and the versions of numba and Python.

numba notices a change only in the file of a compiled function, not in functions that it calls in
other files or in types of its arguments. So a change anywhere in `ROOMS` gives another directory.
Deleting these directories is always safe."""

from __future__ import annotations

import hashlib
import os
import stat
import sys
import tempfile
from importlib.metadata import version
from pathlib import Path

PACKAGE = Path(__file__).parents[1]
ROOMS = ("cpu", "histospec", "weights")  # subpackages with compiled functions
_PREFIX = "compiled-"


def ensure(package: Path = PACKAGE) -> None:
    """Set `NUMBA_CACHE_DIR`, to a directory inside its present value if there is one. Call it
    before numba is imported."""
    present = os.environ.get("NUMBA_CACHE_DIR")
    folder = Path(present) if present else _user_directory()
    if folder.name.startswith(_PREFIX):  # a parent process has called this
        folder = folder.parent
    os.environ["NUMBA_CACHE_DIR"] = str(folder / f"{_PREFIX}{_digest(package)}")


def _digest(package: Path) -> str:
    digest = hashlib.blake2b(f"{version('numba')} {sys.version_info[:2]}".encode(), digest_size=8)
    for room in ROOMS:
        for file in sorted((package / room).rglob("*.py")):
            digest.update(f"\0{file.relative_to(package)}\0".encode() + file.read_bytes())
    return digest.hexdigest()


def _user_directory() -> Path:
    """Return the user's cache directory, or if that cannot be written, one that only this user can
    write, because numba executes what it finds there."""
    cache = Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "rhymeflow"
    if _can_write(cache):
        return cache
    folder = Path(tempfile.gettempdir()) / f"rhymeflow-numba-{os.getuid()}"
    folder.mkdir(mode=0o700, exist_ok=True)
    status = folder.lstat()
    if stat.S_ISDIR(status.st_mode) and status.st_uid == os.getuid() and not status.st_mode & 0o022:
        return folder
    return Path(tempfile.mkdtemp(prefix="rhymeflow-numba-"))


def _can_write(folder: Path) -> bool:
    """Whether the directory can be written, or created if it is missing."""
    while not folder.exists():
        folder = folder.parent
    return folder.is_dir() and os.access(folder, os.W_OK)
