"""Training: the entry point, which puts a run together and gives everything back at its end.

    summary = train(config)

Holds true: whatever ends the run (its end, Ctrl-C, a mistake of the user's, a worker's death), all
processes and the shared memory are given back and the run directory says what was reached.
"""

from __future__ import annotations

import signal
import threading
from collections.abc import Iterator
from contextlib import closing, contextmanager
from pathlib import Path
from types import FrameType

from rich.console import Console

from rhymeflow.config import Config
from rhymeflow.data.run_prompts import RunPrompts
from rhymeflow.histospec.index import Index
from rhymeflow.models.load import load_tokenizer
from rhymeflow.observe import summary
from rhymeflow.observe.metrics import MetricsWriter
from rhymeflow.observe.progress import Progress
from rhymeflow.observe.summary import Summary
from rhymeflow.runtime import in_force
from rhymeflow.runtime import run_dir as directories
from rhymeflow.runtime.base import Runtime
from rhymeflow.runtime.controller import Controller
from rhymeflow.runtime.history_index import HistoryIndex
from rhymeflow.runtime.local import LocalRuntime
from rhymeflow.runtime.reporting import Reporter
from rhymeflow.runtime.single_learner import SingleLearner
from rhymeflow.runtime.supervisor import Supervisor
from rhymeflow.store import previous_run
from rhymeflow.store.base import TrajectoryStore
from rhymeflow.store.writer import SqliteTrajectoryStore

STOP_SIGNALS = (signal.SIGINT, signal.SIGTERM)
"""What people and what clusters stop a run with."""


def train(
    config: Config, *, run_dir: Path | None = None, console: Console | None = None
) -> Summary:
    """Run `config` to its end on this machine; return what it came to.

    Ctrl-C (or SIGTERM) ends the step that is being trained on, saves a checkpoint, and then raises
    `KeyboardInterrupt`; a second one ends the run at once. `summary.json` is written either way.

    Raises:
        UserError: something in the configuration, the data, the model or a reward is wrong.
        WorkerDied: a worker process ended, hangs, or has a defect.
    """
    console = console or Console()
    previous_run.check(config.drafting.history_run, "drafting.history_run")
    path = run_dir or directories.choose_run_dir(config)
    config = in_force.before_the_start(config, path)
    directories.create_run_dir(config, path)
    metrics = MetricsWriter(
        path,
        report_to=config.run.report_to,
        name=path.name,
        config=config.model_dump(mode="json"),
    )
    try:
        with Progress(console) as progress, LocalRuntime(config, path) as runtime:
            reporter = Reporter(config, metrics, progress)
            with (
                assembled(config, path, runtime, reporter) as controller,
                interruptible(controller),
            ):
                controller.run()
    finally:
        metrics.close()
        if (path / "events.db").exists():
            result = summary.write(path)
    console.print(summary.panel(result, path))
    saved = controller.checkpoint
    if saved is not None:
        console.print(f"checkpoint: {saved}", soft_wrap=True, markup=False, highlight=False)
    if controller.stop_asked:
        on = f"; to train on from here: --model.name {saved}" if saved else ""
        console.print(
            f"stopped after {result.steps} steps{on}", soft_wrap=True, markup=False, highlight=False
        )
        raise KeyboardInterrupt
    return result


@contextmanager
def assembled(
    config: Config, path: Path, runtime: Runtime, reporter: Reporter
) -> Iterator[Controller]:
    """Start the workers, load what the controller needs meanwhile, and put it together."""
    supervisor = Supervisor(config, runtime)
    with (
        closing(SqliteTrajectoryStore(path / "events.db")) as store,
        history_index(config) as index,
    ):
        supervisor.start()
        reporter.say("loading the model, the data and the reward functions")
        tokenizer = load_tokenizer(config.model)
        prompts = RunPrompts.load(config, tokenizer)
        config = in_force.once_loaded(config, tokenizer, prompts)
        record_config(config, path, store)
        yield Controller(
            config,
            supervisor=supervisor,
            store=store,
            learner=SingleLearner(supervisor.learner),
            history=HistoryIndex(index, supervisor, reporter.warn),
            prompts=prompts,
            reporter=reporter,
            on_model=lambda ready: record_config(
                in_force.with_the_model(config, ready), path, store
            ),
        )


def record_config(config: Config, path: Path, store: TrajectoryStore) -> None:
    """Write down the values in force, as far as they are known: for people, and in the log."""
    directories.write_config(config, path)
    store.put_config(config.model_dump_json())


@contextmanager
def history_index(config: Config) -> Iterator[Index | None]:
    """The shared index of a run that drafts.

    Its memory is given back at the end; if this process is killed, by its resource tracker.
    """
    drafting = config.drafting
    if drafting.window == "off":
        yield None
        return
    index = Index(
        max_tokens=drafting.history_tokens,
        max_responses=drafting.history_responses,
        shared=True,
    )
    with closing(index):
        yield index


@contextmanager
def interruptible(controller: Controller) -> Iterator[None]:
    """Ctrl-C or SIGTERM once: end the step, save, stop. Twice: end at once.

    Only the main thread may take signals; a run in another thread leaves them alone.
    """

    def on_signal(number: int, frame: FrameType | None) -> None:
        if controller.stop_asked:
            raise KeyboardInterrupt
        controller.stop_asked = True

    if threading.current_thread() is not threading.main_thread():
        yield
        return
    previous = {number: signal.signal(number, on_signal) for number in STOP_SIGNALS}
    try:
        yield
    finally:
        for number, handler in previous.items():
            signal.signal(number, handler)
