"""Traces of the steps in `run.profile_steps`, by torch's profiler inside the worker.

`record` replaces the class of the worker in its process, so that a worker without it has nothing of
it. A file is a compressed Chrome trace: ui.perfetto.dev opens it."""

from __future__ import annotations

import re
import socket
from pathlib import Path
from typing import Any

from rhymeflow.config import Config
from rhymeflow.core.commands import Accumulate, Pull, Train
from rhymeflow.errors import UserError
from rhymeflow.workers.messages import AnyMessage, Publish

FOLDER = "profile"  # directory in the run directory

INSTANCE = "rollout-0"  # the instance that is recorded, as are its successors

MAX_ITERATIONS = 64
"""Iterations of an engine in a trace, at most; each of a large model has thousands of kernels."""


class Traces:
    """A worker's traces of `steps`, written to `prefix` with the step's number."""

    def __init__(self, steps: tuple[int, ...], prefix: Path) -> None:
        self._steps, self._prefix = sorted(steps), prefix
        self._last = 0  # step that `begin` was called with
        self._profile: Any = None
        self._iterations = 0

    def begin(self, step: int) -> None:
        """Begin the trace of `step`, if it is to be recorded or one since the last call was."""
        first, self._last = self._last + 1 if self._last else step, step
        if self._profile is not None or not any(first <= each <= step for each in self._steps):
            return
        import torch
        from torch.profiler import ProfilerActivity, profile

        activities = [ProfilerActivity.CPU] + [ProfilerActivity.CUDA] * torch.cuda.is_available()
        self._profile, self._iterations = profile(activities=activities), 0
        self._profile.start()

    def end(self) -> None:
        """Write the trace that was begun, if there is one."""
        if self._profile is not None:
            self._profile.stop()
            self._prefix.parent.mkdir(exist_ok=True)
            self._profile.export_chrome_trace(f"{self._prefix}-step-{self._last}.json.gz")
            self._profile = None

    def count_iteration(self) -> None:
        """Count an iteration of an engine; end the trace if it has enough of them."""
        self._iterations += 1
        if self._iterations == MAX_ITERATIONS:
            self.end()


def record(role: str, name: str, config: Config, run_dir: Path) -> None:
    """Have the worker that this process will run record `run.profile_steps`, if it is a learner or
    `INSTANCE`. Raises `UserError` if it is on a machine that does not have `run_dir`."""
    name = re.sub(r"\.\d+", "", name)  # a successor's file takes the place of its predecessor's
    if name != INSTANCE and role not in ("learner", "learner_rank"):
        return
    if not run_dir.is_dir():
        raise UserError(
            f"run.profile_steps: there is no {run_dir} on {socket.gethostname()}: {name} writes "
            "traces there, so its node has to share it with the controller's"
        )
    traces = Traces(config.run.profile_steps, run_dir / FOLDER / name)
    if name == INSTANCE:
        _record_instance(traces)
    else:
        _record_learner(traces)


def _record_learner(traces: Traces) -> None:
    from rhymeflow.workers import learner

    class RecordedLearner(learner.LearnerProcess):
        def _carry_out(self, message: AnyMessage) -> None:
            if isinstance(message, Accumulate | Train):
                traces.begin(self.version + 1)
            super()._carry_out(message)
            if isinstance(message, Publish):
                traces.end()

    learner.LearnerProcess = RecordedLearner  # type: ignore[misc]


def _record_instance(traces: Traces) -> None:
    from rhymeflow.workers import rollout

    class RecordedInstance(rollout.RolloutInstance):
        def serve(self) -> None:
            super().serve()
            traces.end()

        def turn(self) -> None:
            if has_work := self.engine.has_work:
                traces.begin(self.engine.version + 1)
            super().turn()
            if has_work:
                traces.count_iteration()

        def _install(self, message: Pull) -> None:
            traces.end()
            super()._install(message)

    rollout.RolloutInstance = RecordedInstance  # type: ignore[misc]
