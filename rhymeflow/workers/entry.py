"""How a worker begins: name, cores, log, role, signs of life, what becomes of its errors.

It ignores Ctrl-C (the controller decides), ends with its controller, and reports what it dies of.
Only roles import torch, after the number of threads is set.
"""

from __future__ import annotations

import gc
import importlib
import os
import signal
import sys
import threading
import time
import traceback
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from multiprocessing import parent_process
from multiprocessing.connection import Connection, wait
from pathlib import Path
from typing import NamedTuple

from rhymeflow.config import Config
from rhymeflow.errors import UserError
from rhymeflow.utils import progress
from rhymeflow.utils.process import redirect_output, set_process_name
from rhymeflow.workers.channel import Channel
from rhymeflow.workers.messages import Alive, Failed, send

ORPHAN_SECONDS = 2.0
"""For a worker whose controller is gone to give back what it has."""

BEAT_SECONDS = 1.0

START_SECONDS = 3600.0
"""So long a sign of life is progress, as loading, compiling and vLLM's start are not counted in
pieces. The largest models load from slow disks in less."""


class Given(NamedTuple):
    """What a worker is started with; all of it can be written as JSON."""

    role: str
    """Which module of `rhymeflow.workers` it runs."""
    name: str
    config: str
    """As JSON."""
    run_dir: str
    """On the controller's node."""
    log: str
    """On the worker's own node."""
    num_threads: int
    cpus: Sequence[int] | None = None
    """Cores it is pinned to."""


def enter(connection: Connection, given: Given, environment: Mapping[str, str]) -> None:
    """Be a worker until its `main` returns or fails; `environment` is the controller's."""
    gc.enable()  # see `preload`
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    set_process_name(given.name)
    if (controller := parent_process()) is not None:  # else nobody started it as a worker
        end_with(controller.sentinel)
    if given.role in ("reward", "environment"):
        os.setsid()  # a signal that user code sends to its parent's group is not the run's
    os.environ.clear()  # the server that this was forked from has an older one
    os.environ.update(environment)
    if "torch" in sys.modules:  # else it reads the variable
        sys.modules["torch"].set_num_threads(given.num_threads)
    work(connection, given)


def work(connection: Connection, given: Given) -> None:
    """Run the role's `main`, and report how it fails."""
    redirect_output(Path(given.log))
    os.environ["OMP_NUM_THREADS"] = str(given.num_threads)
    channel = Channel(connection)
    try:
        if given.cpus is not None:
            os.sched_setaffinity(0, given.cpus)
        with beating(channel):
            main = importlib.import_module(f"rhymeflow.workers.{given.role}").main
            config = Config.model_validate_json(given.config)
            main(channel, given.name, config, Path(given.run_dir))
    except (EOFError, BrokenPipeError, ConnectionResetError):
        return  # the controller is gone, and with it the run
    except UserError as error:
        send(channel, Failed(str(error), user_error=True))
    except Exception:  # noqa: BLE001 - the boundary of the worker: every defect must be reported
        traceback.print_exc()  # to its log
        send(channel, Failed(traceback.format_exc(), user_error=False))


def end_with(controller: int) -> None:
    """End this process soon after the controller, even where it listens to nothing, as while it
    compiles. `controller` is a descriptor that becomes readable then."""

    def watch() -> None:
        wait([controller])
        time.sleep(ORPHAN_SECONDS)
        os._exit(1)

    threading.Thread(target=watch, daemon=True, name="controller's end").start()


@contextmanager
def beating(connection: Channel) -> Iterator[None]:
    """Send a sign of life about every second from a thread while the block runs, with the progress
    of the work (`utils/progress.py`), so that a worker whose work stands still is seen to hang."""
    over, began = threading.Event(), time.monotonic()

    def beat() -> None:
        with suppress(OSError):  # the controller is gone
            while not over.is_set():
                if not progress.has_started and time.monotonic() - began < START_SECONDS:
                    progress.advance()
                send(connection, Alive(progress.pieces))
                over.wait(BEAT_SECONDS)

    threading.Thread(target=beat, daemon=True, name="heartbeat").start()
    try:
        yield
    finally:
        over.set()
