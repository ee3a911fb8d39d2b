"""Training: the entry point, which puts a run together and gives everything back at its end.

Whatever ends the run (its end, Ctrl-C, a mistake of the user's, a worker's death), all processes
and the shared memory are given back and the run directory says what was reached.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import AbstractContextManager, ExitStack, closing, contextmanager
from functools import partial
from pathlib import Path
from types import FrameType
from typing import NamedTuple

from rich.console import Console

from rhymeflow.config import Config
from rhymeflow.core.types import SuiteName
from rhymeflow.data.encode import Tokenizer
from rhymeflow.data.load import LOOKED_AT, RunPrompts, check_same, digest
from rhymeflow.environments import check_calls, check_rows, tool_schemas_apart
from rhymeflow.errors import StorageError, UserError, to_resume
from rhymeflow.observe import metrics, summary
from rhymeflow.observe.metrics import MetricsWriter
from rhymeflow.observe.progress import Progress
from rhymeflow.observe.summary import Summary
from rhymeflow.runtime import in_force, processes
from rhymeflow.runtime.base import Runtime
from rhymeflow.runtime.checkpoints import Checkpoints
from rhymeflow.runtime.claimed import claimed
from rhymeflow.runtime.controller import Controller
from rhymeflow.runtime.disk_space import DiskSpace, is_full
from rhymeflow.runtime.histories import Histories
from rhymeflow.runtime.observer import Observer
from rhymeflow.runtime.replay import beginning, recall
from rhymeflow.runtime.reporting import Reporter
from rhymeflow.runtime.resume import Past
from rhymeflow.runtime.start import check_start, runtime_of, write_config
from rhymeflow.runtime.supervisor import Supervisor, WorkerDied
from rhymeflow.store import previous_run
from rhymeflow.store.backup import BackupThread
from rhymeflow.store.checkpoint_dirs import (
    CHECKPOINTS,
    DAMAGED,
    checkpoints_up_to,
    rename,
    set_aside,
)
from rhymeflow.store.damage import check_log, explained
from rhymeflow.store.schema import EVENTS
from rhymeflow.store.writer import SqliteTrajectoryStore
from rhymeflow.suites.suite import RUN, SuitePrompts, load_suites
from rhymeflow.utils import shared_memory, stopping
from rhymeflow.utils.disk import no_room, one_line
from rhymeflow.workers.messages import Model


class Loaded(NamedTuple):
    """What the controller needs of data and model."""

    tokenizer: Tokenizer
    prompts: RunPrompts
    suites: dict[SuiteName, SuitePrompts]


class Machine(NamedTuple):
    """What an attempt at a run runs on."""

    runtime: Callable[[Config, Path, Path], AbstractContextManager[Runtime]]
    """Of the configuration, the run directory and the directory for logs."""
    load: Callable[[Callable[[], None], Config, Reporter], Loaded]
    """Has workers started, and loads what the controller needs meanwhile."""
    clock: Callable[[], float]
    """Seconds, since whenever."""


def train(
    config: Config,
    *,
    run_dir: Path | None = None,
    console: Console | None = None,
    observer: Observer | None = None,
    progress: Progress | None = None,
    begin: Callable[[Path], Config | None] = lambda path: None,
) -> Summary:
    """Run `config` to its end on this machine; return what it came to. `observer` is told of it,
    and `progress` shows it, by default on `console`.

    `begin` is called with the run directory as soon as it is this run's; it may return another
    configuration for it.

    Ctrl-C (SIGTERM, or SIGHUP of a terminal that is closed) ends the step that is being trained on,
    saves a checkpoint, and then raises `KeyboardInterrupt`; a second one ends the run at once.
    `summary.json` is written either way, and `resume` goes on.

    Raises:
        UserError: something in the configuration, the data, the model or a reward is wrong.
        WorkerDied: a worker process ended, hangs, or has a defect.
        StorageError: the disk is full, or files of the run were deleted or damaged.
    """
    with stopping.as_interrupts(), claimed(config, run_dir) as (path, store):
        config = begin(path) or config
        check_start(config)
        prepare(config)
        config = in_force.before_the_start(config, path)
        write_config(config, path)
        past, console = beginning(config), console or Console()
        return attempt(config, path, store, past, console, observer=observer, progress=progress)


def resume(
    run_dir: Path,
    change: Callable[[Config], Config] = lambda config: config,
    *,
    console: Console | None = None,
    observer: Observer | None = None,
    begin: Callable[[Path], object] = lambda path: None,
) -> Summary:
    """Go on with the run in `run_dir`, however it ended; return what the whole run came to.

    `change` makes this attempt's configuration of the last one's, as far as `resume_options`
    allows. `begin` is called when nothing is refused any more. Otherwise like `train`.

    Raises:
        UserError: there is no run, another process carries it on, the change is not possible, or
            the log is damaged.
    """
    with stopping.as_interrupts(), ExitStack() as open_store:
        check_log(run_dir)
        before = previous_run.open_run(str(run_dir), "resume")
        before.reader.close()
        prepare(before.config)
        open_store.enter_context(one_line(run_dir))
        store = SqliteTrajectoryStore(run_dir / EVENTS)
        open_store.enter_context(closing(store))  # nobody else writes there now
        past, config = recall(run_dir, change)
        config = config.changed(run={"output_dir": str(run_dir)})  # it may have been moved
        begin(run_dir)
        return attempt(config, run_dir, store, past, console or Console(), observer=observer)


def prepare(config: Config) -> None:
    """Have loaded what workers of this machine need, beside what the caller does meanwhile."""
    if config.runtime == "local":
        processes.prepare()


def attempt(
    config: Config,
    path: Path,
    store: SqliteTrajectoryStore,
    past: Past,
    console: Console,
    machine: Machine | None = None,
    *,
    observer: Observer | None = None,
    progress: Progress | None = None,
) -> Summary:
    """Go on from `past` until the run ends, is stopped or fails."""
    machine = machine or Machine(runtime_of(config), load_while, time.monotonic)
    done = past.coordinator.state.published
    metrics.forget_after(path, done or 0)
    set_aside(path / CHECKPOINTS, done or 0)
    writer = MetricsWriter(
        path,
        report_to=config.run.report_to,
        name=path.name,
        config=config.model_dump(mode="json"),
        first_step=0 if done is None else done + 1,
    )
    started = time.strftime("%Y-%m-%dT%H:%M:%SZ", time.gmtime())
    number = store.begin_attempt(config.model_dump_json(), now=past.seconds, started=started)
    logs = path / "logs" / f"attempt-{number}"
    results: list[Summary] = []
    backup = None if config.run.backup is None else BackupThread(path, config.run.backup)
    try:
        display = progress or Progress(console)
        with display as shown, machine.runtime(config, path, logs) as runtime:
            seconds, clock = past.seconds, machine.clock
            reporter = Reporter(
                config, writer, shown, seconds=seconds, clock=clock, observer=observer
            )
            reporter.continue_from(metrics.read(path), store.endings())
            reporter.backup = backup
            controller = assembled(config, path, store, past, runtime, reporter, machine)
            with interruptible(controller):
                try:
                    controller.run()
                except StorageError:
                    if path.is_dir():
                        controller.save_last()
                    raise
    except (UserError, WorkerDied) as error:
        if is_full(path):  # whoever noticed it first may have called it something else
            raise no_room(path, path) from error
        raise
    finally:
        with ExitStack() as ending:  # backwards; each is done, whatever becomes of the others
            ending.callback(lambda: results.append(summary.write(path)))
            if backup is not None:
                ending.callback(backup.close)
            ending.callback(store.close_if_missing)
            ending.callback(store.commit)
            ending.callback(writer.close)
    (result,) = results
    report_end(console, result, path, controller)
    return result


def report_end(console: Console, result: Summary, path: Path, controller: Controller) -> None:
    """Say what the run came to; raise `KeyboardInterrupt` if the user stopped it."""

    def say(text: str) -> None:
        console.print(text, soft_wrap=True, markup=False, highlight=False)

    console.print(summary.panel(result, path))
    if controller.training.checkpoint is not None:
        say(f"checkpoint: {controller.training.checkpoint}")
    if controller.stop_asked:
        say(f"stopped after {result.steps} steps; to go on: {to_resume(path)}")
        raise KeyboardInterrupt


def assembled(
    config: Config,
    path: Path,
    store: SqliteTrajectoryStore,
    past: Past,
    runtime: Runtime,
    reporter: Reporter,
    machine: Machine,
) -> Controller:
    """Start the workers, load what the controller needs meanwhile, and put it together."""
    state = past.coordinator.state
    supervisor = Supervisor(config, runtime, used_names=state.names)
    saved = checkpoints_up_to(path / CHECKPOINTS, state.published or 0)
    shared_memory.free_left(shared_memory.prefix_for(path, ""))
    store.commit()  # workers read it, and the backup
    if reporter.backup is not None:
        reporter.backup.start()
    loaded = machine.load(supervisor.start, config, reporter)
    check_rows_are_the_same(config, loaded, store)
    config = in_force.once_loaded(config, loaded.tokenizer, loaded.prompts)
    record_config(config, path, store)

    def on_model(ready: Model) -> None:
        for version, _ in ready.damaged:
            rename(path / CHECKPOINTS / f"step-{version}", DAMAGED)
        record_config(in_force.with_the_model(config, ready), path, store)
        reporter.space = DiskSpace(path, ready.checkpoint_bytes)
        reporter.space.check(config.run.save_total_limit, len(saved))

    with explained(path / EVENTS):
        return Controller(
            config,
            supervisor=supervisor,
            store=store,
            history=Histories(config, supervisor, warn=reporter.warn, free=shared_memory.free_left),
            prompts=loaded.prompts,
            suites=loaded.suites,
            reporter=reporter,
            past=past,
            checkpoints=Checkpoints(
                config.run,
                partial(state.plan.evaluates, config.run.best_suite),
                num_steps=config.learner.max_steps,
                there=saved,
                known=reporter.earlier,
            ),
            on_model=on_model,
        )


def check_rows_are_the_same(config: Config, loaded: Loaded, store: SqliteTrajectoryStore) -> None:
    """Of a run that goes on; of one that begins they are noted. Raises `UserError`."""
    data, known = config.data, store.digests()
    rows = {"data.source": (data.source, loaded.prompts.train)}
    for name, suite in loaded.suites.items():
        source = suite.section.source or data.eval_source or data.source
        rows[f"held-out rows of {name}"] = source, suite.prompts
    for what, (source, prompts) in rows.items():
        found = digest(prompts)
        check_same(what, source, known.get(what, found), found)
        known[what] = found
    store.put_digests(known)


def record_config(config: Config, path: Path, store: SqliteTrajectoryStore) -> None:
    """Write down the values in force, as far as they are known: for people, and in the log."""
    write_config(config, path)
    store.put_config(config.model_dump_json())


def load_while(start: Callable[[], None], config: Config, reporter: Reporter) -> Loaded:
    """Load the prompts while workers start, which wait for the server that they are forked from."""
    with ThreadPoolExecutor(1, "start") as background, processes.ended_by_interrupt():
        started = background.submit(start)
        reporter.say("loading the model, the data and the reward functions")
        with processes.importing():
            from rhymeflow.models import tokenizer as tokenizers  # takes long

            tokenizer = tokenizers.load_tokenizer(config.model)
        # Only a chat template tells the policy of tools.
        tools = tool_schemas_apart(config) if tokenizer.chat_template else {}
        longest = tokenizers.max_length(config.model)
        prompts, held_out = RunPrompts.none(), None
        if config.learner.is_used:
            prompts = RunPrompts.load(config, tokenizer, longest, tools.get(RUN))
            held_out = prompts.held_out
            check_calls(config, tokenizer, prompts.train, tools.get(RUN))
            check_rows(config, prompts.train[:LOOKED_AT])
        suites = load_suites(config, held_out, tokenizer, longest, tools)
        for name, suite in suites.items():
            check_rows(suite.config, suite.prompts[:LOOKED_AT])
            check_calls(config, tokenizer, suite.prompts, tools.get(name))
        started.result()
    if unseen := tokenizers.unseen_tokens(config.model, tokenizer):
        reporter.warn(unseen)
    return Loaded(tokenizer, prompts, suites)


@contextmanager
def interruptible(controller: Controller) -> Iterator[None]:
    """Ctrl-C, SIGTERM or SIGHUP once: end the step, save, stop. Twice: end between two turns.

    Nothing is interrupted in the middle: half of what belongs together could be stored.
    Only the main thread may take signals; a run in another thread leaves them alone.
    """

    def on_signal(number: int, frame: FrameType | None) -> None:
        controller.end_asked = controller.stop_asked
        controller.stop_asked = True

    with stopping.taking(stopping.not_ignored(), on_signal):
        yield
