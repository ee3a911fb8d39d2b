"""transformers' `TrainerCallback`s, called as a run goes on, in the controller's process.

Each call has the state of its own step, also where an evaluation or a checkpoint comes later. What
`control` asks for is done where the run can (stop, save), and else said. `model` is None.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any

from rhymeflow.runtime.observer import Observer
from rhymeflow.trainer.history import History, Rhythm

if TYPE_CHECKING:
    from transformers.trainer_callback import TrainerState


class Callbacks(Observer):
    """Calls the callbacks with `args`, the `state` and the control."""

    def __init__(
        self,
        callbacks: Sequence[Any],
        args: Any,
        state: TrainerState,
        rhythm: Rhythm,
        *,
        processing_class: Callable[[], Any],
        warn: Callable[[str], None],
    ) -> None:
        """`state` has `max_steps`, and is kept up to date."""
        from transformers.trainer_callback import TrainerControl  # loads torch

        self._callbacks, self._args, self._rhythm = list(callbacks), args, rhythm
        self.state, self._control, self._warn = state, TrainerControl(), warn
        self._processing_class = processing_class
        self._history = History(rhythm)
        self._epochs, self._is_in_epoch = 0, False

    def begin(self, rows: Mapping[int, Mapping[str, Any]]) -> None:
        """All is loaded."""
        self._history.read(rows)
        self._reach(max(rows, default=0))
        self._epochs = int(self.state.epoch or 0)
        self._call("on_train_begin")
        self._begin_step()

    def step_ended(self, version: int, metrics: Mapping[str, float]) -> None:
        """A version was published."""
        self._reach(version)
        self._call("on_step_end")
        entry = self._history.trained(version, metrics)
        if entry is not None:
            self.state.log_history = self._history.entries
            self._call("on_log", logs=dict(entry))
        if int(self.state.epoch or 0) > self._epochs:
            self._end_epoch()
        if self.state.global_step < self.state.max_steps:
            self._begin_step()

    def evaluated(self, version: int, metrics: Mapping[str, float]) -> None:
        """Held-out prompts were answered under `version`."""
        entry = self._history.evaluated(version, metrics)
        self.state.log_history = self._history.entries
        with self._as_of(version):
            self._call("on_log", logs=dict(entry))
            self._call("on_evaluate", metrics=dict(entry))

    def saved(self, version: int, path: str) -> None:
        """A checkpoint is complete."""
        with self._as_of(version):
            self._call("on_save", checkpoint=path)

    def end(self) -> None:
        """The run is over, and the state has its last entry."""
        if self._is_in_epoch:
            self._end_epoch()
        self._call("on_log", logs=dict(self.state.log_history[-1]))
        self._call("on_train_end")

    def _begin_step(self) -> None:
        if not self._is_in_epoch:
            self._is_in_epoch = True
            self._call("on_epoch_begin")
        self._call("on_step_begin")

    def _end_epoch(self) -> None:
        self._is_in_epoch, self._epochs = False, int(self.state.epoch or 0)
        self._call("on_epoch_end")

    @contextmanager
    def _as_of(self, version: int) -> Iterator[None]:
        """The state with the step of this version; others may have ended since."""
        now = self.state.global_step, self.state.epoch
        self._reach(version)
        try:
            yield
        finally:
            self.state.global_step, self.state.epoch = now

    def _reach(self, version: int) -> None:
        self.state.global_step = version * self._rhythm.steps_per_version
        self.state.epoch = self._rhythm.epoch(version)

    def _call(self, event: str, **more: Any) -> None:
        given = {
            "model": None, "processing_class": self._processing_class(), "optimizer": None,
            "lr_scheduler": None, "train_dataloader": None, "eval_dataloader": None, **more,
        }  # fmt: skip
        for callback in self._callbacks:
            answer = getattr(callback, event)(self._args, self.state, self._control, **given)
            self._control = self._control if answer is None else answer
        self._do(event)

    def _do(self, event: str) -> None:
        """What the control asks for."""
        control = self._control
        if control.should_training_stop or (control.should_epoch_stop and event == "on_epoch_end"):
            self.stop_asked = True
        if control.should_save:
            self.save_asked, control.should_save = True, False
        if control.should_evaluate:
            control.should_evaluate = False
            self._warn("control.should_evaluate has no effect: run.eval_steps says when")
        control.should_log = False  # entries come every logging_steps
