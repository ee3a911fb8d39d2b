"""How long a run with a long log takes until it goes on, and what reads the log at its end.

The log (`logs/made_up.py`) ends as by `kill -9`, as far as can be from the last snapshot. Resuming
is timed part by part, up to the first command of an instance; loading is not in it.
"""

from __future__ import annotations

import argparse
import io
import shutil
import sys
import tempfile
import time
from collections.abc import Callable
from contextlib import closing
from pathlib import Path
from types import SimpleNamespace
from typing import Any, TypeVar

from rich.console import Console

from benchmarks import harness
from benchmarks.logs.made_up import CAPACITY, STEPS, Size, add_run_argument, kept, prompts
from rhymeflow.config import Config
from rhymeflow.core import events as e
from rhymeflow.observe import metrics, summary
from rhymeflow.observe.progress import Progress
from rhymeflow.runtime.checkpoints import Checkpoints
from rhymeflow.runtime.controller import Controller
from rhymeflow.runtime.histories import Histories
from rhymeflow.runtime.replay import configured, replay
from rhymeflow.runtime.reporting import Reporter
from rhymeflow.runtime.resume import Past
from rhymeflow.store.damage import check_log
from rhymeflow.store.follow import Follower
from rhymeflow.store.reader import TrajectoryReader
from rhymeflow.store.schema import EVENTS
from rhymeflow.store.writer import SqliteTrajectoryStore
from rhymeflow.workers import messages, restore

LIMIT = 30.0

Found = TypeVar("Found")


def add_arguments(parser: argparse.ArgumentParser) -> None:
    harness.add_number(parser, "--events", 10_000_000, "in the log")
    add_run_argument(parser)


def run(args: argparse.Namespace) -> dict[str, Any]:
    with (
        kept(args.run, Size(args.events), till_snapshot=True) as folder,
        tempfile.TemporaryDirectory(prefix="rhymeflow-resume-") as temporary,
    ):
        if args.run:  # resuming changes it
            folder = Path(shutil.copytree(folder, Path(temporary) / "run"))
        times = resume(folder)
        size = (folder / EVENTS).stat().st_size
        with closing(TrajectoryReader(folder / EVENTS)) as reader:
            ((events,),) = reader.query("SELECT MAX(seq) FROM events")
            ((commands,),) = reader.query("SELECT MAX(seq) FROM commands")
    rows = [{"part": name, "seconds": round(took, 2)} for name, took in times.items()]
    until = sum(took for name, took in times.items() if name not in BESIDE)
    longest = max(times[name] for name in BESIDE)
    targets = [
        harness.at_most("resume/first command, seconds", until, LIMIT),
        harness.at_most("resume/longest part beside it, seconds", longest, LIMIT),
    ]
    notes = (
        f"{events:,} events, {commands:,} commands, {size / 2**30:.1f} GiB, in the page cache; the "
        "log ends just before the next snapshot. Until the first command: all but "
        f"{', '.join(BESIDE)}, which other processes do meanwhile, or the run does at its end."
    )
    return harness.report("resume", rows, targets, args, notes=notes)


# -- resuming ----------------------------------------------------------------------------------


BESIDE = ("history index: where it begins", "learner: what to train again", "summary.json")


def resume(folder: Path) -> dict[str, float]:
    """What `rhymeflow resume` does with the log, timed."""
    times: dict[str, float] = {}

    def timed(name: str, part: Callable[[], Found]) -> Found:
        started = time.perf_counter()
        found = part()
        times[name] = time.perf_counter() - started
        print(f"{name}: {times[name]:.2f} s", file=sys.stderr, flush=True)
        return found

    path = folder / EVENTS
    timed("whether the file is whole", lambda: check_log(folder))
    with closing(SqliteTrajectoryStore(path)) as store, closing(TrajectoryReader(path)) as reader:
        past = timed("replay", lambda: replay(reader, path))
        config = Config.model_validate_json(reader.attempts()[-1].config)
        published = past.coordinator.state.published or 0
        configured(config, past.coordinator)
        timed("metrics, cut", lambda: metrics.forget_after(folder, published))
        rows = timed("metrics", lambda: metrics.read(folder))
        endings = timed("endings", store.endings)
        with Progress(Console(file=io.StringIO())) as progress:
            no_writer: Any = SimpleNamespace(write=lambda *row: None)
            reporter = Reporter(config, no_writer, progress, seconds=past.seconds)
            reporter.continue_from(rows, endings)
            flying = "what was in flight"
            controller = timed(flying, lambda: assemble(config, store, past, reporter))
            timed("first command", lambda: first_command(controller))
        tokens = config.drafting.history_tokens
        timed(BESIDE[0], lambda: Follower(reader, num_tokens=tokens))
        last = timed(BESIDE[1], lambda: restore.published(reader))
        assert last == published
        timed(BESIDE[2], lambda: summary.summarize(folder))
    return times


def assemble(
    config: Config, store: SqliteTrajectoryStore, past: Past, reporter: Reporter
) -> Controller:
    """The controller, with workers that only take messages."""
    sent: list[Any] = []
    worker = SimpleNamespace(name="rollout-0.9", send=sent.append)
    supervisor: Any = SimpleNamespace(
        instances={worker.name: worker}, rewards=worker, learner=worker, ranks=[worker],
        role=lambda name: name, sent=sent,
    )  # fmt: skip
    store.begin_attempt(config.model_dump_json(), now=past.seconds, started="again")
    controller = Controller(
        config, supervisor=supervisor, store=store, reporter=reporter, past=past,
        history=Histories(config, supervisor, reporter, free=print),
        prompts=prompts(config), suites={},
        checkpoints=Checkpoints(config.run, lambda version: False, num_steps=STEPS),
        on_model=lambda ready: None,
    )  # fmt: skip
    del sent[:]  # what is judged again
    return controller


def first_command(controller: Controller) -> None:
    """The learner is ready, an instance joins, and is given something to generate."""
    published = controller.training.published
    controller._events += [
        e.LearnerReady(published, "0" * 16),
        e.InstanceJoined("rollout-0.9", published, CAPACITY, 10**6, "0" * 16),
    ]
    controller._tick()
    sent = controller.supervisor.sent  # type: ignore[attr-defined]
    assert any(isinstance(message, messages.Envelope) for message in sent), sent
