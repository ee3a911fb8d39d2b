"""Directories that are made for something that may fail, and then taken away.

Holds true: only what was made is removed, and only what is empty.
"""

from __future__ import annotations

from collections.abc import Iterable
from contextlib import suppress
from pathlib import Path


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


__all__ = ["make", "remove_if_empty"]
