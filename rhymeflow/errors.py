"""The one error a user is meant to read, and what it says of names that are not known.

Everything a user can get wrong raises `UserError` with one line that names what and where; the
command line prints it and exits with 2. A `RunError` is no fault of the input: one line too, and 1.
Any other exception is a defect of Rhymeflow and keeps its traceback.
"""

import difflib
import shlex
from collections.abc import Iterable


class UserError(ValueError):
    """Bad input: the message says what was given, where, and what would be right."""


class RunError(RuntimeError):
    """A run cannot go on: what happened, to which no traceback would add anything."""


class StorageError(RunError):
    """The disk is full, or what a run had written is gone or damaged: what, where, what to do."""


def to_resume(run: object) -> str:
    """The command that goes on with a run, as it is to be typed."""
    return f"rhymeflow resume {shlex.quote(str(run))}"


def closest(name: str, known: Iterable[str]) -> str | None:
    """Return the one of `known` that is most like `name`, if any is alike."""
    return next(iter(difflib.get_close_matches(name, sorted(known), n=1, cutoff=0.6)), None)


def suggestion(name: str, known: Iterable[str]) -> str:
    """Return `; did you mean X?`, or nothing where no name is alike."""
    found = closest(name, known)
    return f"; did you mean {found}?" if found else ""


def nearest(name: str, known: Iterable[str]) -> str:
    """Return `; did you mean X?`, or the known names if few, or nothing."""
    names = sorted(known)
    few = f"; there are: {', '.join(names)}" if 0 < len(names) <= 20 else ""
    return suggestion(name, names) or few
