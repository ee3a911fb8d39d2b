"""Runs on Ray that something happens to."""

import io
from collections.abc import Callable
from pathlib import Path

import pytest
from rich.console import Console

from rhymeflow.config import Config
from rhymeflow.observe.summary import Summary
from rhymeflow.runtime.controller import Controller
from rhymeflow.runtime.train import train
from tests.runtime.logs import each_turn
from tests.runtime.test_resume import small

Act = Callable[[Controller], bool]  # does something once it can; whether it did


def on_ray(directory: Path, address: str, **sections) -> Config:
    """The small run of `test_resume`, whose workers are actors."""
    ray = {"address": address, "wait_seconds": 240.0}
    return small(directory, runtime="ray", ray=ray, **sections)


def train_while(config: Config, *acts: Act) -> tuple[Summary, str]:
    """Train, and have happen what is given, one after the other; what was printed too."""
    left = list(acts)

    def act(controller: Controller) -> None:
        if left and left[0](controller):
            del left[0]

    console = Console(file=io.StringIO(), width=250)
    with each_turn(act):
        summary = train(config, console=console)
    assert not left, "the run ended before everything had happened"
    return summary, console.file.getvalue()


def train_until(config: Config, *acts: Act) -> None:
    """Train until all of this has happened, and stop the run then."""

    def stop(controller: Controller) -> bool:
        controller.stop_asked = True
        return True

    with pytest.raises(KeyboardInterrupt):
        train_while(config, *acts, stop)


def joined(controller: Controller) -> list[str]:
    """The instances that have joined."""
    return list(controller.coordinator.state.instances)


def published(controller: Controller, version: int) -> bool:
    """Whether this version is out and the next batch is being trained on."""
    return controller.training.published >= version and controller.training.batch is not None
