"""How long a run with a long log takes until it goes on, and what reads the log at its end.

The log is made by the coordinator, the controller's log and the store: responses of the demo's
size on 16 instances that answer at once. It ends as by `kill -9`, as far as can be from the last
snapshot of the coordinator's state. Resuming is timed part by part, up to the first command that an
instance gets; loading the model and the data, which every run does, is not in it.
"""

from __future__ import annotations

import argparse
import io
import random
import shutil
import sys
import tempfile
import time
from collections import deque
from collections.abc import Callable, Iterator
from contextlib import closing
from pathlib import Path
from types import SimpleNamespace
from typing import Any, TypeVar

from rich.console import Console

from benchmarks import harness
from rhymeflow.config import Config
from rhymeflow.config.load import read_config
from rhymeflow.core import commands as c
from rhymeflow.core import events as e
from rhymeflow.core.types import TrajectoryId
from rhymeflow.data.prompts import Prompt
from rhymeflow.data.run_prompts import RunPrompts
from rhymeflow.data.stream import PromptStream
from rhymeflow.observe import metrics, summary
from rhymeflow.observe.progress import Progress
from rhymeflow.observe.summary import EVENTS
from rhymeflow.runtime import event_log
from rhymeflow.runtime.checkpoints import Checkpoints
from rhymeflow.runtime.controller import Controller
from rhymeflow.runtime.damage import check_log
from rhymeflow.runtime.event_log import EventLog
from rhymeflow.runtime.history_index import HistoryIndex
from rhymeflow.runtime.past import Past
from rhymeflow.runtime.replay import beginning, configured, replay
from rhymeflow.runtime.reporting import Reporter
from rhymeflow.store.follow import Follower
from rhymeflow.store.reader import TrajectoryReader
from rhymeflow.store.writer import SqliteTrajectoryStore
from rhymeflow.workers import messages, restore

INSTANCES, CAPACITY, FINISHED = 16, 64, 64
"""Instances, responses that one decodes at a time, and responses that end between two ticks."""
TOKENS = 50
"""Of a response, on average: the demo's."""
ROWS = 1_000_000
"""Prompts: more than the length predictor remembers."""
STEPS = 10_000_000
"""More than there will be."""
METRICS = 60
"""Numbers in a row of metrics.jsonl: the demo's."""
LIMIT = 30.0

Found = TypeVar("Found")


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Add this benchmark's options."""
    harness.add_number(parser, "--events", 10_000_000, "in the log")
    parser.add_argument(
        "--run", metavar="DIR", type=Path, help="where the run is kept; one that is there is used"
    )


def run(args: argparse.Namespace) -> dict[str, Any]:
    """Make a log, if there is none, and resume from it."""
    folder = args.run or Path(tempfile.mkdtemp(prefix="rhymeflow-resume-"))
    try:
        if not (folder / EVENTS).exists():
            folder.mkdir(exist_ok=True)
            build_log(folder, args.events)
        times = resume(folder)
        size = (folder / EVENTS).stat().st_size
        with closing(TrajectoryReader(folder / EVENTS)) as reader:
            ((events,),) = reader.query("SELECT MAX(seq) FROM events")
            ((commands,),) = reader.query("SELECT MAX(seq) FROM commands")
    finally:
        if args.run is None:
            shutil.rmtree(folder)
    rows = [{"part": name, "seconds": round(took, 2)} for name, took in times.items()]
    until = sum(took for name, took in times.items() if name not in BESIDE)
    longest = max(times[name] for name in BESIDE)
    targets = [
        harness.Target("resume/first command, seconds", until, LIMIT, at_most=True),
        harness.Target("resume/longest part beside it, seconds", longest, LIMIT, at_most=True),
    ]
    notes = (
        f"{events:,} events, {commands:,} commands, {size / 2**30:.1f} GiB, in the page cache; the "
        f"log ends just before the next snapshot. Until the first command: all but {', '.join(BESIDE)}, "
        "which other processes do meanwhile, or the run does at its end."
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
        rows = timed("metrics", lambda: read_metrics(folder, published))
        endings = timed("endings", store.endings)
        with Progress(Console(file=io.StringIO())) as progress:
            reporter = Reporter(config, no_writer(), progress, seconds=past.seconds)
            reporter.continue_from(rows, endings)
            controller = timed(
                "what was in flight", lambda: assemble(config, store, past, reporter)
            )
            timed("first command", lambda: first_command(controller))
        tokens = config.drafting.history_tokens
        timed(BESIDE[0], lambda: Follower(reader, num_tokens=tokens))
        last = timed(BESIDE[1], lambda: restore.published(reader))
        assert last == published
        timed(BESIDE[2], lambda: summary.summarize(folder))
    return times


def read_metrics(folder: Path, published: int) -> dict[int, dict[str, Any]]:
    """As an attempt does when it begins."""
    metrics.forget_after(folder, published)
    return metrics.read(folder)


def no_writer() -> Any:
    """A writer of metrics that writes none."""
    return SimpleNamespace(write=lambda *row: None)


class Letters:
    """Encodes a prompt as its characters."""

    def encode(self, prompt: Prompt) -> list[int]:
        """Their code points."""
        return [ord(letter) for letter in prompt.prompt]


class Questions:
    """Prompts by row."""

    def __len__(self) -> int:
        return ROWS

    def __getitem__(self, row: int) -> Prompt:
        return Prompt(row, f"{row} + {row % 97} = ?", {"answer": str(row + row % 97)})


def prompts(config: Config) -> RunPrompts:
    """A source that costs nothing."""
    stream = PromptStream(Questions(), config.run.seed, shuffle=False)
    return RunPrompts(Questions(), stream, Letters(), [], [])  # type: ignore[arg-type]


def assemble(
    config: Config, store: SqliteTrajectoryStore, past: Past, reporter: Reporter
) -> Controller:
    """The controller, with workers that only take messages."""
    sent: list[Any] = []
    worker = SimpleNamespace(name="rollout-0.9", send=sent.append)
    learner = SimpleNamespace(
        train=lambda *batch: None, publish=lambda version: None, save=lambda keep: None
    )
    supervisor: Any = SimpleNamespace(
        instances={worker.name: worker}, rewards=worker, role=lambda name: name, sent=sent
    )
    store.begin_attempt(config.model_dump_json(), now=past.seconds, started="again")
    controller = Controller(
        config,
        supervisor=supervisor,
        store=store,
        learner=learner,
        history=HistoryIndex(None, supervisor, print),
        prompts=prompts(config),
        reporter=reporter,
        past=past,
        checkpoints=Checkpoints(config.run, lambda version: False, num_steps=STEPS),
        on_model=lambda ready: None,
    )
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
    assert any(isinstance(message, messages.Route) for message in sent), sent


# -- a long log --------------------------------------------------------------------------------


def build_log(folder: Path, num_events: int) -> None:
    """Write a run of so many events, or a few more, and leave it as a kill does."""
    config = read_config(
        "demo",
        {
            "learner.max_steps": str(STEPS),
            "rollout.num_instances": str(INSTANCES),
            "schedule.max_inflight_batches": "4",
            "data.eval_size": "0",
            "drafting.window": "off",
            "run.output_dir": str(folder),
        },
    )
    with closing(SqliteTrajectoryStore(folder / EVENTS)) as store:
        store.begin_attempt(config.model_dump_json(), now=0.0, started="first")
        cluster = Cluster(config, store, folder)
        while not (
            cluster.num_events >= num_events
            and cluster.log._num_events > 0.99 * event_log.SNAPSHOT_EVENTS - 1000
        ):
            cluster.round()
        store.commit()
        cluster.metrics.close()


class Cluster:
    """Instances, a learner and rewards that answer at once, and store what real ones would."""

    def __init__(self, config: Config, store: SqliteTrajectoryStore, folder: Path) -> None:
        self.store, self.prompts = store, Questions()
        past = beginning(config)
        self.training = SimpleNamespace(batch=None)
        in_flight: Any = SimpleNamespace(seal_all=lambda: None)
        self.log = EventLog(store, past, in_flight, self.training)  # type: ignore[arg-type]
        self.metrics = (folder / metrics.FILE).open("wb")
        self.random = random.Random(0)
        self.rounds = self.num_events = self.num_groups = 0
        self.started = time.perf_counter()
        self.running: deque[tuple[TrajectoryId, str]] = deque()
        self.numbers: dict[str, int] = {}
        self.events: list[e.Event] = [
            e.LearnerReady(0, "0" * 16),
            *(
                e.InstanceJoined(f"rollout-{i}", 0, CAPACITY, 10**6, "0" * 16)
                for i in range(INSTANCES)
            ),
        ]

    def round(self) -> None:
        """What happened since the last tick, and what follows from it."""
        self.rounds += 1
        now = self.rounds * 0.1
        events = [*self.events, *self.finish()]
        self.events = []
        if self.training.batch is not None:
            events.append(self.publish(now))
        for command in self.log.act_on(events, now):
            self.events += self.answer(command)
        self.num_events += len(events) + 1
        self.log.end_round(now)
        if self.rounds % 10_000 == 0:
            took = time.perf_counter() - self.started
            print(f"{self.num_events:,} events in {took:.0f} s", file=sys.stderr, flush=True)

    def finish(self) -> Iterator[e.Event]:
        """Some responses are complete and rewarded; their instances say how they are."""
        touched = set()
        for _ in range(min(FINISHED, len(self.running))):
            self.running.rotate(-self.random.randrange(8))
            trajectory, name = self.running.popleft()
            touched.add(name)
            length = self.random.randint(2, 2 * TOKENS)
            self.store.put_segment(
                trajectory,
                start=0,
                version=0,
                instance=name,
                steps=length,
                drafted=0,
                tokens=range(length),
                logprobs=[-0.5] * length,
            )
            self.store.put_finished(trajectory, length=length, reason="stop")
            self.store.put_text(trajectory, "7" * length)
            reward = float(self.random.random() < 0.5)
            self.store.put_reward(trajectory, reward=reward, components={"correct": reward})
            yield e.TrajectoryFinished(trajectory, name, length, "stop")
            yield e.TrajectoryRewarded(trajectory, reward)
        for name in sorted(touched)[: INSTANCES // 4]:  # each says so about twice a second
            yield e.Snapshot(name, self.numbers[name], (), 3000, self.rounds / 10)

    def publish(self, now: float) -> e.Event:
        """The learner is done with its batch."""
        version = self.training.batch.version + 1
        self.training.batch = None
        numbers = ", ".join(f'"metric/number_{i}": {version / (i + 1)}' for i in range(METRICS))
        row = f'{{"step": {version}, "time": {now}, "reward": 0.5, "num_tokens": 1, {numbers}}}\n'
        self.metrics.write(row.encode())
        return e.VersionPublished(version, f"{version:016x}")

    def answer(self, command: c.Command) -> Iterator[e.Event]:  # noqa: C901 - a line a command
        """What is reported once it is carried out."""
        if isinstance(command, c.InstanceCommand):
            self.numbers[command.instance] = command.number
        match command:
            case c.RequestPrompts(count):
                for _ in range(count):
                    yield self.create(self.num_groups % ROWS)
            case c.Route(instance, _, trajectory):
                self.running.append((trajectory, instance))
            case c.Interrupt(instance, number, trajectories):
                for trajectory in trajectories:
                    self.running.remove((trajectory, instance))
                    yield e.TrajectoryInterrupted(trajectory, instance, number, 0)
            case c.Pull(instance, number, version):
                yield e.Pulled(instance, number, version, f"{version:016x}")
            case c.Train(version, groups, members):
                self.training.batch = command
                for group, chosen in zip(groups, members, strict=True):
                    self.store.put_consumed(group, version=version, members=chosen)
            case c.Drop() | c.Abort() | c.RetryPrompt() | c.Evaluate() | c.Finish():
                raise AssertionError(f"{command} is not to be had with this configuration")

    def create(self, row: int) -> e.Event:
        """The next prompt, as a new group."""
        group, epoch = self.num_groups, self.num_groups // ROWS
        self.num_groups += 1
        prompt = self.prompts[row]
        ids = Letters().encode(prompt)
        self.store.put_group(
            group,
            row=row,
            epoch=epoch,
            prompt=str(prompt.prompt),
            prompt_tokens=ids,
            columns=prompt.columns,
        )
        return e.GroupCreated(group, row, epoch, len(ids))
