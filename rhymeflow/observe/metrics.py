"""Metrics: written to `metrics.jsonl` and to trackers, and read back.

A row is one JSON object on one line, with `step`, `time` (seconds since the run began) and metrics
by name, readable as soon as `write` returns. A step may have several rows, which are merged when
they are read: held-out rewards come later, in a row of their own. Trackers get the same."""

from __future__ import annotations

import contextlib
import importlib
import importlib.util
import json
import os
import re
import signal
import sys
import threading
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

import msgspec

from rhymeflow.errors import UserError
from rhymeflow.utils import disk
from rhymeflow.utils.extras import EXTRAS, how_to_install
from rhymeflow.utils.user_values import described

if TYPE_CHECKING:
    from rhymeflow.config.run import RunConfig

FILE = "metrics.jsonl"
EXTRA = "extra.jsonl"  # values that reward functions keep (`log_extra`)
VERDICTS = "verdicts.jsonl"  # verdicts on learning, each with the step from which it held
RUNS = "trackers.json"  # {tracker: its name or id of this run}
PROJECT = "rhymeflow"

Row = dict[str, Any]

_TIME_WEIGHTED = {
    "idle/rollout", "idle/learner", "rollout/tokens_per_s", "draft/time_saved_share",
    "coordination/share", "coordination/cpu_share",
}  # fmt: skip


def is_time_weighted(name: str) -> bool:
    """Whether the metric is a rate or a share of a step's time, so that its mean over steps is
    weighted by their time."""
    return name in _TIME_WEIGHTED


class MetricsWriter:
    """Writes each row to the run directory and to the trackers."""

    def __init__(
        self,
        run_dir: Path,
        *,
        run: RunConfig,
        name: str,
        config: Mapping[str, Any],
        first_step: int = 0,
    ) -> None:
        """Open `metrics.jsonl` at its end, and the trackers of `run`. `first_step`: TensorBoard
        hides what an earlier attempt wrote for this step and later ones. Raises `UserError` if a
        tracker that was asked for is not installed, or cannot begin."""
        check_installed(run.report_to)
        self._trackers: dict[str, Any] = {}
        for tracker in run.report_to:
            try:
                begun = TRACKERS[tracker](run_dir, run, name, config, first_step)
            except UserError:
                raise
            except Exception as error:  # noqa: BLE001 - a tracker's client may raise anything
                raise UserError(f"run.report_to: {tracker}: {described(error)}") from None
            self._trackers[tracker] = begun
        self._run_dir = run_dir
        self._file = (run_dir / FILE).open("ab")

    def write(self, step: int, time: float, metrics: Mapping[str, float]) -> Sequence[str]:
        """Write one row. Infinite numbers and NaN are written as null. Return a line for each
        tracker that failed, and gets no more rows."""
        row = {"step": step, "time": round(time, 3), **metrics}
        self._file.write(msgspec.json.encode(row) + b"\n")
        self._file.flush()
        failed = {}
        for name, tracker in self._trackers.items():
            try:
                tracker.write(step, metrics)
            except Exception as error:  # noqa: BLE001 - as above
                failed[name] = f"{name} gets no more rows, as {FILE} does: {described(error)}"
        self._trackers = {n: each for n, each in self._trackers.items() if n not in failed}
        return [*failed.values()]

    def append(self, file_name: str, row: Mapping[str, Any]) -> None:
        """Append a line to another file of the run directory."""
        with (self._run_dir / file_name).open("ab") as file:
            file.write(msgspec.json.encode(row) + b"\n")

    def close(self) -> Sequence[str]:
        """Close the file and the trackers. Return a line for each tracker that fails."""
        self._file.close()
        failed = []
        for name, tracker in self._trackers.items():
            try:
                tracker.close()
            except Exception as error:  # noqa: BLE001 - as above
                failed.append(f"{name} may lack the last rows, unlike {FILE}: {described(error)}")
        return failed


class _TensorBoard:
    """Event files in `RUN_DIR/tensorboard`."""

    def __init__(
        self, run_dir: Path, run: RunConfig, name: str, config: Mapping[str, Any], first_step: int
    ) -> None:
        self._folder, self._first_step = str(run_dir / "tensorboard"), first_step
        self._writer: Any = None  # imported with the first row: that takes a second

    def write(self, step: int, metrics: Mapping[str, float]) -> None:
        if self._writer is None:
            module = importlib.import_module("torch.utils.tensorboard")
            purge = self._first_step or None  # hides what has this step or a later one
            self._writer = module.SummaryWriter(self._folder, purge_step=purge)
        for name, value in metrics.items():
            self._writer.add_scalar(name, value, step)
        self._writer.flush()

    def close(self) -> None:
        if self._writer is not None:
            self._writer.close()


class _Online:
    """A run in the tracker that the module `tracker` reports to. `_open` begins it or, if its id is
    known, continues it; it returns the id. `_run` has the methods `log` and `finish`."""

    tracker: str
    _run: Any

    def __init__(
        self, run_dir: Path, run: RunConfig, name: str, config: Mapping[str, Any], first_step: int
    ) -> None:
        self._run_dir, self._labels = run_dir, run
        self._common = {"project": run.project or PROJECT, "config": dict(config)}
        runs = _runs(run_dir)
        found = self._open(importlib.import_module(self.tracker), name, runs.get(self.tracker))
        text = json.dumps(runs | {self.tracker: found}, indent=2)
        disk.replace(run_dir / RUNS, f"{text}\n".encode())

    def _open(self, module: Any, name: str, known: str | None) -> str:
        raise NotImplementedError

    def write(self, step: int, metrics: Mapping[str, float]) -> None:
        self._run.log(dict(metrics), step=step)

    def close(self) -> None:
        self._run.finish()


class _WeightsAndBiases(_Online):
    tracker = "wandb"

    def _open(self, module: Any, name: str, known: str | None) -> str:
        run = self._labels
        if run.project is None:
            self._common["project"] = os.environ.get("WANDB_PROJECT", PROJECT)
        # "allow": if no row was ever delivered, there is no run of this id.
        again = {"id": known, "resume": "allow", "allow_val_change": True} if known else {}
        tags = run.tags or None  # a resumed run has these and no others
        labels = {"entity": run.entity, "group": run.run_group, "tags": tags, "name": name}
        self._run = module.init(dir=str(self._run_dir), **self._common, **labels, **again)
        # wandb's own step counter refuses earlier steps, and held-out rewards come late.
        self._run.define_metric("*", step_metric="step")
        return str(self._run.id)

    def write(self, step: int, metrics: Mapping[str, float]) -> None:
        self._run.log({"step": step, **metrics})


class _Trackio(_Online):
    tracker = "trackio"

    def _open(self, module: Any, name: str, known: str | None) -> str:
        self._run, run = module, self._labels
        how = {"name": known, "resume": "allow"} if known else {"name": name, "resume": "never"}
        group = {} if run.run_group is None else {"group": run.run_group}
        # The name differs from the given one where that was taken.
        return str(module.init(**self._common, **how, **group).name)


class _SwanLab(_Online):
    tracker = "swanlab"

    def _open(self, module: Any, name: str, known: str | None) -> str:
        run, interrupted = self._labels, signal.getsignal(signal.SIGINT)
        again = {"id": known, "resume": "allow"} if known else {}
        labels = {"workspace": run.entity, "group": run.run_group, "tags": list(run.tags) or None}
        folder = str(self._run_dir / "swanlab")
        self._run = module.init(name=name, logdir=folder, **self._common, **labels, **again)
        if threading.current_thread() is threading.main_thread():
            signal.signal(signal.SIGINT, interrupted)  # Ctrl-C is the run's: it ends as it should
        return str(self._run.id)


class _Mlflow(_Online):
    """Where `MLFLOW_TRACKING_URI` says. Its names have no `@` and no `#`: they become `_`."""

    tracker = "mlflow"

    def _open(self, module: Any, name: str, known: str | None) -> str:
        self._client, self._metric = module.MlflowClient(), module.entities.Metric
        self._id = known or self._created(name)
        if known:
            self._client.update_run(known, status="RUNNING")
        return self._id

    def _created(self, name: str) -> str:
        project, config = self._common.values()
        experiment = self._client.get_experiment_by_name(project)
        number = experiment.experiment_id if experiment else None
        number = number or self._client.create_experiment(project)
        created: str = self._client.create_run(number, run_name=name).info.run_id
        self._client.log_dict(created, config, "config.json")
        return created

    def write(self, step: int, metrics: Mapping[str, float]) -> None:
        now = int(time.time() * 1000)
        rows = [
            self._metric(re.sub(r"[^\w\-. :/]", "_", name), value, now, step)
            for name, value in metrics.items()
        ]
        self._client.log_batch(self._id, metrics=rows)

    def close(self) -> None:
        self._client.set_terminated(self._id)


TRACKERS: dict[str, Callable[[Path, RunConfig, str, Mapping[str, Any], int], Any]] = {
    "tensorboard": _TensorBoard,
    **{each.tracker: each for each in (_WeightsAndBiases, _Trackio, _SwanLab, _Mlflow)},
}


def check_installed(report_to: Sequence[str]) -> None:
    """Raise `UserError` if a tracker is not installed; `report_to`: names among `TRACKERS`."""
    for tracker in report_to:
        spec = None if tracker in sys.modules else importlib.util.find_spec(tracker)
        # A folder of this name in the working directory has a spec without an origin.
        if tracker not in sys.modules and (spec is None or spec.origin is None):
            how = how_to_install(tracker) if tracker in EXTRAS else f"pip install {tracker}"
            raise UserError(f"run.report_to names {tracker}, which is not installed: {how}")


def _runs(run_dir: Path) -> dict[str, str]:
    path = run_dir / RUNS
    try:
        found = json.loads(path.read_text()) if path.is_file() else {}
    except ValueError as error:
        raise UserError(f"{path}: is not JSON: {error}") from None
    if not isinstance(found, dict) or not all(isinstance(known, str) for known in found.values()):
        raise UserError(f"{path}: should hold the name or id of a run for each tracker")
    return found


def time_weighted_mean(rows: Iterable[Mapping[str, Any]], name: str) -> float | None:
    """The mean of a share or rate of steps' time, weighted by that time. None: no step has it."""
    known = [row for row in rows if row.get(name) is not None and row.get("step_time")]
    seconds = sum(row["step_time"] for row in known)
    return sum(row[name] * row["step_time"] for row in known) / seconds if known else None


def read(run_dir: Path) -> dict[int, Row]:
    """{step: its metrics}, see `by_step`; empty if there is no file. Raises `UserError` if a line
    is no row."""
    return by_step(rows(run_dir))


def by_step(rows: Iterable[Row]) -> dict[int, Row]:
    """{step: its metrics}, ascending. Rows of a step are joined, later ones win, but `time` is of
    the first: when the step ended, not when it was evaluated."""
    steps: dict[int, Row] = {}
    for row in rows:
        known = steps.get(row["step"], row)
        steps[row["step"]] = known | row | {"time": known.get("time")}
    return dict(sorted(steps.items()))


def forget_after(run_dir: Path, step: int) -> None:
    """Delete metrics and verdicts of later steps, and a half line at the end of each file: a
    resumed run writes them again."""
    for path in (run_dir / FILE, run_dir / VERDICTS):
        if not path.is_file():
            continue
        *lines, half = path.read_bytes().split(b"\n")
        steps = (row["step"] for row in LiveRows(path).rows())
        kept = [line for line, its in zip(lines, steps, strict=True) if its <= step]
        if len(kept) < len(lines) or half:
            disk.replace(path, b"".join(line + b"\n" for line in kept))


def rows(run_dir: Path) -> list[Row]:
    """The rows of a run as they were written, without a half line at the end."""
    return LiveRows(run_dir / FILE).rows()


class LiveRows:
    """The rows of a file that grows. Each line is read once; safe for threads."""

    def __init__(self, path: Path) -> None:
        self._path, self._lock = path, threading.Lock()
        self._rows: list[Row] = []
        self._bytes_read = 0
        self._identity = (0, b"")
        """Inode and first bytes when last read; others mean that `forget_after` replaced it."""

    def rows(self) -> list[Row]:
        """The rows so far; all are read anew where a resumed run deleted some. Raises `UserError`
        if the file is none, or a line is no row."""
        if self._path.is_dir():
            raise UserError(f"{self._path}: is a directory, should be a file")
        with self._lock, contextlib.suppress(FileNotFoundError), self._path.open("rb") as file:
            status = self._path.stat()
            begin = file.read(min(self._bytes_read, 256))
            if status.st_size < self._bytes_read or (status.st_ino, begin) != self._identity:
                self._rows, self._bytes_read = [], 0
            file.seek(self._bytes_read)
            *lines, _ = file.read().split(b"\n")
            for line in lines:
                self._rows.append(_row(line, self._path, len(self._rows) + 1))
                self._bytes_read += len(line) + 1
            file.seek(0)
            self._identity = status.st_ino, file.read(min(self._bytes_read, 256))
        return list(self._rows)


def _row(line: bytes, path: Path, number: int) -> Row:
    try:
        row = msgspec.json.decode(line)
    except (msgspec.DecodeError, UnicodeDecodeError) as error:
        raise UserError(f"{path}, line {number}: is not JSON: {error}") from error
    if not isinstance(row, dict) or not isinstance(row.get("step"), int):
        raise UserError(f"{path}, line {number}: is no object with a step")
    return row
