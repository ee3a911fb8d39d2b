"""Where numba keeps what it compiles: a directory named by sources, numba's version and Python's.

numba notices a change in the file of a compiled function only: not in what that function calls
elsewhere, nor that a type of its arguments has moved. A change anywhere in `ROOMS` is another
directory instead. Deleting these directories is always safe.
"""

from __future__ import annotations

import hashlib
import os
import stat
import sys
import tempfile
from importlib.metadata import version
from pathlib import Path

PACKAGE = Path(__file__).parents[1]
ROOMS = ("cpu", "histospec", "weights")
"""Where compiled code is."""
_PREFIX = "compiled-"


def ensure(package: Path = PACKAGE) -> None:
    """Name the directory, inside `NUMBA_CACHE_DIR` if that is set, to numba, imported later."""
    given = os.environ.get("NUMBA_CACHE_DIR")
    folder = Path(given) if given else _user_directory()
    if folder.name.startswith(_PREFIX):  # a parent process has called this
        folder = folder.parent
    os.environ["NUMBA_CACHE_DIR"] = str(folder / f"{_PREFIX}{_digest(package)}")


def _digest(package: Path) -> str:
    found = hashlib.blake2b(f"{version('numba')} {sys.version_info[:2]}".encode(), digest_size=8)
    for room in ROOMS:
        for file in sorted((package / room).rglob("*.py")):
            found.update(f"\0{file.relative_to(package)}\0".encode() + file.read_bytes())
    return found.hexdigest()


def _user_directory() -> Path:
    """The user's cache; where that cannot be written, a directory that this user alone can write,
    since numba trusts what it finds there."""
    cache = Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "rhymeflow"
    if _can_write(cache):
        return cache
    folder = Path(tempfile.gettempdir()) / f"rhymeflow-numba-{os.getuid()}"
    folder.mkdir(mode=0o700, exist_ok=True)
    found = folder.lstat()
    if stat.S_ISDIR(found.st_mode) and found.st_uid == os.getuid() and not found.st_mode & 0o022:
        return folder
    return Path(tempfile.mkdtemp(prefix="rhymeflow-numba-"))


def _can_write(folder: Path) -> bool:
    """Whether it can be written, or made where it is missing."""
    while not folder.exists():
        folder = folder.parent
    return folder.is_dir() and os.access(folder, os.W_OK)
