"""The learner's turns."""

from __future__ import annotations

import multiprocessing
from pathlib import Path
from types import SimpleNamespace

from rhymeflow.learner.checkpoint import Saved
from rhymeflow.workers.learner import LearnerProcess
from rhymeflow.workers.messages import CheckpointEnded, Shutdown, receive, send


def test_a_learner_that_is_never_idle_says_which_checkpoints_are_complete():
    """A backup, a snapshot and what may be deleted wait for that."""
    ours, theirs = multiprocessing.Pipe()
    learner = LearnerProcess.__new__(LearnerProcess)
    learner.connection = theirs
    written = [Saved(3, Path("step-3"), None)]
    learner._saver = SimpleNamespace(is_busy=True, ended=lambda: [written.pop()])
    send(ours, Shutdown())
    learner.turn()
    assert ours.poll()
    assert receive(ours) == CheckpointEnded(3, "step-3")
