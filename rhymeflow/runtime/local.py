"""The runtime of one machine: every worker is a process with a pipe for its messages.

The controller's process is never forked; `close` leaves no worker behind."""

from __future__ import annotations

import json
import os
import select
import subprocess
import sys
import threading
import time
from collections.abc import Collection, Mapping
from contextlib import suppress
from multiprocessing.connection import Connection, wait
from multiprocessing.process import BaseProcess
from pathlib import Path
from queue import SimpleQueue

import rhymeflow
from rhymeflow import placement
from rhymeflow.config import Config
from rhymeflow.runtime import processes
from rhymeflow.runtime.base import News, Received, Resources, Role, WorkerLost
from rhymeflow.utils import child, gpus
from rhymeflow.workers import entry
from rhymeflow.workers.channel import Channel
from rhymeflow.workers.messages import AnyMessage, Shutdown, decode, encode

CLOSE_SECONDS = 2.0  # time that workers have to end by themselves when the run is over


class LocalRuntime:
    """Worker processes of one run on this machine; a context manager that ends them all."""

    def __init__(self, config: Config, run_dir: Path, logs: Path) -> None:
        """`logs`: the directory of the workers' output. Raises `UserError` if there are too few
        GPUs."""
        self._gpus = placement.gpus_here(config)
        self._config = placement.with_memory_share(config, len(self._gpus))
        self._run_dir, self._logs = run_dir, logs
        self._workers: dict[str, LocalWorker] = {}
        self._poll = select.poll()  # on pipes of workers that have not ended
        self._by_descriptor: dict[int, LocalWorker] = {}
        self._changing, self._is_closed = threading.Lock(), False

    def __enter__(self) -> LocalRuntime:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def start(self, role: Role, name: str, resources: Resources) -> LocalWorker:
        """Start a process; see `base.Runtime`."""
        variables = self._variables(role, resources)
        config, threads = self._config.model_dump_json(), int(variables["OMP_NUM_THREADS"])
        log = str(self._logs / f"{name}.log")
        setup = entry.WorkerSetup(
            role, name, config, str(self._run_dir), log, threads, resources.cpus
        )
        worker = LocalWorker(setup, self._config, variables)
        with self._changing:
            if self._is_closed:
                worker.end(0.0)
                raise RuntimeError("the run has ended")
            self._workers[name] = worker
            descriptor = worker.connection.fileno()
            self._by_descriptor[descriptor] = worker
            self._poll.register(descriptor, select.POLLIN)
        return worker

    def _variables(self, role: Role, resources: Resources) -> dict[str, str]:
        """Return the environment of a worker where it differs from the controller's: torch and CUDA
        read these once. A worker with GPUs of its own sees no others."""
        visible = placement.gpus_of(self._config, role, resources.number, self._gpus)
        variables = {"OMP_NUM_THREADS": str(resources.num_threads)}
        return variables | ({gpus.VISIBLE: ",".join(visible)} if visible else {})

    def wait(self, timeout: float, *, for_any_of: Collection[str] | None = None) -> list[News]:
        """Hand over sent messages and read all pipes; see `base.Runtime`."""
        for worker in self._workers.values():
            worker.hand_over()
        if for_any_of is None:
            self._poll.poll(timeout * 1000)
        else:
            descriptors = [
                descriptor
                for descriptor, worker in self._by_descriptor.items()
                if worker.name in for_any_of
            ]
            wait(descriptors, timeout)
        news: list[News] = []
        while ready := self._poll.poll(0):
            for descriptor, _ in ready:
                item = self._by_descriptor[descriptor].read()
                if isinstance(item, WorkerLost):
                    self._forget(descriptor)
                if item is not None:
                    news.append(item)
        return news

    def has_room(self, role: Role, resources: Resources) -> bool:
        """Return False: this machine does not grow; see `base.Runtime`."""
        return False

    def stop(self, name: str, *, patience: float) -> None:
        """End one process; see `base.Runtime`."""
        self._end([self._workers.pop(name)], patience)

    def close(self) -> None:
        """End all processes, and those that another thread is about to start."""
        with self._changing:
            self._is_closed = True
        self._end(list(self._workers.values()), CLOSE_SECONDS)
        self._workers.clear()

    def _end(self, workers: list[LocalWorker], seconds: float) -> None:
        for worker in workers:
            worker.send(Shutdown())
            worker.hand_over()
        deadline = time.monotonic() + seconds
        for worker in workers:
            if worker.connection.fileno() in self._by_descriptor:  # it has not ended by itself
                self._forget(worker.connection.fileno())
            worker.end(deadline)

    def _forget(self, descriptor: int) -> None:
        self._poll.unregister(descriptor)
        del self._by_descriptor[descriptor]


class LocalWorker:
    """The controller's side of one worker process: a `base.WorkerHandle`."""

    @staticmethod
    def pipe() -> tuple[Connection, Connection]:
        """Return the controller's end and the worker's."""
        return processes.context().Pipe(duplex=True)

    def __init__(
        self, setup: entry.WorkerSetup, config: Config, variables: Mapping[str, str]
    ) -> None:
        """`variables` replace those of this process's environment."""
        self.name, self.node, self.log = setup.name, "", setup.log
        ours, theirs = self.pipe()
        self.connection = Channel(ours)
        # No daemons: the reward worker has processes of its own. `LocalRuntime.close` ends all.
        self._process: BaseProcess | Interpreter
        if needs_interpreter(setup.role, config):
            self._process = Interpreter(config, setup, ours, theirs, variables)
        else:
            self._process = process = processes.context().Process(  # type: ignore[attr-defined]
                target=entry.enter,
                args=(theirs, setup, {**os.environ, **variables}),
                name=self.name,
            )
            # A spawned child may load torch before it runs any code. Two processes that each use
            # all cores slow each other tenfold.
            with processes.environment(**variables), child.without_main_file():
                process.start()
        self.pid = self._process.pid
        theirs.close()  # so that the pipe closes when the child ends
        self._sent: list[bytes] = []  # since the last `hand_over`
        self._outbox: SimpleQueue[list[bytes] | None] = SimpleQueue()
        self._sender = threading.Thread(target=self._deliver, daemon=True, name=f"to {self.name}")
        self._sender.start()

    def send(self, message: AnyMessage) -> None:
        """Send a message with the next `hand_over`; see `base.WorkerHandle`."""
        self._sent.append(encode(message))

    def hand_over(self) -> None:
        """Pass sent messages to the sender thread, all at once since that wakes it."""
        if self._sent:
            self._outbox.put(self._sent)
            self._sent = []

    def read(self) -> News | None:
        """Return a message or the worker's end; None: it was a repeated message."""
        try:
            message = self.connection.read()
            return None if message is None else Received(self.name, decode(message))
        except (EOFError, ConnectionResetError):
            self._process.join(timeout=5)  # the pipe closes a little before the process is gone
            code = self._process.exitcode
            how = "(its connection broke)" if code is None else child.how_it_ended(code)
            return WorkerLost(
                self.name, f"{self.name} died {how}; what it printed is in {self.log}"
            )

    def end(self, deadline: float) -> None:
        """Wait for the process to end until `deadline` (`time.monotonic`), then kill it."""
        self._process.join(timeout=max(0.0, deadline - time.monotonic()))
        if self._process.is_alive():
            self._process.kill()
            self._process.join()
        self._outbox.put(None)
        # The next worker may get this descriptor's number, and must not get this one's messages.
        self._sender.join()
        self.connection.close()

    def _deliver(self) -> None:
        while (messages := self._outbox.get()) is not None:
            try:
                for message in messages:
                    self.connection.send_bytes(message)
            except OSError:  # the worker is gone, which `read` reports
                return


def needs_interpreter(role: str, config: Config) -> bool:
    """Whether a worker cannot be forked because its libraries differ from the controller's."""
    rollout = config.rollout
    return role == "rollout" and (rollout.engine == "vllm" or rollout.python is not None)


class Interpreter(subprocess.Popen[bytes]):
    """A worker as a program (`workers/launch.py`) that runs the controller's package, with the
    methods of `multiprocessing.Process` that `LocalWorker` uses."""

    def __init__(
        self,
        config: Config,
        setup: entry.WorkerSetup,
        ours: Connection,
        theirs: Connection,
        variables: Mapping[str, str],
    ) -> None:
        """`ours`, `theirs`: the controller's and the worker's end of the pipe; `variables`: see
        `LocalWorker`."""
        python = config.rollout.python or sys.executable
        command = [python, "-m", "rhymeflow.workers.launch", str(theirs.fileno())]
        if config.rollout.engine == "vllm":
            command.append("openmp")
        packages = [str(Path(rhymeflow.__file__).parents[1]), os.environ.get("PYTHONPATH")]
        path = {"PYTHONPATH": os.pathsep.join(filter(None, packages))}
        log = Path(setup.log)
        log.parent.mkdir(parents=True, exist_ok=True)
        with log.open("ab") as output:  # what is printed before the worker opens its log
            super().__init__(
                command,
                env={**os.environ, **variables, **path},
                stdin=subprocess.DEVNULL,
                stdout=output,
                stderr=output,
                pass_fds=[theirs.fileno()],
            )
        ours.send_bytes(json.dumps(setup).encode())

    @property
    def exitcode(self) -> int | None:
        """The exit status, None while it runs; a signal's number is negated."""
        return self.poll()

    def is_alive(self) -> bool:
        """Whether it runs."""
        return self.poll() is None

    def join(self, timeout: float | None = None) -> None:
        """Wait for its end, at most `timeout` seconds."""
        with suppress(subprocess.TimeoutExpired):
            self.wait(timeout)
