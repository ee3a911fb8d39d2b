"""A worker in an interpreter of its own: python -m rhymeflow.workers.launch FD [openmp]

Where a worker's libraries differ from the controller's, it cannot be forked from the server of
`processes`. FD is its end of the pipe, whose first message is its `entry.Given`. `openmp`:
Intel's OpenMP is loaded before anything else if this environment has it, so nothing heavy is
imported before that.
"""

from __future__ import annotations

import json
import os
import sys
from multiprocessing.connection import Connection
from pathlib import Path

OPENMP = "libiomp5.so"
"""Without it vLLM's kernels for CPUs, stepped in the process that they run in, take three times as
long (docs/vllm.md)."""


def main() -> None:
    """Become the worker."""
    descriptor, *options = sys.argv[1:]
    if "openmp" in options and (library := missing_openmp(Path(sys.prefix), os.environ)):
        before = os.environ.get("LD_PRELOAD")
        # Threads that have nothing to do shall not keep others from the core for long.
        os.environ.setdefault("KMP_BLOCKTIME", "5")
        os.environ["LD_PRELOAD"] = f"{library}:{before}" if before else str(library)
        os.execv(sys.executable, sys.orig_argv)  # the same program, with the library
    from rhymeflow.workers import entry

    if hasattr(os, "pidfd_open"):  # elsewhere it ends when it next listens
        entry.end_with(os.pidfd_open(os.getppid()))
    connection = Connection(int(descriptor))
    given = entry.Given(*json.loads(connection.recv_bytes()))
    entry.enter(connection, given, dict(os.environ))


def missing_openmp(prefix: Path, environment: os._Environ[str] | dict[str, str]) -> Path | None:
    """The OpenMP library of the environment at `prefix`, unless it is loaded or not there."""
    library = prefix / "lib" / OPENMP
    is_there = OPENMP in environment.get("LD_PRELOAD", "")
    return library if library.is_file() and not is_there else None


if __name__ == "__main__":
    main()
