"""A rank of the learner but the first, which it meets before it does what `learner.py` does."""

from __future__ import annotations

from pathlib import Path

from rhymeflow.config import Config
from rhymeflow.workers.channel import Channel
from rhymeflow.workers.learner import serve
from rhymeflow.workers.messages import JoinRanks, Sent, Shutdown, receive


def main(connection: Channel, name: str, config: Config, run_dir: Path) -> None:
    """Wait for rank 0, and serve the run with it until `Shutdown`."""
    early: list[Sent] = []
    while not isinstance(message := receive(connection), JoinRanks):
        if isinstance(message, Shutdown):
            return
        early.append(message)
    serve(connection, config, run_dir, message.rank, message.address, early)
