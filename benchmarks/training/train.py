"""Starts the commands that benchmarks measure, and reads the metrics of training runs.

A run that is stopped early ends as by Ctrl-C, after the current step, so its directory is complete.
"""

from __future__ import annotations

import contextlib
import functools
import json
import os
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Hashable, Mapping, Sequence
from pathlib import Path
from typing import Any, TypeVar

from benchmarks import harness
from rhymeflow.config import Config
from rhymeflow.config.load import dump_config
from rhymeflow.errors import UserError

Side = TypeVar("Side", bound=Hashable)
Result = TypeVar("Result")

ROOT = Path(__file__).resolve().parent.parent.parent
POLL_SECONDS = 1.0
END_SECONDS = 5.0  # until a run that was told to end is told again
QUIET = {
    "data.eval_size": "0",
    "data.eval_source": "null",
    "run.eval_steps": "0",
    "run.save_seconds": "0",
    "run.report_to": "[]",
}
"""Settings of runs whose speed is measured: no evaluation, no checkpoints, no reports."""


def pinned(num_instances: int) -> dict[str, str]:
    """Settings that give the learner the first core and the instances the others, round robin.

    One thread each, so that no side wins by using cores that another leaves idle.
    """
    learner, instances = cores(num_instances)
    return {
        "rollout.num_instances": str(num_instances),
        "rollout.num_threads": "1",
        "learner.num_threads": "1",
        "rollout.cpus": json.dumps(instances),
        "learner.cpus": json.dumps(learner),
    }


def cores(num_instances: int) -> tuple[list[int], list[list[int]]]:
    first, *rest = sorted(os.sched_getaffinity(0))
    if not rest:
        raise UserError("this benchmark needs two cores: one for the learner, one for rollout")
    return [first], [[rest[index % len(rest)]] for index in range(num_instances)]


def train(
    config: Config, *, num_cores: int | None = None, is_enough: Callable[[Path], bool] | None = None
) -> Path:
    """Train to the end, or until `is_enough(run_dir)`; return the run directory.

    Raises:
        UserError: the run failed; the message holds its last line.
    """
    assert config.run.output_dir is not None
    run_dir = Path(config.run.output_dir)
    path = run_dir.with_name(f"{run_dir.name}.yaml").resolve()
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(dump_config(config), encoding="utf-8")
    command = [sys.executable, "-m", "rhymeflow", "train", str(path)]
    watch = is_enough and functools.partial(is_enough, run_dir)
    call(command, num_cores=num_cores, is_enough=watch)
    return run_dir


def call(
    command: Sequence[str],
    *,
    num_cores: int | None = None,
    is_enough: Callable[[], bool] | None = None,
) -> None:
    """Run a command on the first `num_cores` cores; interrupt it once `is_enough()`.

    Raises:
        UserError: it failed; the message holds its last line.
    """
    chosen = sorted(os.sched_getaffinity(0))[:num_cores]
    with tempfile.TemporaryFile("w+", encoding="utf-8") as output:
        process = subprocess.Popen(
            command,
            cwd=ROOT,
            stdin=subprocess.DEVNULL,
            stdout=output,
            stderr=subprocess.STDOUT,
            preexec_fn=functools.partial(os.sched_setaffinity, 0, chosen),
        )
        try:
            was_interrupted = _wait(process, is_enough)
        except BaseException:
            _end(process)
            raise
        if process.returncode and not (was_interrupted and process.returncode == 130):
            output.seek(0)
            last = output.read().strip().splitlines()[-1:]
            raise UserError(f"{' '.join(command[1:5])} failed: {' '.join(last)}")


def _end(process: subprocess.Popen[bytes]) -> None:
    """Have it end its workers, which write to its directory, at once and not after a step; then it
    is gone."""
    for stop in (process.terminate, process.terminate, process.kill):
        stop()
        with contextlib.suppress(subprocess.TimeoutExpired):
            process.wait(END_SECONDS)
            return
    process.wait()


def _wait(process: subprocess.Popen[bytes], is_enough: Callable[[], bool] | None) -> bool:
    """Until it ends; whether it was interrupted."""
    while is_enough and process.poll() is None:
        if is_enough():
            process.send_signal(signal.SIGINT)
            process.wait()
            return True
        time.sleep(POLL_SECONDS)
    process.wait()
    return False


def repeated(
    sides: Mapping[Side, Callable[[int, Path], Result]],
    repeats: int,
    figure: Callable[[Result], float],
) -> dict[Side, list[Result]]:
    """What each side finds, in turn; sides get the number of the repeat and a new run directory.

    `figure` is the one of a result that is shown as it goes.
    """
    found: dict[Side, list[Result]] = {side: [] for side in sides}

    def measure(side: Side, run_dir: Path) -> float:
        number = len(found[side])
        found[side].append(sides[side](number, run_dir.with_name(f"{run_dir.name}-{number}")))
        return figure(found[side][-1])

    with tempfile.TemporaryDirectory(prefix="rhymeflow-bench-") as folder:
        places = {side: Path(folder) / str(place) for place, side in enumerate(sides)}
        measures = {str(s): functools.partial(measure, s, place) for s, place in places.items()}
        harness.interleave(measures, repeats)
    return found


def training_rows(run_dir: Path) -> list[dict[str, Any]]:
    """The rows of `metrics.jsonl` that describe a training step, in order."""
    lines = (run_dir / "metrics.jsonl").read_text(encoding="utf-8").splitlines()
    return [row for row in map(json.loads, lines) if "completions/mean_length" in row]


class Peer:
    """A process that answers one JSON request at a time, perhaps of another environment's python.

    It prints a line `answer:` and a JSON object when it is ready, and one for each line of JSON on
    its stdin. Its process group is stopped between requests, as the workers of some systems poll
    for work, so it takes nothing from the side that is being measured.
    """

    def __init__(self, python: str, arguments: Sequence[str], num_threads: int = 1) -> None:
        self._python = python
        self._errors = tempfile.TemporaryFile("w+", encoding="utf-8")  # noqa: SIM115 - see close
        self._process = subprocess.Popen(
            [python, *arguments],
            cwd=ROOT,
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=self._errors,
            env={**os.environ, "OMP_NUM_THREADS": str(num_threads)},
            text=True,
            start_new_session=True,
        )
        self._answer()
        self._signal(signal.SIGSTOP)

    def ask(self, request: dict[str, Any]) -> dict[str, Any]:
        assert self._process.stdin is not None
        self._signal(signal.SIGCONT)
        self._process.stdin.write(json.dumps(request) + "\n")
        self._process.stdin.flush()
        answer = self._answer()
        self._signal(signal.SIGSTOP)
        return answer

    def close(self) -> None:
        assert self._process.stdin is not None
        self._signal(signal.SIGCONT)
        self._process.stdin.close()
        self._process.wait(timeout=60)
        self._errors.close()

    def _signal(self, number: signal.Signals) -> None:
        os.killpg(self._process.pid, number)

    def _answer(self) -> dict[str, Any]:
        assert self._process.stdout is not None
        for line in self._process.stdout:
            if line.startswith("answer:"):
                return dict(json.loads(line.removeprefix("answer:")))
        self._process.wait()
        self._errors.seek(0)
        last = self._errors.read().strip().splitlines()[-1:]
        raise UserError(f"{self._python}: {' '.join(last)}")
