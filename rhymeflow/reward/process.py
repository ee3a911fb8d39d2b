"""The executor's side of one worker process: start, send, receive, kill.

Holds true: a killed worker is gone, with every process it started, when `kill` returns. Knows
nothing of what the messages mean.
"""

from __future__ import annotations

import contextlib
import multiprocessing
import os
import signal
from collections.abc import Iterator
from pathlib import Path

from rhymeflow.reward import worker
from rhymeflow.reward.messages import Reply, Work, decode_reply, encode


def descendants(ancestor: int) -> list[int]:
    """The processes that `ancestor` and these started, as far as the system tells (Linux)."""
    children: dict[int, list[int]] = {}
    for path in Path("/proc").glob("[0-9]*/stat"):
        with contextlib.suppress(OSError):  # it has ended
            parent = int(path.read_text().rpartition(")")[2].split()[1])
            children.setdefault(parent, []).append(int(path.parent.name))
    found, i = [ancestor], 0
    while i < len(found):
        found += children.get(found[i], [])
        i += 1
    return found[1:]


class WorkerProcess:
    """A spawned process that runs `worker.main`."""

    def __init__(self, config_json: str, log: str | None) -> None:
        context = multiprocessing.get_context("spawn")
        self.connection, theirs = context.Pipe(duplex=True)
        # Not a daemon: reward functions may start processes of their own.
        self._process = context.Process(
            target=worker.main,
            args=(theirs, config_json, os.getpid(), log),
            name="reward",
            daemon=False,
        )
        self._process.start()
        theirs.close()  # so that the end of the child is the end of the pipe

    @property
    def pid(self) -> int:
        """Process id, and id of the process group it leads."""
        assert self._process.pid is not None
        return self._process.pid

    def send(self, work: Work) -> bool:
        """Send to a worker that waits for work; False if it is gone."""
        try:
            self.connection.send_bytes(encode(work))
        except (BrokenPipeError, ConnectionResetError):
            return False
        return True

    def receive(self) -> Reply | None:
        """Wait for the next reply; None if the worker has ended."""
        try:
            reply: Reply = decode_reply(self.connection.recv_bytes())
        except (EOFError, ConnectionResetError):
            return None
        return reply

    def replies(self) -> Iterator[Reply | None]:
        """Yield the replies that have arrived, then None if the worker has ended. Never waits."""
        while self.connection.poll():
            reply = self.receive()
            yield reply
            if reply is None:
                return

    def how_it_ended(self) -> str:
        """Say how a worker that closed its pipe came to its end."""
        self._process.join(timeout=5)  # the pipe closes a little before the process is gone
        code = self._process.exitcode
        if code is not None and code < 0:
            return f"killed by {signal.Signals(-code).name}"
        return f"exit code {code}"

    def kill(self) -> None:
        """End the process and those it started, also in sessions of their own, at once."""
        for pid in descendants(self.pid):
            with contextlib.suppress(ProcessLookupError):
                os.kill(pid, signal.SIGKILL)
        with contextlib.suppress(ProcessLookupError):  # nobody is left in its group, or none yet
            os.killpg(self.pid, signal.SIGKILL)
        self._process.kill()
        self._process.join()
        self.connection.close()
