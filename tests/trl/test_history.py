"""Entries of `state.log_history` that stand for several rows."""

from __future__ import annotations

from rhymeflow.trainer.history import History, Rhythm


def test_shares_are_of_the_time_of_all_steps_and_the_rest_is_their_mean() -> None:
    history = History(Rhythm(every=2))
    rows = {
        1: {"step": 1, "loss": 1.0, "idle/learner": 0.9, "step_time": 9.0},
        2: {"step": 2, "loss": 0.0, "idle/learner": 0.1, "step_time": 1.0},
    }
    history.read(rows)
    (entry,) = history.entries
    assert (entry["loss"], entry["idle/learner"], entry["step"]) == (0.5, 0.82, 2)
