"""A last checkpoint of a run whose log cannot be written any more.

Holds true: nothing is written to the log, and it does not wait for long. The checkpoint may be of a
version that the log does not have: it is the user's; `resume` sets it aside, and begins from an
earlier one.
"""

from __future__ import annotations

import time
from collections import deque

from rhymeflow.runtime.base import WorkerLost
from rhymeflow.runtime.controller import Controller
from rhymeflow.workers.messages import Alive, Failed

SECONDS = 60.0
"""For the step in progress and the checkpoint."""


def save_checkpoint(controller: Controller) -> None:
    """Have the learner write one of what it has; say so if it cannot."""
    training, supervisor = controller.training, controller.supervisor
    learner, end = supervisor.learner.name, time.monotonic() + SECONDS
    if training.weights is None:
        return
    training.save_newest()
    while training.checkpoints.is_pending and time.monotonic() < end:
        if controller.end_asked:
            return
        for item in supervisor.wait(0.1, for_any_of=[learner]):
            if item.worker != learner:
                continue
            if isinstance(item, WorkerLost) or isinstance(item.message, Failed):
                return
            if not isinstance(item.message, Alive):
                deque(training.hear(item.message), maxlen=0)
