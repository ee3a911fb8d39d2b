"""The entry points of training, `train` and `resume`: they assemble a run and clean up after it.

However a run ends (Ctrl-C, a user's mistake and a worker's death included), its processes end, its
shared memory is freed, and `summary.json` says how far it came.
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

from rhymeflow import build, check, emulation, placement
from rhymeflow.config import Config
from rhymeflow.config.fields import as_written, check_unread
from rhymeflow.core.types import SuiteName
from rhymeflow.data.encode import Tokenizer
from rhymeflow.data.load import NUM_CHECKED, RunPrompts, check_same, check_same_template, digest
from rhymeflow.environments import check_calls, check_rows, tool_schemas_apart
from rhymeflow.errors import StorageError, UserError, to_resume
from rhymeflow.models.adapter_files import lost_dropout
from rhymeflow.models.source import other_base
from rhymeflow.observe import metrics, summary
from rhymeflow.observe.metrics import MetricsWriter
from rhymeflow.observe.progress import Progress
from rhymeflow.observe.summary import Summary
from rhymeflow.runtime import processes
from rhymeflow.runtime.base import Runtime
from rhymeflow.runtime.checkpoints import Checkpoints
from rhymeflow.runtime.controller import Controller
from rhymeflow.runtime.disk_space import DiskSpace, is_full
from rhymeflow.runtime.histories import Histories
from rhymeflow.runtime.observer import Observer
from rhymeflow.runtime.replay import beginning, recall
from rhymeflow.runtime.reporting import Reporter
from rhymeflow.runtime.resume import Past
from rhymeflow.runtime.resume_options import changed_code, holding_from, whole_paths
from rhymeflow.runtime.start import check_nodes, check_start, claimed, runtime_of, write_config
from rhymeflow.runtime.supervisor import Supervisor, WorkerDied
from rhymeflow.store import previous_run
from rhymeflow.store.backup import BackupThread
from rhymeflow.store.checkpoint_dirs import DAMAGED, claimed_place, is_url
from rhymeflow.store.damage import check_log, explained
from rhymeflow.store.schema import EVENTS
from rhymeflow.store.writer import SqliteTrajectoryStore
from rhymeflow.suites.suite import RUN, SuitePrompts, load_suites
from rhymeflow.utils import shared_memory, stopping
from rhymeflow.utils.disk import no_room, one_line
from rhymeflow.workers.messages import LoadedModel


class Loaded(NamedTuple):
    """The tokenizer and prompts that the controller needs."""

    tokenizer: Tokenizer
    prompts: RunPrompts
    suites: dict[SuiteName, SuitePrompts]


def train(
    config: Config,
    *,
    run_dir: Path | None = None,
    console: Console | None = None,
    observer: Observer | None = None,
    progress: Progress | None = None,
    begin: Callable[[Path], Config | None] = lambda path: None,
) -> Summary:
    """Train with `config` until the run ends; return its summary.

    `observer` is told of each step, and `progress` shows them, by default on `console`. `begin` is
    called with the run directory once it is claimed, and may return a changed configuration.

    Ctrl-C (or SIGTERM, or SIGHUP when the terminal closes) lets the current step end, saves a
    checkpoint, and then raises `KeyboardInterrupt`; a second one ends the run at once. Either way
    `summary.json` is written, and the run can be resumed.

    Raises:
        UserError: something in the configuration, the data, the model or a reward is wrong.
        WorkerDied: a worker process ended, hangs, or has a defect.
        StorageError: the disk is full, or files of the run were deleted or damaged.
    """
    check_unread(config, "Config")
    config = as_written(config, "Config")
    with stopping.as_interrupts(), claimed(config, run_dir) as (path, store):
        config = emulation.resolved(begin(path) or config)
        check_start(config)
        check_nodes(config)
        prepare(config)
        config = in_force(config, path)
        write_config(config, path)
        past, console = beginning(config), console or Console()
        return attempt(config, path, store, past, console, observer=observer, progress=progress)


def resume(
    run_dir: Path,
    change: Callable[[Config], Config] = lambda config: config,
    *,
    console: Console | None = None,
    observer: Observer | None = None,
    progress: Progress | None = None,
    begin: Callable[[Path], object] = lambda path: None,
) -> Summary:
    """Resume the run in `run_dir`; return the summary of all its attempts.

    `change` turns the last attempt's configuration into this one's; `resume_options` says which
    fields may change. `begin` is called after all checks. Otherwise like `train`.

    Raises:
        UserError: there is no run, another process uses it, the change is not possible, or the log
            is damaged.
    """
    with stopping.as_interrupts(), ExitStack() as open_store:
        check_log(run_dir)
        before = previous_run.open_run(str(run_dir), "resume")
        before.reader.close()
        prepare(before.config)
        open_store.enter_context(one_line(run_dir))
        store = SqliteTrajectoryStore(run_dir / EVENTS)
        open_store.enter_context(closing(store))  # from now on no other process writes to the run
        past, config = recall(run_dir, change)
        config = in_place(config, run_dir)  # it may have been moved
        check.check_workers_here(config)  # the machines may be others than before
        check_nodes(config)
        begin(run_dir)
        console = console or Console()
        return attempt(config, run_dir, store, past, console, observer=observer, progress=progress)


def prepare(config: Config) -> None:
    """On this machine, start the workers' imports in the background."""
    if config.runtime == "local":
        processes.prepare()


def load_while(start: Callable[[], None], config: Config, reporter: Reporter) -> Loaded:
    """Load the data while `start` starts the workers in another thread."""
    notes: list[str | None] = []
    with ThreadPoolExecutor(1, "start") as background, processes.ended_by_interrupt():
        started = background.submit(start)
        reporter.say("loading the model, the data and the reward functions")
        with processes.importing():
            from rhymeflow.environments.template import load_settled
            from rhymeflow.models import tokenizer as tokenizers  # takes long

            tokenizer, settled = load_settled(config)
        notes.append(settled)
        # Only a chat template describes tools to the policy.
        tools = tool_schemas_apart(config) if tokenizer.chat_template else {}
        longest = tokenizers.max_length(config.model)
        prompts, held_out = RunPrompts.none(), None
        if config.learner.is_used:
            prompts = RunPrompts.load(config, tokenizer, longest, tools.get(RUN))
            held_out = prompts.held_out
            notes.append(check_calls(config, tokenizer, prompts.train, tools.get(RUN)))
            check_rows(config, prompts.train[:NUM_CHECKED])
        suites = load_suites(config, held_out, tokenizer, longest, tools)
        for name, suite in suites.items():
            check_rows(suite.config, suite.prompts[:NUM_CHECKED])
            notes.append(check_calls(config, tokenizer, suite.prompts, tools.get(name)))
        started.result()
    notes += [tokenizers.unseen_tokens(config, tokenizer), other_base(config.model)]
    notes += [lost_dropout(config.model), config.learner.bounds_without_effect]
    for note in dict.fromkeys(filter(None, notes)):
        reporter.warn(note)
    if walls := check.walls_note(config):
        reporter.say(walls)
    return Loaded(tokenizer, prompts, suites)


def attempt(
    config: Config,
    path: Path,
    store: SqliteTrajectoryStore,
    past: Past,
    console: Console,
    *,
    observer: Observer | None = None,
    progress: Progress | None = None,
    runtime: Callable[[Config, Path, Path], AbstractContextManager[Runtime]] | None = None,
    load: Callable[[Callable[[], None], Config, Reporter], Loaded] = load_while,
    clock: Callable[[], float] = time.monotonic,
) -> Summary:
    """Continue from `past` until the run ends, is stopped or fails. Tests pass another `runtime`
    (see `runtime_of`), `load` and `clock` (in seconds)."""
    runtime = runtime or runtime_of(config)
    done = past.coordinator.state.published
    metrics.forget_after(path, done or 0)
    writer = MetricsWriter(
        path,
        run=config.run,
        name=path.name,
        config=config.model_dump(mode="json"),
        first_step=0 if done is None else done + 1,
    )
    started = time.strftime("%Y-%m-%dT%H:%M:%SZ", time.gmtime())
    number = store.begin_attempt(config.model_dump_json(), now=past.seconds, started=started)
    results: list[Summary] = []
    unclosed: list[str] = []
    backup = None if config.run.backup is None else BackupThread(path, config.run.backup)
    try:
        with ExitStack() as ending:  # runs in reverse order; all run even if some raise
            ending.callback(lambda: results.append(summary.write(path)))
            if backup is not None:
                ending.callback(backup.close)
            ending.callback(store.close_if_missing)
            ending.callback(store.commit)
            ending.callback(lambda: unclosed.extend(writer.close()))
            shown = ending.enter_context(progress or Progress(console))
            logs = path / "logs" / f"attempt-{number}"
            machine = ending.enter_context(runtime(config, path, logs))
            reporter = Reporter(
                config, writer, shown, seconds=past.seconds, clock=clock, observer=observer
            )
            reporter.continue_from(metrics.read(path), store.endings())
            reporter.backup = backup
            controller = assembled(config, path, store, past, machine, reporter, load)
            with interruptible(controller):
                try:
                    controller.run()
                except StorageError:
                    if path.is_dir():
                        controller.save_last()
                    raise
    except (UserError, WorkerDied) as error:
        if is_full(path):  # the first symptom may have been another error
            raise no_room(path, path) from error
        raise
    (result,) = results
    for problem in unclosed:
        console.print(f"warning: {problem}", soft_wrap=True, markup=False, highlight=False)
    report_end(console, result, path, controller)
    return result


def report_end(console: Console, result: Summary, path: Path, controller: Controller) -> None:
    """Print the summary of the run; raise `KeyboardInterrupt` if the user stopped it."""

    def say(text: str) -> None:
        console.print(text, soft_wrap=True, markup=False, highlight=False)

    console.print(summary.panel(result, path))
    if controller.training.checkpoint is not None:
        say(f"checkpoint: {controller.training.checkpoint}")
    if controller.stop_asked:
        say(f"stopped after {result.steps} steps; to continue: {to_resume(path)}")
    if result.audit is not None:
        said = "checked" if result.audit.is_clean else "error: the run's log breaks a law"
        say(f"{said}: {result.audit.line}")
    if controller.stop_asked:
        raise KeyboardInterrupt


def assembled(
    config: Config,
    path: Path,
    store: SqliteTrajectoryStore,
    past: Past,
    runtime: Runtime,
    reporter: Reporter,
    load: Callable[[Callable[[], None], Config, Reporter], Loaded],
) -> Controller:
    """Start the workers while the data loads, and return the controller."""
    state = past.coordinator.state
    supervisor = Supervisor(config, runtime, used_names=state.names)
    shared_memory.free_left(shared_memory.prefix_for(path, ""))
    store.commit()  # workers and the backup read the store
    place = claimed_place(config.run.checkpoint_dir, path)
    place.set_aside_after(state.published or 0)
    saved = place.up_to()
    if reporter.backup is not None:
        reporter.backup.start()
    loaded = load(supervisor.start, config, reporter)
    for note in check_data_is_the_same(config, loaded, store):
        reporter.warn(holding_from(state.published, note))
    config = in_force_once_loaded(config, loaded.tokenizer, loaded.prompts)
    record_config(config, path, store)

    def on_model(ready: LoadedModel) -> None:
        for version, _ in ready.damaged:
            place.at(version).set_aside(DAMAGED)
        record_config(in_force_with(config, ready), path, store)
        if not is_url(place.where):
            disk = Path(place.where) if place.is_elsewhere else path
            reporter.space = DiskSpace(disk, ready.checkpoint_bytes)
            reporter.space.check(config.run.save_total_limit, len(saved))

    with explained(path / EVENTS):
        return Controller(
            config,
            supervisor=supervisor,
            store=store,
            history=Histories(config, supervisor, reporter, free=shared_memory.free_left),
            prompts=loaded.prompts,
            suites=loaded.suites,
            reporter=reporter,
            past=past,
            checkpoints=Checkpoints(
                config.run,
                partial(state.plan.evaluates, config.run.best_suite),
                num_steps=config.learner.max_steps,
                existing=saved,
                metrics=reporter.earlier,
            ),
            on_model=on_model,
        )


def in_force(config: Config, run_dir: Path) -> Config:
    """Return `config` with the null fields filled in that other fields, the run directory or the
    machine decide. A null that remains means none, off or no limit, or is decided where a worker
    starts: vLLM's share of a GPU, and threads on Ray's nodes."""
    learner, rollout = config.learner, config.rollout
    epsilon_high = learner.epsilon if learner.epsilon_high is None else learner.epsilon_high
    # The nodes of a cluster decide for themselves.
    share = placement.share_of_cores(config) if config.runtime == "local" else None
    cpus_of_rank = len(learner.cpus or ()) // learner.num_ranks
    sizes = {len(cpus) for cpus in rollout.cpus or ()}
    own_size = sizes.pop() if len(sizes) == 1 else None  # else each has its own number
    decided = config.model_copy(update={"schedule": build.rules_in_force(config)})
    return whole_paths(in_place(decided, run_dir)).changed(
        learner={
            "epsilon_high": epsilon_high,
            "num_threads": learner.num_threads or cpus_of_rank or share,
        },
        rollout={"num_threads": rollout.num_threads or (own_size if rollout.cpus else share)},
    )


def in_place(config: Config, run_dir: Path) -> Config:
    """Return `config` with the place of the run's files."""
    return config.changed(run={"output_dir": str(run_dir)})


def in_force_once_loaded(config: Config, tokenizer: Tokenizer, prompts: RunPrompts) -> Config:
    """Return `config` with the values that the data and the tokenizer decide."""
    template, changes = config.data.chat_template, dict[str, object]()
    changes["chat_template"] = bool(tokenizer.chat_template) if template is None else template
    if config.learner.is_used:
        changes |= {"size": len(prompts.train), "eval_size": len(prompts.held_out)}
    return config.changed(data=changes)


def in_force_with(config: Config, ready: LoadedModel) -> Config:
    """Return `config` with the device, dtype, shape of drafts and cache size, which of vLLM
    is its own."""
    rollout = config.rollout
    capacity = rollout.max_kv_tokens
    if rollout.engine == "native":
        capacity = capacity or rollout.max_num_seqs * ready.max_length
    model: dict[str, object] = {"device": ready.device, "dtype": ready.dtype}
    shape = {"shape": config.draft_shape(ready.device)}
    return config.changed(model=model, drafting=shape, rollout={"max_kv_tokens": capacity})


def check_data_is_the_same(
    config: Config, loaded: Loaded, store: SqliteTrajectoryStore
) -> list[str]:
    """Raise `UserError` if rows or the chat template have changed since the run began; record those
    of a new run. Return a line for each file of the user's code that has changed."""
    data, digests = config.data, store.digests()
    rows = {"data.source": (data.source, loaded.prompts.train)}
    for name, suite in loaded.suites.items():
        source = suite.section.source or data.eval_source or data.source
        rows[f"held-out rows of {name}"] = source, suite.prompts
    for what, (source, prompts) in rows.items():
        current = digest(prompts)
        check_same(what, source, digests.get(what, current), current)
        digests[what] = current
    check_same_template(data, loaded.tokenizer.chat_template, digests)
    notes = changed_code(config, digests)
    store.put_digests(digests)
    return notes


def record_config(config: Config, path: Path, store: SqliteTrajectoryStore) -> None:
    """Write the values in force that are known so far to `config.yaml` and the log."""
    write_config(config, path)
    store.put_config(config.model_dump_json())


@contextmanager
def interruptible(controller: Controller) -> Iterator[None]:
    """Upon Ctrl-C, SIGTERM or SIGHUP, end the step, save and stop. Upon a second one, stop after
    this turn of the controller's loop, so that nothing is stored by half. Main thread only."""

    def on_signal(number: int, frame: FrameType | None) -> None:
        controller.end_asked = controller.stop_asked
        controller.stop_asked = True

    with stopping.taking(stopping.not_ignored(), on_signal):
        yield
