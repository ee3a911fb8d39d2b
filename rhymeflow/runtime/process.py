"""A worker process: how it is started, watched from the parent, and entered in the child.

Holds true: started by `spawn`, never `fork`; its threads and cores are set before torch is
imported; it ignores Ctrl-C (the controller decides) and ends when its controller does; what it
dies of reaches the controller. Knows nothing of what the worker does.
"""

from __future__ import annotations

import importlib
import multiprocessing
import os
import signal
import threading
import traceback
from collections.abc import Iterator
from contextlib import contextmanager
from multiprocessing.connection import Connection
from pathlib import Path
from queue import SimpleQueue
from typing import Any

from rhymeflow.config import Config
from rhymeflow.errors import UserError
from rhymeflow.utils import output
from rhymeflow.workers.messages import Failed, Message, Shutdown, encode, receive, send


class WorkerDied(RuntimeError):  # noqa: N818 - it is what happened
    """A worker ended without being told to, hangs, or reports a defect."""


class WorkerLost(WorkerDied):
    """It ended or hangs and did not say why: another in its place may fare better."""


class Worker:
    """The parent's side of one worker.

    Args:
        name: such as `rollout-0`; used in messages and in the event log.
        entry: module that holds `main(connection, name, config, run_dir)`.
    """

    def __init__(
        self,
        name: str,
        entry: str,
        config: Config,
        run_dir: str,
        *,
        num_threads: int,
        cpus: tuple[int, ...] | None,
    ) -> None:
        context = multiprocessing.get_context("spawn")
        self.name = name
        self.log = Path(run_dir) / "logs" / f"{name}.log"
        self.connection, theirs = context.Pipe(duplex=True)
        self._process = context.Process(
            target=_enter,
            args=(
                theirs,
                name,
                entry,
                config.model_dump_json(),
                run_dir,
                str(self.log),
                cpus,
            ),
            name=name,
            daemon=True,
        )
        # The child must find this in its environment: importing what it was given to run may load
        # torch, and torch's thread pool reads it once. Two processes that each take all cores slow
        # each other tenfold.
        with _environment(OMP_NUM_THREADS=str(num_threads)):
            self._process.start()
        theirs.close()  # so that the end of the child is the end of the pipe
        self.last_heard: float | None = None
        self._outbox: SimpleQueue[bytes | None] = SimpleQueue()
        self._delivery = threading.Thread(target=self._deliver, daemon=True, name=f"to {name}")
        self._delivery.start()

    @property
    def pid(self) -> int:
        """Process id."""
        assert self._process.pid is not None
        return self._process.pid

    def send(self, message: Message) -> None:
        """Send a message. Never waits, not for a worker that hangs either."""
        self._outbox.put(encode(message))

    def _deliver(self) -> None:
        while (message := self._outbox.get()) is not None:
            try:
                self.connection.send_bytes(message)
            except OSError:  # it is gone, which whoever reads its messages will notice
                return

    def messages(self, now: float) -> Iterator[Any]:
        """Messages that have arrived; never waits.

        Raises:
            UserError: the worker says that the user must change something.
            WorkerLost: it ended.
            WorkerDied: it reports a defect.
        """
        try:
            while self.connection.poll():
                message = receive(self.connection)
                self.last_heard = now
                if isinstance(message, Failed):
                    raise self._failure(message)
                yield message
        except (EOFError, ConnectionResetError):
            self._process.join(timeout=5)
            raise WorkerLost(
                f"{self.name} died {self._how_it_ended()}; what it printed is in {self.log}"
            ) from None

    def check(self, now: float, patience: float) -> None:
        """Raise `WorkerLost` if it was heard once, and then not for `patience` seconds."""
        if self.last_heard is not None and now - self.last_heard > patience:
            raise WorkerLost(
                f"{self.name} has been silent for {patience:g} seconds "
                f"(run.worker_timeout, process {self.pid}): it hangs"
            )

    def _failure(self, message: Failed) -> Exception:
        if message.user_error:
            return UserError(message.error)
        return WorkerDied(f"{self.name} failed:\n{message.error}")

    def _how_it_ended(self) -> str:
        code = self._process.exitcode
        if code is None:
            return "(its connection broke)"
        if code < 0:
            return f"(killed by {signal.Signals(-code).name})"
        return f"(exit code {code})"

    def stop(self, patience: float) -> None:
        """Ask it to end; after `patience` seconds, make it."""
        self.send(Shutdown())
        self._process.join(timeout=patience)
        if self._process.is_alive():
            self._process.kill()
            self._process.join()
        self._outbox.put(None)
        # Whoever comes next may get this descriptor's number, and what is still to be delivered
        # must not reach them. It ends at once: nobody is there to read.
        self._delivery.join()
        self.connection.close()


@contextmanager
def _environment(**values: str) -> Iterator[None]:
    """Set variables for the processes that are started in the block."""
    before = {name: os.environ.get(name) for name in values}
    os.environ.update(values)
    try:
        yield
    finally:
        for name, value in before.items():
            if value is None:
                del os.environ[name]
            else:
                os.environ[name] = value


def share_of_cores(num_workers: int) -> int:
    """Threads for each of `num_workers` that compute at once on the cores this process may use."""
    return max(1, len(os.sched_getaffinity(0)) // num_workers)


def _enter(
    connection: Connection,
    name: str,
    entry: str,
    config_json: str,
    run_dir: str,
    log: str,
    cpus: tuple[int, ...] | None,
) -> None:
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    output.redirect(Path(log))
    if cpus is not None:
        os.sched_setaffinity(0, cpus)
    try:
        main = importlib.import_module(entry).main
        main(connection, name, Config.model_validate_json(config_json), run_dir)
    except (EOFError, BrokenPipeError, ConnectionResetError):
        return  # the controller is gone, and with it the run
    except UserError as error:
        send(connection, Failed(str(error), user_error=True))
    except Exception:  # noqa: BLE001 - the boundary of the process: every defect must be reported
        traceback.print_exc()  # to its log
        send(connection, Failed(traceback.format_exc(), user_error=False))
