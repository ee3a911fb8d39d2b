"""Errors that users read, and what their lines are made of.

The command line prints the one line of a `UserError` (bad input) and exits with 2, or that of a
`RunError` (not caused by the input) and exits with 1. Any other exception is a defect of Rhymeflow
and keeps its traceback."""

import difflib
import shlex
from collections.abc import Iterable, Iterator
from contextlib import contextmanager


class UserError(ValueError):
    """Bad input: the message says what was given, where, and what would be right."""


class RunError(RuntimeError):
    """A run cannot continue; the message says why."""


class StorageError(RunError):
    """The disk is full, or files of the run are missing or damaged; the message says what to do."""


@contextmanager
def within(where: str) -> Iterator[None]:
    """Put `where` before the message of a `UserError` in the block."""
    try:
        yield
    except UserError as error:
        raise UserError(f"{where}: {error}") from None


def counted(number: int, noun: str) -> str:
    """Return number and noun, as `1 thread` or `2,000 batches`."""
    ending = "" if number == 1 else "es" if noun.endswith(("s", "ch")) else "s"
    return f"{number:,} {noun}{ending}"


def to_resume(run: object) -> str:
    """Return the command that resumes a run, quoted for a shell."""
    return f"rhymeflow resume {shlex.quote(str(run))}"


def closest(name: str, known: Iterable[str]) -> str | None:
    """Return the name in `known` that is most similar to `name`, if one is similar."""
    return next(iter(difflib.get_close_matches(name, sorted(known), n=1, cutoff=0.6)), None)


def suggestion(name: str, known: Iterable[str]) -> str:
    """Return `; did you mean X?`, or "" if no name is similar."""
    match = closest(name, known)
    return f"; did you mean {match}?" if match else ""


def nearest(name: str, known: Iterable[str]) -> str:
    """Return `; did you mean X?`, else the known names if there are at most 20, else ""."""
    names = sorted(known)
    listed = f"; there are: {', '.join(names)}" if 0 < len(names) <= 20 else ""
    return suggestion(name, names) or listed
