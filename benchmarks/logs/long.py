"""Logs of runs that never were, made by the coordinator, the controller's log and the store.

    build_log(folder, 10_000_000)

Instances, learner and rewards answer at once; what they say has the size of the demo's. Holds true:
the log, the store and `metrics.jsonl` are what a run would have written that was killed then.
"""

from __future__ import annotations

import random
import sys
import time
from collections import deque
from collections.abc import Iterator, Mapping
from contextlib import closing
from pathlib import Path
from types import SimpleNamespace
from typing import Any

from rhymeflow.config import Config
from rhymeflow.config.load import read_config
from rhymeflow.core import commands as c
from rhymeflow.core import events as e
from rhymeflow.data.prompts import Prompt
from rhymeflow.data.run_prompts import RunPrompts
from rhymeflow.data.stream import PromptStream
from rhymeflow.observe import metrics
from rhymeflow.runtime import event_log
from rhymeflow.runtime.event_log import EventLog
from rhymeflow.runtime.replay import beginning
from rhymeflow.runtime.retention import Retention
from rhymeflow.store.schema import EVENTS
from rhymeflow.store.writer import SqliteTrajectoryStore

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
    return RunPrompts(Questions(), stream, Letters(), [])  # type: ignore[arg-type]


def build_log(
    folder: Path,
    num_events: int,
    overrides: Mapping[str, str] | None = None,
    *,
    till_snapshot: bool = True,
) -> None:
    """Write a run of so many events, or a few more, and leave it as a kill does.

    `overrides`: of the demo's configuration. `till_snapshot`: go on until just before the next one
    is due, which is the most that a replay can have to do.
    """
    config = read_config(
        "demo",
        {
            "learner.max_steps": str(STEPS),
            "rollout.num_instances": str(INSTANCES),
            "schedule.max_staleness": "2",
            "schedule.max_inflight_batches": "4",
            "data.eval_size": "0",
            "drafting.window": "off",
            "run.output_dir": str(folder),
            **(overrides or {}),
        },
    )
    nearly = 0.99 * event_log.SNAPSHOT_EVENTS - 1000 if till_snapshot else 0
    with closing(SqliteTrajectoryStore(folder / EVENTS)) as store:
        store.begin_attempt(config.model_dump_json(), now=0.0, started="first")
        cluster = Cluster(config, store, folder)
        while cluster.num_events < num_events or cluster.log._num_events < nearly:
            cluster.round()
        store.commit()
        cluster.metrics.close()


class Cluster:
    """Instances, a learner and rewards that answer at once, and store what real ones would."""

    def __init__(self, config: Config, store: SqliteTrajectoryStore, folder: Path) -> None:
        self.store, self.prompts = store, Questions()
        past = beginning(config)
        checkpoints = SimpleNamespace(newest=None)
        self.training = SimpleNamespace(batch=None, checkpoints=checkpoints)
        in_flight: Any = SimpleNamespace(seal_all=lambda: None)
        retention = Retention(config, self.training, store)  # type: ignore[arg-type]
        self.log = EventLog(store, past, in_flight, self.training, retention)  # type: ignore[arg-type]
        self.metrics = (folder / metrics.FILE).open("wb")
        self.random = random.Random(0)
        self.rounds = self.num_events = self.num_groups = 0
        self.started = time.perf_counter()
        self.running: deque[c.Route] = deque()
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
            route = self.running.popleft()
            trajectory, name = route.trajectory, route.instance
            touched.add(name)
            length = self.random.randint(2, 2 * TOKENS)
            self.store.put_segment(
                trajectory,
                start=0,
                version=route.version,
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

    def answer(self, command: c.Command) -> Iterator[e.Event]:
        """What is reported once it is carried out."""
        if isinstance(command, c.InstanceCommand):
            self.numbers[command.instance] = command.number
        match command:
            case c.RequestPrompts(count):
                for _ in range(count):
                    yield self.create(self.num_groups % ROWS)
            case c.Route():
                self.running.append(command)
            case c.Interrupt(instance, number, trajectories):
                self.running = deque(r for r in self.running if r.trajectory not in trajectories)
                for trajectory in trajectories:
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
