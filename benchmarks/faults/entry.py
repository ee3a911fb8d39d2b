"""The command `rhymeflow`, whose messages between controller and workers come twice and late.

    python -m benchmarks.faults.entry SEED ACCOUNT train RECIPE

ACCOUNT is a file to which a line is added for each fault: `twice N` or `late N` messages.
"""

from __future__ import annotations

import os
import random
import sys
from collections import Counter
from functools import partial
from pathlib import Path

from benchmarks.faults.relay import Note, unreliable_pipe
from rhymeflow.runtime.local import LocalWorker


def main(arguments: list[str]) -> int:
    """Run one command and return its exit code."""
    from rhymeflow import cli

    seed, account, *command = arguments
    LocalWorker.pipe = staticmethod(  # type: ignore[method-assign]
        partial(unreliable_pipe, random.Random(int(seed)), noting(Path(account)))
    )
    return cli.main(command)


def noting(account: Path) -> Note:
    """Add lines to the account; a kill loses none."""
    descriptor = os.open(account, os.O_WRONLY | os.O_APPEND | os.O_CREAT | os.O_CLOEXEC, 0o644)

    def note(what: str, count: int) -> None:
        os.write(descriptor, f"{what} {count}\n".encode())

    return note


def counted(account: Path) -> Counter[str]:
    """What the account says."""
    counts = Counter[str]()
    if account.is_file():
        for line in account.read_text(encoding="utf-8").splitlines():
            what, count = line.split()
            counts[what] += int(count)
    return counts


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
