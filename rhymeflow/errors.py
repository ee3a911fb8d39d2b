"""The one error a user is meant to read.

Everything a user can get wrong (a field, a file, a row, a reward function, a missing package)
raises `UserError` with one line that names what and where; the command line prints that line and
exits with 2. Any other exception is a defect of Rhymeflow and keeps its traceback.
"""

import difflib
from collections.abc import Iterable


class UserError(ValueError):
    """Bad input: the message says what was given, where, and what would be right."""


def nearest(name: str, known: Iterable[str]) -> str:
    """`; did you mean ...?`, or the known names if few, or nothing."""
    names = sorted(known)
    close = difflib.get_close_matches(name, names, n=1, cutoff=0.5)
    if close:
        return f"; did you mean {close[0]!r}?"
    return f"; there are: {', '.join(names)}" if 0 < len(names) <= 20 else ""
