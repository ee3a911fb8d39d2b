"""Files below a path or URL that fsspec knows: an object store, or a shared file system."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import TypeVar

import msgspec
import xxhash
from msgspec import DecodeError

from rhymeflow.errors import StorageError, UserError
from rhymeflow.utils.disk import flush

T = TypeVar("T")


class Unreachable(StorageError):  # noqa: N818 - it is what happened
    """The storage failed, or another run or a later attempt writes there."""


class Damaged(Exception):  # noqa: N818 - it is what happened
    """A file is missing or changed; arguments are its name and what is wrong."""


class StoredFile(msgspec.Struct, frozen=True):
    """A file in the storage: its name there, and the digest of its content."""

    name: str
    digest: str


class Storage:
    """Files below `url`, a path or URL that fsspec knows. Methods raise `Unreachable`."""

    def __init__(self, url: str, field: str) -> None:
        """`field`: of the configuration, which names it. Raise `UserError` if fsspec does not know
        the kind of storage, or needs a package that is not installed."""
        from fsspec.core import url_to_fs  # type: ignore[import-untyped]

        self.url = url
        try:
            self._fs, root = url_to_fs(url, use_listings_cache=False)
        except ImportError as error:  # it names the package
            raise UserError(f"{field}: {url}: {error}") from None
        except (ValueError, TypeError) as error:
            known = "such as: file, s3, gs, abfs, hdfs, sftp"
            raise UserError(f"{field}: {url}: {error} ({known})") from None
        self._root = root.rstrip("/")

    def put(self, name: str, source: Path) -> StoredFile:
        """Write a copy of a file."""
        with self._explained("write", name) as path:
            size, content = source.stat().st_size, digest(source)
            self._fs.makedirs(path.rpartition("/")[0], exist_ok=True)
            self._fs.put_file(str(source), path)
            self._check_size(path, size)
            return StoredFile(name, content)

    def write(self, name: str, value: object) -> None:
        """Write a value as a JSON file."""
        with self._explained("write", name) as path:
            content = msgspec.json.encode(value)
            self._fs.makedirs(path.rpartition("/")[0], exist_ok=True)
            self._fs.pipe_file(path, content)
            self._check_size(path, len(content))

    def _check_size(self, path: str, size: int) -> None:
        if (written := self._fs.size(path)) != size:
            raise OSError(f"{written} of {size} bytes were written")

    def get(self, name: str, kind: type[T]) -> T | None:
        """Read a JSON file as `kind`; return None if it is missing or incomplete."""
        with self._explained("read", name) as path, suppress(FileNotFoundError, DecodeError):
            return msgspec.json.decode(self._fs.cat_file(path), type=kind)
        return None

    def get_file(self, stored: StoredFile, target: Path) -> None:
        """Copy a file from the storage to `target`. Raises `Damaged`."""
        target.parent.mkdir(parents=True, exist_ok=True)
        content = None
        with self._explained("read", stored.name) as path, suppress(FileNotFoundError):
            self._fs.get_file(path, str(target))
            content = digest(target)
        if content != stored.digest:
            raise Damaged(stored.name, "is cut short or changed" if content else "is missing")
        flush(target)

    def names(self, directory: str) -> list[str]:
        """Return the sorted names of files and directories in a directory, [] if it is missing."""
        with self._explained("list", directory) as path, suppress(FileNotFoundError):
            paths = {each.rstrip("/") for each in self._fs.ls(path, detail=False)}
            # An object store may list the directory itself, as an empty object.
            return sorted(each.rpartition("/")[2] for each in paths - {path})
        return []

    def sizes(self, directory: str) -> dict[str, int]:
        """Return the size of each file below a directory, by its path there."""
        with self._explained("list", directory) as path:
            found = self._fs.find(path, detail=True)
            return {name[len(path) + 1 :]: each["size"] for name, each in found.items()}

    def rename(self, name: str, new: str) -> None:
        """Give a directory a new name."""
        with self._explained("rename", name) as path:
            self._fs.mv(path, f"{self._root}/{new}", recursive=True)

    def remove(self, name: str) -> None:
        """Delete a file or directory, if it is there."""
        with self._explained("delete", name) as path, suppress(FileNotFoundError):
            self._fs.rm(path, recursive=True)

    @contextmanager
    def _explained(self, action: str, name: str) -> Iterator[str]:
        """Yield the path of a file; turn any error in the block into `Unreachable`."""
        try:
            yield f"{self._root}/{name}".rstrip("/")
        except Exception as error:  # each kind of storage has its own errors
            message = " ".join(str(error).split()) or type(error).__name__
            raise Unreachable(f"cannot {action} {self.url}/{name}: {message[:200]}") from error


def digest(path: Path) -> str:
    """Return the hash of a file's content as 32 hexadecimal digits."""
    content = xxhash.xxh3_128()
    with path.open("rb") as file:
        while chunk := file.read(2**22):
            content.update(chunk)
    return content.hexdigest()
