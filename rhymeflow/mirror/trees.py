"""Directories of a run that are copied whole: checkpoints, and the `inputs/` of `Trainer`.

A checkpoint takes long to copy, and its run deletes it when there are newer ones. So what is being
copied is held by hard links, in a thread of its own, one directory at a time, the newest first.

Holds true: a directory that is said to be there is there whole. Knows nothing of the log.
"""

from __future__ import annotations

import os
import shutil
import sys
import threading
from concurrent.futures import Future
from pathlib import Path

import xxhash

from rhymeflow.mirror.objects import Tree
from rhymeflow.mirror.remote import Remote, Unreachable
from rhymeflow.store.checkpoint_dirs import CHECKPOINTS, checkpoints_up_to

HELD = "mirror-upload"
"""In the run directory: what is being copied."""

INPUTS = "inputs"

KEPT = 2
"""Checkpoints that stay in the mirror, whatever the run keeps."""

_CHUNK = 2**22


def version_of(path: str) -> int | None:
    """The version of a checkpoint by its path in the run directory; None of other directories."""
    parent, _, name = path.rpartition("/")
    return int(name.removeprefix("step-")) if parent == CHECKPOINTS else None


class Trees:
    """Copies what is new to `lineage`; `copied` is what is there."""

    def __init__(self, run_dir: Path, remote: Remote, copied: dict[str, Tree]) -> None:
        self._run_dir, self._remote, self.copied = run_dir, remote, copied
        self._copying: tuple[str, Future[Tree]] | None = None
        shutil.rmtree(run_dir / HELD, ignore_errors=True)

    @property
    def is_busy(self) -> bool:
        """Whether a directory is being copied, or there is one to copy."""
        return self._copying is not None or self._next() is not None

    def advance(self, lineage: str) -> None:
        """Take what was copied, and begin with the next one. Raises what became of the copying."""
        if self._copying is not None:
            path, copying = self._copying
            if not copying.done():
                return
            self._copying = None
            shutil.rmtree(self._run_dir / HELD, ignore_errors=True)
            self.copied[path] = copying.result()
        following = self._next()
        if following is not None and self._hold(following):
            copying = Future[Tree]()
            self._copying = following, copying
            place = f"{lineage}/trees/{following}"
            # A daemon: storage that hangs must not hold up the end of the program.
            threading.Thread(
                target=self._copy, args=(following, place, copying), daemon=True, name="mirror-tree"
            ).start()

    def outdated(self) -> list[str]:
        """Copied checkpoints that the run does not have any more, but for the newest ones."""
        versions = {path: version_of(path) for path in self.copied}
        known = sorted((v, path) for path, v in versions.items() if v is not None)
        there = self._checkpoints()
        return [path for _, path in known[:-KEPT] if path not in there]

    def close(self) -> None:
        """Begin nothing more. What is being copied is not whole then."""
        shutil.rmtree(self._run_dir / HELD, ignore_errors=True)

    def _checkpoints(self) -> list[str]:
        found = checkpoints_up_to(self._run_dir / CHECKPOINTS, sys.maxsize)
        return [f"{CHECKPOINTS}/{path.name}" for path in found.values()]

    def _next(self) -> str | None:
        inputs = [INPUTS] if (self._run_dir / INPUTS).is_dir() else []
        wanted = (*inputs, *reversed(self._checkpoints()))
        return next((path for path in wanted if path not in self.copied), None)

    def _hold(self, path: str) -> bool:
        """Whether the directory is still there, and now stays until it is copied."""
        try:
            shutil.copytree(
                self._run_dir / path, self._run_dir / HELD / path, copy_function=os.link
            )
        except (OSError, shutil.Error) as error:
            shutil.rmtree(self._run_dir / HELD, ignore_errors=True)
            if (self._run_dir / path).is_dir():
                raise Unreachable(f"cannot hold {path} by hard links: {error}") from None
            return False  # a newer one is complete
        return True

    def _copy(self, path: str, place: str, copying: Future[Tree]) -> None:
        source, files = self._run_dir / HELD / path, {}
        try:
            for file in sorted(source.rglob("*")):
                if file.is_file():
                    name = file.relative_to(source).as_posix()
                    self._remote.put_file(f"{place}/{name}", file)
                    files[name] = (file.stat().st_size, file_digest(file))
        except BaseException as error:  # noqa: BLE001 - whoever asks for the result gets it
            copying.set_exception(error)
        else:
            copying.set_result(Tree(place, files))


def file_digest(path: Path) -> str:
    """As `objects.digest`, of a file."""
    found = xxhash.xxh3_128()
    with path.open("rb") as file:
        while chunk := file.read(_CHUNK):
            found.update(chunk)
    return found.hexdigest()
