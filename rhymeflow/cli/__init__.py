"""The command line: one small function per command.

Exit codes: 0 on success; 2 on bad input, with one line on stderr; 1 if a worker died or hangs, or
the disk is full; 130 after Ctrl-C (a dashboard: 0, since that is how it ends); 141 if the reader of
a pipe has ended. A defect keeps its traceback. A command imports what it needs when it is called,
so that `rhymeflow --help` is quick.
"""

from __future__ import annotations

import sys
from collections.abc import Sequence


def main(arguments: Sequence[str] | None = None) -> int:
    """Run one command and return its exit code."""
    try:
        from rhymeflow.cli import dispatch  # takes a tenth of a second, in which Ctrl-C may come

        return dispatch.main(arguments)
    except KeyboardInterrupt:
        print("rhymeflow: interrupted", file=sys.stderr)
        exec("")  # else, of a signal inside of an `exec`, `python -m` would end by the signal
        return 130
