"""The storage that a mirror is in: files by their name, through fsspec.

Holds true: whatever a file system does that is not what was asked of it is one `Unreachable`, in a
line; what was written has the size that it was to have; what `put` replaces is there until all of
the new is (object stores do so by themselves). Knows nothing of what is stored, and does not try
again.
"""

from __future__ import annotations

import os
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from fsspec.core import url_to_fs
from fsspec.implementations.local import LocalFileSystem

from rhymeflow.errors import UserError


class Unreachable(RuntimeError):  # noqa: N818 - it is what happened
    """The storage did not do what it was asked to."""


class Remote:
    """What is below `url`, a path or what fsspec takes for one."""

    def __init__(self, url: str) -> None:
        """Raise `UserError` if there is no such kind of storage."""
        self.url = url
        try:
            self._fs, root = url_to_fs(url, use_listings_cache=False)
        except ImportError as error:  # it names the package
            raise UserError(f"run.mirror: {url}: {error}") from None
        except (ValueError, TypeError) as error:
            known = ", ".join(("file", "s3", "gs", "abfs", "hdfs", "sftp"))
            raise UserError(f"run.mirror: {url}: {error} (such as: {known})") from None
        self._root = root.rstrip("/")
        self._made: set[str] = set()

    def put(self, name: str, data: bytes) -> None:
        """Write one file, in place of one that is there."""
        with self._explained("write", name):
            path = self._path(name, make=True)
            if isinstance(self._fs, LocalFileSystem):
                self._fs.pipe_file(f"{path}.unfinished", data)
                self._check_size(f"{name}.unfinished", len(data))
                os.replace(f"{path}.unfinished", path)
            else:
                self._fs.pipe_file(path, data)
                self._check_size(name, len(data))

    def put_file(self, name: str, source: Path) -> None:
        """Copy a local file there."""
        with self._explained("write", name):
            size = source.stat().st_size
            self._fs.put_file(str(source), self._path(name, make=True))
            self._check_size(name, size)

    def get(self, name: str) -> bytes | None:
        """What is in a file; None if there is none."""
        with self._explained("read", name):
            try:
                data: bytes = self._fs.cat_file(self._path(name))
            except FileNotFoundError:
                return None
            return data

    def get_file(self, name: str, target: Path) -> bool:
        """Copy a file from there; False if there is none."""
        with self._explained("read", name):
            try:
                self._fs.get_file(self._path(name), str(target))
            except FileNotFoundError:
                return False
            return True

    def names(self, directory: str) -> list[str]:
        """What is directly in a directory, in alphabetical order."""
        with self._explained("list", directory):
            try:
                found = self._fs.ls(self._path(directory), detail=False)
            except FileNotFoundError:
                return []
            return sorted({path.rstrip("/").rpartition("/")[2] for path in found})

    def remove(self, name: str) -> None:
        """Take away a file, or a directory with all in it, if it is there."""
        with self._explained("delete", name):
            try:
                self._fs.rm(self._path(name), recursive=True)
            except FileNotFoundError:
                return

    def _path(self, name: str, *, make: bool = False) -> str:
        path = f"{self._root}/{name}"
        directory = path.rpartition("/")[0]
        if make and directory not in self._made:
            self._fs.makedirs(directory, exist_ok=True)
            self._made.add(directory)
        return path

    def _check_size(self, name: str, expected: int) -> None:
        found = self._fs.size(self._path(name))
        if found != expected:
            raise OSError(f"{found} of {expected} bytes were written")

    @contextmanager
    def _explained(self, what: str, name: str) -> Iterator[None]:
        try:
            yield
        except Exception as error:
            self._made.clear()  # somebody may have deleted them
            said = " ".join(str(error).split()) or type(error).__name__
            raise Unreachable(f"cannot {what} {name}: {said[:200]}") from error
