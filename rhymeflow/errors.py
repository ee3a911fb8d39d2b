"""Errors that users read, and suggestions for unknown names.

A mistake of the user's raises `UserError` with one line that says what and where; the command line
prints it and exits with 2. A `RunError` is not caused by the input: one line too, and exit code 1.
Any other exception is a defect of Rhymeflow and keeps its traceback.
"""

import difflib
import shlex
from collections.abc import Iterable


class UserError(ValueError):
    """Bad input: the message says what was given, where, and what would be right."""


class RunError(RuntimeError):
    """A run cannot continue; the message says all that there is to know."""


class StorageError(RunError):
    """The disk is full, or files of the run are gone or damaged: what, where, and what to do."""


def to_resume(run: object) -> str:
    """The command that resumes a run, quoted for a shell."""
    return f"rhymeflow resume {shlex.quote(str(run))}"


def closest(name: str, known: Iterable[str]) -> str | None:
    """Return the name in `known` that is most similar to `name`, if one is similar."""
    return next(iter(difflib.get_close_matches(name, sorted(known), n=1, cutoff=0.6)), None)


def suggestion(name: str, known: Iterable[str]) -> str:
    """Return `; did you mean X?`, or "" if no name is similar."""
    found = closest(name, known)
    return f"; did you mean {found}?" if found else ""


def nearest(name: str, known: Iterable[str]) -> str:
    """Return `; did you mean X?`, or up to 20 known names, or ""."""
    names = sorted(known)
    few = f"; there are: {', '.join(names)}" if 0 < len(names) <= 20 else ""
    return suggestion(name, names) or few
