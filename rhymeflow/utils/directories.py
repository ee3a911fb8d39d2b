"""Directories that are made for something that may fail, and then taken away.

Holds true: only what was made is removed, and only what is empty.
"""

from __future__ import annotations

import tempfile
from collections.abc import Iterable
from contextlib import suppress
from pathlib import Path

from rhymeflow.errors import UserError


def check_writable(path: Path, field: str) -> None:
    """Try to write where `path` is, or would be; leaves nothing. `field` gave it.

    Raises:
        UserError: it cannot be written.
    """
    there = next(each for each in (path, *path.absolute().parents) if each.exists())
    try:  # permissions say little: root has them on file systems that nobody can write to
        with tempfile.TemporaryDirectory(dir=there):
            pass
    except OSError as error:
        reason = f"{there}: {error.strerror}"
        raise UserError(f"{field}: {path} cannot be written: {reason}") from None


def make(path: Path, *, exist_ok: bool) -> list[Path]:
    """Make a directory; return it and its parents as far as they were not there, itself first.

    Raises:
        OSError: it cannot be made, or `FileExistsError`: it was made by somebody else.
    """
    missing = [each for each in (path, *path.parents) if not each.exists()]
    path.mkdir(parents=True, exist_ok=exist_ok)
    return missing


def remove_if_empty(made: Iterable[Path]) -> None:
    """Remove these directories in their order, as far as nothing is in them."""
    for each in made:
        with suppress(OSError):
            each.rmdir()


__all__ = ["check_writable", "make", "remove_if_empty"]
