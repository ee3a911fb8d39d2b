"""The executor's side of one worker process: start, send, receive.

Holds true: a killed worker is gone, with every process it started, when `kill` returns. Knows
nothing of what the messages mean.
"""

from __future__ import annotations

from collections.abc import Iterator

from rhymeflow.reward import worker
from rhymeflow.reward.messages import Reply, Work, decode_reply, encode
from rhymeflow.utils.child import Child


class WorkerProcess(Child):
    """A spawned process that runs `worker.main`."""

    def __init__(self, config_json: str, log: str | None) -> None:
        super().__init__(worker.main, (config_json, log), "reward")

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

    def kill(self) -> None:
        """End the process and those it started, also in sessions of their own, at once."""
        super().kill()
        self.connection.close()
