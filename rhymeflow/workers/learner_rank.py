"""A rank of the learner other than 0: meets rank 0, then serves the run as in `learner.py`."""

from __future__ import annotations

from pathlib import Path

from rhymeflow.config import Config
from rhymeflow.workers.channel import Channel
from rhymeflow.workers.learner import serve
from rhymeflow.workers.messages import AnyMessage, JoinRanks, Shutdown, receive


def main(connection: Channel, name: str, config: Config, run_dir: Path) -> None:
    """Wait for rank 0's address, and serve the run until `Shutdown`."""
    waiting: list[AnyMessage] = []
    while not isinstance(message := receive(connection), JoinRanks):
        if isinstance(message, Shutdown):
            return
        waiting.append(message)
    serve(connection, config, run_dir, message.rank, message.address, waiting)
