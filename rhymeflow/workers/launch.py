"""Runs a worker in a separate interpreter: python -m rhymeflow.workers.launch FD [openmp]

It is for workers that cannot be forked because their libraries differ from the controller's. FD is
the worker's end of the pipe, whose first message is its `entry.WorkerSetup`. `openmp`: load Intel's
OpenMP first, if this environment has it."""

from __future__ import annotations

import json
import os
import sys
from multiprocessing.connection import Connection
from pathlib import Path

OPENMP = "libiomp5.so"  # without it vLLM's kernels for CPUs take three times as long (docs/vllm.md)


def main() -> None:
    """Run the worker in this process."""
    descriptor, *options = sys.argv[1:]
    if "openmp" in options and (library := missing_openmp(Path(sys.prefix), os.environ)):
        before = os.environ.get("LD_PRELOAD")
        # Idle threads should release their cores soon.
        os.environ.setdefault("KMP_BLOCKTIME", "5")
        os.environ["LD_PRELOAD"] = f"{library}:{before}" if before else str(library)
        os.execv(sys.executable, sys.orig_argv)  # the same program, with the library
    from rhymeflow.workers import entry

    if hasattr(os, "pidfd_open"):  # elsewhere it ends when it next reads a message
        entry.end_with(os.pidfd_open(os.getppid()))
    connection = Connection(int(descriptor))
    setup = entry.WorkerSetup(*json.loads(connection.recv_bytes()))
    entry.enter(connection, setup, dict(os.environ))


def missing_openmp(prefix: Path, environment: os._Environ[str] | dict[str, str]) -> Path | None:
    """Return the OpenMP library of the Python at `prefix`; None: it has none, or it is loaded."""
    library = prefix / "lib" / OPENMP
    is_loaded = OPENMP in environment.get("LD_PRELOAD", "")
    return library if library.is_file() and not is_loaded else None


if __name__ == "__main__":
    main()
