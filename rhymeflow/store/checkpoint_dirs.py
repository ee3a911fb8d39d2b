"""A run's checkpoints: `step-N` for each saved version N, in the run directory or elsewhere.

RUN_DIR/checkpoints/step-N       complete, for it is written under another name
RUN_DIR/checkpoints              with `run.checkpoint_dir`, a file that names it
run.checkpoint_dir/owner.json    the run, and its attempt, that may write there
URL/step-N/complete.json         written last: the size of each file of the checkpoint"""

from __future__ import annotations

import os
import shutil
import socket
import sys
from collections.abc import Callable, Collection, Sequence
from contextlib import closing, suppress
from pathlib import Path
from tempfile import gettempdir
from typing import TYPE_CHECKING, NamedTuple

import msgspec

from rhymeflow.core.types import Version
from rhymeflow.errors import UserError
from rhymeflow.store.schema import EVENTS
from rhymeflow.utils.disk import check_writable, flush
from rhymeflow.utils.storage import Storage, Unreachable

if TYPE_CHECKING:
    from rhymeflow.store.reader import Attempt

CHECKPOINTS, OWNER, COMPLETE = "checkpoints", "owner.json", "complete.json"
UNFINISHED = ".unfinished"  # suffix of a directory that is still being written
AHEAD, DAMAGED = "ahead-of-the-log-", "damaged-"
"""Prefixes of checkpoints that are newer than the log, and of those that cannot be read."""
FIELD = "run.checkpoint_dir"


class Owner(NamedTuple):
    """A run and its attempt."""

    run: str
    attempt: str


class CheckpointDir:
    """A checkpoint in a directory, which has its name once it is complete and on the disk."""

    def __init__(self, path: Path, check: Callable[[], None] = lambda: None) -> None:
        """`check` raises `Unreachable` if it must not be written."""
        self._path, self._check = path, check
        self.files = path.with_name(path.name + UNFINISHED)
        """Directory for files that rank 0 writes."""
        self.target = str(self.files)  # directory or URL to which all ranks write

    def __str__(self) -> str:
        return str(self._path)

    @property
    def is_complete(self) -> bool:
        """Whether all of it was written."""
        return not self._path.name.endswith(UNFINISHED)

    def begin(self) -> None:
        """Make an empty directory for the files."""
        self._check()
        self.abandon()
        self.files.mkdir(parents=True)

    def abandon(self) -> None:
        """Delete the files."""
        shutil.rmtree(self.files, ignore_errors=True)

    def written(self, file: Path) -> None:
        """Take a large file that is complete in `files`."""

    def finish(self) -> None:
        """Flush all of it to the disk, then give it its name, replacing an older one."""
        for path in (*self.files.rglob("*"), self.files):
            flush(path)
        if self._path.exists():
            shutil.rmtree(self._path)
        self.files.rename(self._path)
        flush(self._path.parent)

    def counts(self, name: str) -> dict[str, int]:
        """Read a JSON file. Raises `UserError` if it is damaged, or files are missing."""
        if not (path := self._path / name).is_file():
            raise UserError(f"{self}: no checkpoint to resume from ({name} is missing)")
        try:
            return msgspec.json.decode(path.read_bytes(), type=dict[str, int])
        except msgspec.DecodeError as error:
            raise UserError(f"{self}: cannot be read: {name}: {error}") from None

    def set_aside(self, kind: str) -> None:
        """Prefix the name with `kind`, so that it no longer counts as a checkpoint."""
        aside = self._path.with_name(kind + self._path.name)
        shutil.rmtree(aside, ignore_errors=True)
        self._path.rename(aside)

    def remove(self) -> None:
        """Delete it; none that is half deleted is complete."""
        shutil.rmtree(self._path if not self.is_complete else self._path.rename(self.files))


class CheckpointUrl(CheckpointDir):
    """A checkpoint below a URL, where files come and go one by one."""

    def __init__(self, storage: Storage, name: str, check: Callable[[], None]) -> None:
        self._storage, self._name, self._check = storage, name, check
        self.files = Path(gettempdir()) / f"rhymeflow-{os.getpid()}-{name}"
        self.target, self._complete = f"{storage.url}/{name}", f"{name}/{COMPLETE}"

    def __str__(self) -> str:
        return self.target

    @property
    def is_complete(self) -> bool:
        """Whether all of it was written."""
        return self._storage.get(self._complete, dict[str, int]) is not None

    def begin(self) -> None:
        """Delete what is there, and make an empty directory for files on their way."""
        super().begin()
        self.remove()

    def written(self, file: Path) -> None:
        """Copy a file, and free its room here."""
        self._storage.put(f"{self._name}/{file.relative_to(self.files).as_posix()}", file)
        file.unlink()

    def finish(self) -> None:
        """Copy the other files, then write that it is complete."""
        for file in filter(Path.is_file, [*self.files.rglob("*")]):
            self.written(file)
        self.abandon()
        self._storage.write(self._complete, self._storage.sizes(self._name))

    def counts(self, name: str) -> dict[str, int]:
        """Read a JSON file. Raises `UserError` if it is damaged, or files are missing or cut."""
        get, sizes = self._storage.get, self._storage.sizes(self._name)
        for file, size in (get(self._complete, dict[str, int]) or {}).items():
            if sizes.get(file) != size:
                raise UserError(f"{self}: cannot be read: {file} is missing or cut short")
        if (found := get(f"{self._name}/{name}", dict[str, int])) is None:
            raise UserError(f"{self}: cannot be read: {name} is missing or damaged")
        return found

    def set_aside(self, kind: str) -> None:
        """Prefix the name with `kind`, so that it no longer counts as a checkpoint."""
        self._storage.remove(kind + self._name)
        self._storage.remove(self._complete)
        self._storage.rename(self._name, kind + self._name)

    def remove(self) -> None:
        """Delete it; none that is half deleted is complete."""
        self._storage.remove(self._complete)
        self._storage.remove(self._name)


class CheckpointPlace:
    """All checkpoints of a run. Methods raise `Unreachable`, if they are not in its directory."""

    def __init__(self, where: Path | str, owner: Owner | None = None) -> None:
        """`where`: a path in the run directory, or the value of `run.checkpoint_dir`, in which only
        `owner` may write. Raises `UserError` if fsspec does not know the kind of storage."""
        self.where, self._owner = where, owner
        self._storage = Storage(where, FIELD) if isinstance(where, str) else None
        self.is_elsewhere = self._storage is not None

    def at(self, version: Version) -> CheckpointDir:
        """Return the checkpoint of a version, which may not exist."""
        return self._named(f"step-{version}")

    def _named(self, name: str) -> CheckpointDir:
        if self._storage is not None and is_url(self._storage.url):
            return CheckpointUrl(self._storage, name, self.check_owner)
        return CheckpointDir(Path(self.where) / name, self.check_owner)

    def _all(self) -> dict[str, CheckpointDir]:
        storage, path = self._storage, Path(self.where)
        names = storage.names("") if storage else [each.name for each in path.glob("step-*")]
        return {name: self._named(name) for name in names if name.startswith("step-")}

    def up_to(self, newest: Version = sys.maxsize) -> dict[Version, CheckpointDir]:
        """Return the complete checkpoints of versions up to `newest`, in ascending order."""
        found = [(name, each) for name, each in self._all().items() if each.is_complete]
        versions = sorted((int(name.removeprefix("step-")), each) for name, each in found)
        return {version: each for version, each in versions if version <= newest}

    def set_aside_after(self, newest: Version) -> None:
        """Rename complete checkpoints of versions above `newest`, the last in the log: the resumed
        run may reach other weights under the same version numbers."""
        for version, checkpoint in self.up_to().items():
            if version > newest:
                checkpoint.set_aside(AHEAD)

    def remove_others(self, keep: Collection[Version]) -> None:
        """Delete unfinished checkpoints, and all others but those of versions `keep`."""
        kept = {f"step-{version}" for version in keep}
        for name, checkpoint in self._all().items():
            if name not in kept:
                checkpoint.remove()

    def claim(self) -> None:
        """Let the owner write here. Raises `UserError` if another run has checkpoints here."""
        if self._storage is not None and self._owner is not None:
            run = (self._storage.get(OWNER, Owner) or self._owner).run
            if run != self._owner.run and self._storage.names("") != [OWNER]:
                raise UserError(f"{FIELD}: {self.where} has checkpoints of another run ({run})")
            self._storage.write(OWNER, self._owner)

    def check_owner(self) -> None:
        """Raise `Unreachable` unless the owner was the last to claim the place."""
        if self._storage is not None and (found := self._storage.get(OWNER, Owner)) != self._owner:
            whose = f"are of {found.run}, attempt {found.attempt}" if found else "are of no run"
            raise Unreachable(f"{FIELD}: on {socket.gethostname()}, those in {self.where} {whose}")


def check_free(where: str | None) -> None:
    """Raise `UserError` if a new run cannot have `run.checkpoint_dir`. It would delete what others
    have there."""
    if where is None:
        return
    if not is_url(where):
        if ":/" in where:
            raise UserError(f"{FIELD}: {where}: a URL is written as in s3://bucket/run")
        check_writable(Path(where), FIELD)
    try:
        names = {*Storage(where, FIELD).names("")} - {OWNER}
    except Unreachable as error:
        raise UserError(f"{FIELD}: {error}") from None
    if names:
        raise UserError(f"{FIELD}: {where} has {min(names)}, and each run needs its own")


def owner_of(attempts: Sequence[Attempt]) -> Owner:
    """Return the last of a run's attempts as an owner of checkpoints."""
    first, last = attempts[0], attempts[-1]
    seed = msgspec.json.decode(first.config)["run"]["seed"]
    return Owner(f"{first.started}, seed {seed}", f"{last.number} of {last.started}")


def claimed_place(elsewhere: str | None, run_dir: Path) -> CheckpointPlace:
    """Return where the last attempt at the run in `run_dir` saves: in `elsewhere`, the value of
    `run.checkpoint_dir`, or in `run_dir`. Raises `UserError` if it cannot."""
    inside = run_dir / CHECKPOINTS
    if inside.is_file() if elsewhere is None else inside.is_dir():
        raise UserError(f"{FIELD}: {elsewhere}: the run's checkpoints are in {where_of(run_dir)}")
    if elsewhere is None:
        return CheckpointPlace(inside)
    from rhymeflow.store.reader import TrajectoryReader  # loads numpy

    if not is_url(elsewhere):
        check_writable(Path(elsewhere), FIELD)
    with closing(TrajectoryReader(run_dir / EVENTS)) as reader:
        place = CheckpointPlace(elsewhere, owner_of(reader.attempts()))
    _check_moved(CheckpointPlace(where_of(run_dir)), place)
    place.claim()
    inside.write_text(elsewhere, encoding="utf-8")
    return place


def _check_moved(old: CheckpointPlace, new: CheckpointPlace) -> None:
    """Raise `UserError` if a resumed run's checkpoints are not where it is told to go on saving:
    it would train on all batches again. An old place that cannot be reached says nothing."""
    if old.where != new.where and not new.up_to():
        with suppress(Unreachable):
            if saved := old.up_to():
                raise UserError(
                    f"{FIELD}: {new.where} has no checkpoint, and step-{max(saved)} of this run is "
                    f"in {old.where}: copy the checkpoints, or name that"
                )


def is_url(where: Path | str | None) -> bool:
    """Whether this is a URL and not a path."""
    return "://" in str(where)


def where_of(run_dir: Path) -> Path | str:
    """Return where the run in `run_dir` has its checkpoints, for a `CheckpointPlace`."""
    inside = run_dir / CHECKPOINTS
    return inside.read_text(encoding="utf-8") if inside.is_file() else inside


def paths_of(run_dir: Path) -> dict[Version, Path]:
    """Return the complete checkpoints of the run in `run_dir`, in ascending order; of those below a
    URL none."""
    where = where_of(run_dir)
    found = {} if is_url(where) else CheckpointPlace(where).up_to()
    return {version: Path(str(each)) for version, each in found.items()}


def newest_of(run_dir: Path) -> Path | None:
    """Return the newest complete checkpoint of the run in `run_dir`, None if it has none. Raises
    `UserError` if they are below a URL."""
    if is_url(where := where_of(run_dir)):
        raise UserError(f"{run_dir}: its checkpoints are in {where}: copy one, and name that")
    found = paths_of(run_dir)
    return found[max(found)] if found else None
