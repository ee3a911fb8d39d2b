"""How a worker process begins: name, cores, log, role, signs of life, what becomes of its errors.

It ignores Ctrl-C (the controller decides), ends when its controller does, whatever it is doing, and
reports what it dies of. Imports torch only through the role it runs; its threads are set before.
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
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from multiprocessing import parent_process
from multiprocessing.connection import Connection, wait
from pathlib import Path

from rhymeflow.config import Config
from rhymeflow.errors import UserError
from rhymeflow.utils import progress
from rhymeflow.utils.process import redirect_output, set_process_name
from rhymeflow.workers.channel import Channel
from rhymeflow.workers.messages import Alive, Failed, send

ORPHAN_SECONDS = 2.0
"""For a worker whose controller is gone to notice it and to give back what it has."""

BEAT_SECONDS = 1.0

START_SECONDS = 3600.0
"""Loading, compiling and the start of vLLM are not counted in pieces: so long a sign of life counts
as progress. Reading the weights of the largest models from slow disks takes less."""


def enter(
    connection: Connection,
    role: str,
    name: str,
    config_json: str,
    run_dir: str,
    log: str,
    cpus: tuple[int, ...] | None,
    environment: dict[str, str],
) -> None:
    """Run `rhymeflow.workers.<role>.main` until it returns or fails.

    `environment` is the controller's, with this worker's `OMP_NUM_THREADS`.
    """
    gc.enable()  # see `preload`
    channel = Channel(connection)
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    set_process_name(name)
    if (controller := parent_process()) is not None:  # else nobody started it as a worker
        end_with(controller.sentinel)
    if role in ("reward", "environment"):
        os.setsid()  # a signal that user code sends to its parent's group is not the run's
    redirect_output(Path(log))
    os.environ.clear()  # the server that this was forked from has an older one
    os.environ.update(environment)
    if "torch" in sys.modules:  # else it reads the variable
        sys.modules["torch"].set_num_threads(int(environment["OMP_NUM_THREADS"]))
    work(channel, role, name, config_json, run_dir, cpus)


def work(
    channel: Channel,
    role: str,
    name: str,
    config_json: str,
    run_dir: str,
    cpus: tuple[int, ...] | None = None,
) -> None:
    """Run the role's `main`, and report what it fails by."""
    try:
        if cpus is not None:
            os.sched_setaffinity(0, cpus)
        with beating(channel):
            main = importlib.import_module(f"rhymeflow.workers.{role}").main
            main(channel, name, Config.model_validate_json(config_json), Path(run_dir))
    except (EOFError, BrokenPipeError, ConnectionResetError):
        return  # the controller is gone, and with it the run
    except UserError as error:
        send(channel, Failed(str(error), user_error=True))
    except Exception:  # noqa: BLE001 - the boundary of the worker: every defect must be reported
        traceback.print_exc()  # to its log
        send(channel, Failed(traceback.format_exc(), user_error=False))


def end_with(controller: int) -> None:
    """End this process soon after the one that started it, also if it listens to nobody by then:
    compiling what drafting runs takes long.

    `controller` becomes readable when that one ends.
    """

    def watch() -> None:
        wait([controller])
        time.sleep(ORPHAN_SECONDS)
        os._exit(1)

    threading.Thread(target=watch, daemon=True, name="controller's end").start()


@contextmanager
def beating(connection: Channel) -> Iterator[None]:
    """Say from a thread, about every second while the block runs, that this process lives, and how
    far it has come (`utils/progress.py`): one whose work stands still is seen to hang."""
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
