"""`rhymeflow eval`: evaluates a model on suites by a run without training, and writes figures."""

from __future__ import annotations

import json
import shutil
import sys
import tempfile
from collections.abc import Iterator, Sequence
from contextlib import closing, contextmanager
from pathlib import Path
from typing import Any, NamedTuple

from rich.console import Console

from rhymeflow.config import Config
from rhymeflow.errors import UserError
from rhymeflow.observe import metrics
from rhymeflow.observe.printable import number
from rhymeflow.observe.progress import Progress, ProgressState
from rhymeflow.runtime.supervisor import WorkerDied
from rhymeflow.runtime.train import train
from rhymeflow.store.reader import TrajectoryReader
from rhymeflow.store.schema import EVENTS
from rhymeflow.suites.suite import Suite, chosen

PROGRESS_SECONDS = 1.0  # time between two lines of progress on a terminal

_NUM_PROMPTS = "SELECT suite, COUNT(*) FROM groups WHERE suite IS NOT NULL GROUP BY 1"
_SECONDS = """SELECT json_extract(c.body, '$.suite'), MAX(o.time) - MIN(e.time)
    FROM commands c JOIN events e ON e.seq = c.event JOIN events o ON o.kind = 'Evaluated'
        AND json_extract(o.body, '$.suite') = json_extract(c.body, '$.suite')
    WHERE c.kind = 'Evaluate' GROUP BY 1"""
"""By suite, the time from the event that led to its evaluation until its figures were recorded."""


class Result(NamedTuple):
    """The figures of a suite."""

    suite: Suite
    num_prompts: int
    figures: dict[str, float]
    seconds: float


def evaluate(
    config: Config, names: Sequence[str] = (), run_dir: Path | None = None
) -> list[Result]:
    """Evaluate the model of `config` on its suites, or on those named; `run_dir` keeps the run.

    Raises:
        UserError: the configuration, the model or the data is wrong, or an environment or reward
            function fails.
        WorkerDied: a worker died too often, or has a defect."""
    suites = chosen(config, names)
    with _directory(run_dir) as path:
        quiet, progress = Console(quiet=True), _ProgressLine(is_kept=run_dir is not None)
        train(_without_training(config, suites), run_dir=path, console=quiet, progress=progress)
        return _results(path, suites)


def _without_training(config: Config, suites: Sequence[Suite]) -> Config:
    """Return the configuration of a run on this machine that only evaluates these suites."""
    default = Config()
    names = ["runtime", "ray", "learner", "schedule", "emulation", "simulation", "weights", "run"]
    has_turns = any(suite.section.environments is not None for suite in suites)
    if not (config.environment.is_used or has_turns):
        names.append("environment")  # of suites that are not evaluated
    replaced = {name: getattr(default, name) for name in names}
    # Sections of the run that no suite uses need not be valid here.
    if all(suite.section.functions is not None for suite in suites):
        replaced["reward"] = suites[0].config.reward
    if all(suite.section.environments is not None for suite in suites):
        replaced["environment"] = suites[0].config.environment
    kept = ("seed", "eval_temperature", "worker_timeout", "instance_restarts")
    # Responses to one prompt draft for each other.
    drafting: dict[str, Any] = {} if any(suite.n > 1 for suite in suites) else {"window": "off"}
    return config.model_copy(update=replaced).changed(
        eval={"suites": tuple(suite.section for suite in suites)},
        learner={"max_steps": 0},
        run={"report_to": ()} | {name: getattr(config.run, name) for name in kept},
        drafting=drafting | {"history_run": None},
        rollout={
            "num_generations": default.rollout.num_generations,
            "num_instances": min(config.rollout.num_instances, len(suites)),
            "max_instances": None,
            "cpus": None,
        },
    )


@contextmanager
def _directory(named: Path | None) -> Iterator[Path]:
    """Yield the run's directory: `named`, or a temporary one, kept for its log if a worker died."""
    path = named or Path(tempfile.mkdtemp(prefix="rhymeflow-eval-"))
    try:
        yield path
    except WorkerDied:
        named = path  # is kept
        raise
    finally:
        if named is None:
            shutil.rmtree(path, ignore_errors=True)


def _results(run_dir: Path, suites: Sequence[Suite]) -> list[Result]:
    figures: dict[str, dict[str, float]] = {}
    for name, value in metrics.read(run_dir)[0].items():
        suite, _, figure = name.removeprefix("eval/").rpartition("/")
        figures.setdefault(suite, {})[figure] = value
    with closing(TrajectoryReader(run_dir / EVENTS)) as reader:
        counts, seconds = dict(reader.query(_NUM_PROMPTS)), dict(reader.query(_SECONDS))
    return [
        Result(suite, counts.get(suite.name, 0), figures[suite.name], seconds[suite.name])
        for suite in suites
    ]


# -- output ----------------------------------------------------------------------------------------


def table(results: Sequence[Result]) -> str:
    """Return a table with one line for each suite; pass@k is that of the largest k."""
    heads = ("suite", "prompts", "k", "avg@k", "pass@k", "maj@k", "mean_length", "clipped_ratio")
    rows: list[tuple[str, ...]] = [heads]
    for suite, num_prompts, figures, _ in results:
        columns = [(f"{name}@{suite.n}", ".4f") for name in ("avg", "pass", "maj")]
        columns += [("mean_length", ",.1f"), ("clipped_ratio", ".4f")]
        shown = (number(figures.get(name), spec) for name, spec in columns)
        rows.append((suite.name, f"{num_prompts:,}", str(suite.n), *shown))
    widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
    lines = []
    for name, *rest in rows:
        cells = (cell.rjust(width) for cell, width in zip(rest, widths[1:], strict=True))
        lines.append("  ".join([name.ljust(widths[0]), *cells]).rstrip())
    return "\n".join(lines)


def as_json(config: Config, results: Sequence[Result]) -> dict[str, Any]:
    """Return all figures, with the model, the seed and each suite's sampling parameters."""
    suites = {result.suite.name: _suite_as_json(result) for result in results}
    return {"model": config.model.name, "seed": config.run.seed, "suites": suites}


def _suite_as_json(result: Result) -> dict[str, Any]:
    rollout = result.suite.config.rollout
    sampling = ("temperature", "top_p", "top_k", "max_completion_length")
    return {
        "prompts": result.num_prompts,
        "n": result.suite.n,
        **{name: getattr(rollout, name) for name in sampling},
        "pass_threshold": result.suite.section.pass_threshold,
        **result.figures,
        "seconds": round(result.seconds, 3),
    }


def write(path: Path, figures: dict[str, Any]) -> None:
    """Write the figures to a file. Raises `UserError` if it cannot be written."""
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(json.dumps(figures, indent=2) + "\n", encoding="utf-8")
    except OSError as error:
        raise UserError(f"--output {path}: cannot be written: {error}") from None


class _ProgressLine(Progress):
    """Shows on a terminal how many responses are judged, in a line that it removes at the end.
    `is_kept`: whether the run's directory stays."""

    def __init__(self, *, is_kept: bool) -> None:
        super().__init__(Console(stderr=True))
        self._is_kept = is_kept
        self._next = PROGRESS_SECONDS

    def __enter__(self) -> Progress:
        return self

    def __exit__(self, *_: object) -> None:
        self._put("")

    def update(self, state: ProgressState) -> None:
        """Show the progress, at most once in `PROGRESS_SECONDS`."""
        if state.elapsed >= self._next:
            self._next = state.elapsed + PROGRESS_SECONDS
            self._put(state.message)

    def printed(self, said: str, log: str) -> None:
        """Say what user code prints."""
        super().printed(
            said, log if self._is_kept else f"{Path(log).name} with --run.output_dir DIR"
        )

    def warn(self, message: str) -> None:
        """Print a line that stays."""
        self._put("")
        print(f"warning: {message}", file=sys.stderr)

    def _put(self, line: str) -> None:
        if sys.stderr.isatty():
            print(f"\r\x1b[K{line}", end="", file=sys.stderr, flush=True)  # in place of the last
