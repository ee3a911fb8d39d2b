"""A worker in an interpreter of its own: python -m rhymeflow.workers.launch FD [openmp]

For a worker whose libraries differ from the controller's, so that it cannot be forked. FD is its
end of the pipe, whose first message is its `entry.Given`. `openmp`: load Intel's OpenMP before all
else, if this environment has it.
"""

from __future__ import annotations

import json
import os
import sys
from multiprocessing.connection import Connection
from pathlib import Path

OPENMP = "libiomp5.so"
"""Without it vLLM's kernels for CPUs take three times as long (docs/vllm.md)."""


def main() -> None:
    """Become the worker."""
    descriptor, *options = sys.argv[1:]
    if "openmp" in options and (library := missing_openmp(Path(sys.prefix), os.environ)):
        before = os.environ.get("LD_PRELOAD")
        # Idle threads are not to keep the core for long.
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
