"""Runs a worker's role, with its cores, log and heartbeat, and reports its errors.

A worker ignores Ctrl-C (the controller decides), ends with its controller, and reports what it dies
of. Only roles import torch, after the number of threads is set."""

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
from rhymeflow.errors import StorageError, UserError
from rhymeflow.utils import progress
from rhymeflow.utils.process import redirect_output, set_process_name
from rhymeflow.workers.channel import Channel
from rhymeflow.workers.messages import Alive, Failed, send

ORPHAN_SECONDS = 2.0  # time that a worker has to release its resources once its controller is gone

BEAT_SECONDS = 1.0  # time between two heartbeats

START_SECONDS = 3600.0
"""While a worker starts, each heartbeat counts as progress for this long: loading, compiling and
vLLM's start report none. The largest models take less to load from slow disks."""


class WorkerSetup(NamedTuple):
    """What a worker is started with; every field can be written as JSON."""

    role: str  # the module of `rhymeflow.workers` that it runs
    name: str
    config: str  # as JSON
    run_dir: str  # on the controller's node
    log: str  # on the worker's node
    num_threads: int
    cpus: Sequence[int] | None = None  # cores that it is pinned to


def enter(connection: Connection, setup: WorkerSetup, environment: Mapping[str, str]) -> None:
    """Run a worker in this process until it ends; `environment` is the controller's."""
    gc.enable()  # see `preload`
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    set_process_name(setup.name)
    if (controller := parent_process()) is not None:  # it was started by `multiprocessing`
        end_with(controller.sentinel)
    if setup.role in ("reward", "environment"):
        os.setsid()  # user code that signals its process group must not signal the run
    os.environ.clear()  # a process that was forked has the environment of the fork server
    os.environ.update(environment)
    if "torch" in sys.modules:  # else it reads the variable
        sys.modules["torch"].set_num_threads(setup.num_threads)
    work(connection, setup)


def work(connection: Connection, setup: WorkerSetup) -> None:
    """Run the role's `main`, and report its failure."""
    redirect_output(Path(setup.log))
    set_num_threads(setup.num_threads)
    channel = Channel(connection)
    try:
        if setup.cpus is not None:
            os.sched_setaffinity(0, setup.cpus)
        with beating(channel):
            main = importlib.import_module(f"rhymeflow.workers.{setup.role}").main
            config = Config.model_validate_json(setup.config)
            if config.run.profile_steps:
                from rhymeflow.workers import traces

                traces.record(setup.role, setup.name, config, Path(setup.run_dir))
            main(channel, setup.name, config, Path(setup.run_dir))
    except (EOFError, BrokenPipeError, ConnectionResetError):
        return  # the controller is gone, and with it the run
    except (UserError, StorageError) as error:
        send(channel, Failed(str(error), user_error=True))
    except Exception:  # noqa: BLE001 - the boundary of the worker: every defect must be reported
        traceback.print_exc()  # to its log
        send(channel, Failed(traceback.format_exc(), user_error=False))


def set_num_threads(num_threads: int) -> None:
    """Set the variables from which torch takes its number of threads when it is imported."""
    for library in ("OMP", "MKL"):  # torch prefers MKL's number to OpenMP's
        os.environ[f"{library}_NUM_THREADS"] = str(num_threads)


def end_with(controller: int) -> None:
    """End this process soon after the controller ends, even if it reads no messages then, as when
    it compiles. `controller` is a descriptor that becomes readable when the controller ends."""

    def watch() -> None:
        wait([controller])
        time.sleep(ORPHAN_SECONDS)
        os._exit(1)

    threading.Thread(target=watch, daemon=True, name="controller's end").start()


@contextmanager
def beating(connection: Channel) -> Iterator[None]:
    """Send a heartbeat about every second while the block runs, from a thread. A heartbeat has the
    progress of the work (`utils/progress.py`), so that the controller notices work that hangs."""
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
