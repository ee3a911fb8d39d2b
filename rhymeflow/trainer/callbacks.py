"""Calls transformers' `TrainerCallback`s during a run, and makes `state.log_history`.

Each call has the state of its own step, even if an evaluation or a checkpoint is ready later. Of
`control`'s flags, those for stopping and saving have an effect. `model` is None."""

from __future__ import annotations

import math
import warnings
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any, NamedTuple

from rhymeflow.core.types import HELD_OUT
from rhymeflow.observe.metrics import is_time_weighted, time_weighted_mean
from rhymeflow.runtime.observer import Observer
from rhymeflow.suites.figures import OF_FUNCTION

if TYPE_CHECKING:
    from transformers.trainer_callback import TrainerState

_LATEST = ("num_tokens", "learning_rate", "time", "step_time", "endings/", "backup/")
"""Prefixes of metrics whose latest value goes into an entry; the others are averaged."""


class Rhythm(NamedTuple):
    """How often entries are made, and how their steps and epochs are counted."""

    every: int = 1  # versions between two entries; 0: none are made
    has_first: bool = False  # whether the first version has an entry in any case
    steps_per_version: int = 1  # optimizer steps of a version; these are transformers' steps
    versions_per_epoch: float = 0.0  # 0: not known

    def epoch(self, version: int) -> float:
        """Return how many epochs of the dataset were trained on up to `version`."""
        return version / self.versions_per_epoch if self.versions_per_epoch else 0.0


class History:
    """Makes `entries`, transformers' `log_history`, from rows of metrics."""

    def __init__(self, rhythm: Rhythm) -> None:
        self.entries: list[dict[str, Any]] = []
        self._rhythm, self._rows = rhythm, list[Mapping[str, Any]]()

    def trained(self, version: int, row: Mapping[str, Any]) -> dict[str, Any] | None:
        """Add a version's row; return the entry that it completes, if any."""
        self._rows.append(row)
        every = self._rhythm.every
        is_first = version == 1 and self._rhythm.has_first
        if not every or (version % every and not is_first):
            return None
        metrics = _combined(self._rows)
        self._rows = []
        return self._add(version, metrics)

    def evaluated(self, version: int, row: Mapping[str, Any]) -> dict[str, Any]:
        """Add an evaluation's metrics; return their entry."""
        return self._add(version, {eval_name(name): value for name, value in row.items()})

    def read(self, rows: Mapping[int, Mapping[str, Any]]) -> None:
        """Add the rows of an earlier run, by version."""
        for version, row in rows.items():
            evaluation = {k: v for k, v in row.items() if k.startswith("eval/")}
            training = {k: v for k, v in row.items() if k not in (*evaluation, "step", "time")}
            if "loss" in training:
                self.trained(version, training)
            if evaluation:
                self.evaluated(version, evaluation)

    def _add(self, version: int, metrics: dict[str, Any]) -> dict[str, Any]:
        rhythm = self._rhythm
        epoch, step = round(rhythm.epoch(version), 4), version * rhythm.steps_per_version
        self.entries.append({**metrics, "epoch": epoch, "step": step})
        return self.entries[-1]


def eval_name(name: str) -> str:
    """Return the name as transformers writes it: `eval_reward` for `eval/reward`, and
    `eval_NAME_reward` for a suite's `eval/NAME/avg@1`."""
    if not name.startswith("eval/"):
        return name
    suite, _, figure = name.removeprefix("eval/").rpartition("/")
    if figure.startswith(OF_FUNCTION):
        where = "eval" if suite == HELD_OUT else f"eval_{suite}"
        return f"{where}_rewards/{figure.removeprefix(OF_FUNCTION)}/mean"
    if "@" in figure:
        return f"eval_{suite}_{'reward' if figure == 'avg@1' else figure}"
    return "_".join(name.split("/", 2))


def _combined(rows: list[Mapping[str, Any]]) -> dict[str, Any]:
    """Return each metric's mean over the rows, or its latest value; None without finite values."""
    combined = {}
    for name in dict.fromkeys(name for row in rows for name in row):
        # Values that are not finite, as a skipped step's loss, are null in rows read from a file.
        known = [row[name] for row in rows if row.get(name) is not None]
        values = [v for v in known if not isinstance(v, float) or math.isfinite(v)]
        if values and name.startswith(_LATEST):
            combined[name] = values[-1]
        elif is_time_weighted(name):
            combined[name] = time_weighted_mean(rows, name)
        else:
            combined[name] = sum(values) / len(values) if values else None
    return combined


class Callbacks(Observer):
    """Calls the callbacks with `args`, a `state` that has its `max_steps`, and a control object."""

    def __init__(
        self,
        callbacks: Sequence[Any],
        args: Any,
        state: TrainerState,
        rhythm: Rhythm,
        processing_class: Callable[[], Any],
        best_metric: str = "eval/reward",
    ) -> None:
        from transformers.trainer_callback import TrainerControl  # loads torch

        self._callbacks, self._args, self._rhythm = list(callbacks), args, rhythm
        self.state, self._control = state, TrainerControl()
        self._processing_class = processing_class
        self._history, self._best_metric = History(rhythm), eval_name(best_metric)
        self._ended_epochs, self._is_in_epoch = 0, False

    def begin(self, rows: Mapping[int, Mapping[str, Any]]) -> None:
        """Call `on_train_begin` with the state of earlier attempts, and begin the first step."""
        self._history.read(rows)
        self.state.log_history = self._history.entries
        for entry in self._history.entries:
            self._note_best(entry)
        self._reach(max(rows, default=0))
        self._ended_epochs = int(self.state.epoch or 0)
        self._call("on_train_begin")
        self._begin_step()

    def step_ended(self, version: int, metrics: Mapping[str, float]) -> None:
        """End a version's step, with `on_log` if its entry is due, and begin the next."""
        self._reach(version)
        self._call("on_step_end")
        entry = self._history.trained(version, metrics)
        if entry is not None:
            self.state.log_history = self._history.entries
            self._call("on_log", logs=dict(entry))
        if int(self.state.epoch or 0) > self._ended_epochs:
            self._end_epoch()
        self._begin_step()

    def evaluated(self, version: int, metrics: Mapping[str, float]) -> None:
        """Call `on_log` and `on_evaluate` for an evaluation of `version`."""
        entry = self._history.evaluated(version, metrics)
        self.state.log_history = self._history.entries
        with self._as_of(version):
            self._call("on_log", logs=dict(entry))
            self._call("on_evaluate", metrics=dict(entry))
        self._note_best(entry)

    def _note_best(self, entry: Mapping[str, Any]) -> None:
        """Keep the greatest value after the start, which `EarlyStoppingCallback` compares with."""
        value, best = entry.get(self._best_metric), self.state.best_metric
        if value is not None and entry["step"] and (best is None or value > best):
            self.state.best_metric, self.state.best_global_step = value, entry["step"]

    def saved(self, version: int, path: str) -> None:
        """Call `on_save` for a complete checkpoint."""
        with self._as_of(version):
            self._call("on_save", checkpoint=path)

    def end(self) -> None:
        """End the run's calls; `state.log_history` must have its last entry."""
        if self._is_in_epoch:
            self._end_epoch()
        self._call("on_log", logs=dict(self.state.log_history[-1]))
        self._call("on_train_end")

    def _begin_step(self) -> None:
        if self.state.global_step >= self.state.max_steps:
            return
        if not self._is_in_epoch:
            self._is_in_epoch = True
            self._call("on_epoch_begin")
        self._call("on_step_begin")

    def _end_epoch(self) -> None:
        self._is_in_epoch, self._ended_epochs = False, int(self.state.epoch or 0)
        self._call("on_epoch_end")

    @contextmanager
    def _as_of(self, version: int) -> Iterator[None]:
        """Within the block, set the state to that of `version`, which may not be the newest."""
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
        arguments = {
            "model": None, "processing_class": self._processing_class(), "optimizer": None,
            "lr_scheduler": None, "train_dataloader": None, "eval_dataloader": None, **more,
        }  # fmt: skip
        for callback in self._callbacks:
            answer = getattr(callback, event)(self._args, self.state, self._control, **arguments)
            self._control = self._control if answer is None else answer
        self._obey_control(event)

    def _obey_control(self, event: str) -> None:
        control = self._control
        if control.should_training_stop or (control.should_epoch_stop and event == "on_epoch_end"):
            self.stop_asked = True
        if control.should_save:
            self.save_asked, control.should_save = True, False
        if control.should_evaluate:
            control.should_evaluate = False
            text = "control.should_evaluate has no effect: run.eval_steps says when"
            warnings.warn(text, stacklevel=2)
        control.should_log = False  # entries are made every logging_steps
