"""Logs of runs that never were, made by the coordinator, the controller's log and the store.

Instances, learner and rewards answer at once. Lengths have a long tail, prompts have words, drafts
get better, some responses see a pull, some rewards fail, instances die. What is written is what a
run of two attempts has written that was killed in the second.
"""

from __future__ import annotations

import argparse
import math
import random
import sys
import tempfile
import time
from collections import deque
from collections.abc import Iterator, Mapping
from contextlib import closing, contextmanager
from pathlib import Path
from types import SimpleNamespace
from typing import Any, NamedTuple

from rhymeflow.config import Config
from rhymeflow.config.load import dump_config, read_config
from rhymeflow.core import commands as c
from rhymeflow.core import events as e
from rhymeflow.data.load import RunPrompts
from rhymeflow.data.prompts import Prompt
from rhymeflow.data.stream import PromptStream
from rhymeflow.observe import metrics
from rhymeflow.runtime import event_log
from rhymeflow.runtime.event_log import EventLog
from rhymeflow.runtime.replay import beginning
from rhymeflow.store.schema import EVENTS
from rhymeflow.store.writer import SqliteTrajectoryStore
from tests.store import stores

CAPACITY = 64
"""Responses that an instance decodes at a time."""
STEPS = 10_000_000
"""More than there will be."""
ROUND_SECONDS, SAVE_STEPS = 0.1, 3
SPREAD, LONGEST = 1.2, 2048
"""Of lengths: standard deviation of their logarithm, and the longest there are."""
VOCABULARY, NUM_METRICS = 58, 60
"""Tokens of the demo, and the numbers in a row of its metrics.jsonl."""
LETTERS, NUM_WORDS = "etaoinshrdlcumwfgypbvk", 2_000
METRICS = (
    *("reward", "reward_std", "entropy", "grad_norm", "clip_ratio", "step_time", "loss", "kl"),
    *("completions/mean_length", "completions/max_length", "completions/clipped_ratio"),
    *("staleness/mean", "staleness/max", "idle/rollout", "idle/learner", "num_tokens"),
    *("draft/mean_acceptance_length", "draft/acceptance_rate", "draft/time_saved"),
    *("lengths/rank_correlation", "lengths/explained_variance"),
    *("off_policy/mismatch_kl", "rewards/correct/mean"),
)
"""Some that the dashboard knows; the others have numbers."""


class Size(NamedTuple):
    """How much there is. A run ends once it has so many events and responses."""

    num_events: int = 0
    num_responses: int = 0
    tokens: int = 50
    """Of a response, on average: the demo's."""
    instances: int = 16
    rows: int = 1_000_000
    """Prompts: more than the length predictor remembers."""


class Questions:
    """Prompts by row: some words, the last of which no other prompt has."""

    writes_date = False

    def __init__(self, rows: int) -> None:
        self._rows, draw = rows, random.Random(0)
        self._words = [
            "".join(draw.choices(LETTERS, k=draw.randrange(2, 9))) for _ in range(NUM_WORDS)
        ]

    def __len__(self) -> int:
        return self._rows

    def __getitem__(self, row: int) -> Prompt:
        draw = random.Random(row)
        chosen = " ".join(draw.choices(self._words, k=draw.randrange(20, 60)))
        text = f"Question: {chosen}, and number{row:07}x?"
        return Prompt(row, text, {"answer": str(row + row % 97)})

    def encode(self, prompt: Prompt) -> list[int]:
        """Tokens of any prompt."""
        return [1] * 20


def prompts(config: Config) -> RunPrompts:
    """A source that costs nothing."""
    source: Any = Questions(Size().rows)
    return RunPrompts(source, PromptStream(source, config.run.seed, shuffle=False), source, [])


def build_log(
    folder: Path,
    size: Size,
    overrides: Mapping[str, str] | None = None,
    *,
    till_snapshot: bool = False,
) -> None:
    """Write a run, or a little more than was asked for, and leave it as a kill does.

    `overrides`: of the demo's configuration. `till_snapshot`: go on until just before the next one
    is due, which is the most that a replay can have to do.
    """
    config = read_config(
        "demo",
        {
            "learner.max_steps": str(STEPS),
            "rollout.num_instances": str(size.instances),
            "schedule.max_staleness": "2",
            "schedule.max_inflight_batches": "4",
            "data.eval_size": "16",
            "run.eval_steps": "50",
            "schedule.filter_zero_variance": "true",
            "reward.on_failure": "drop",
            "drafting.window": "off",
            "run.output_dir": str(folder),
            **(overrides or {}),
        },
    )
    (folder / "config.yaml").write_text(dump_config(config), encoding="utf-8")
    for number in range(size.instances):
        printed = folder / f"logs/attempt-1/rollout-{number}.log"
        printed.parent.mkdir(parents=True, exist_ok=True)
        printed.write_text("a line that a worker printed\n" * 10_000, encoding="utf-8")
    nearly = 0.99 * event_log.SNAPSHOT_EVENTS - 1000 if till_snapshot else 0
    with closing(SqliteTrajectoryStore(folder / EVENTS)) as store:
        cluster = Cluster(config, store, folder, size)
        for attempt, share in ((1, 0.5), (2, 1.0)):
            now, started = cluster.rounds * ROUND_SECONDS, f"2026-01-0{attempt}T00:00:00+00:00"
            store.begin_attempt(config.model_dump_json(), now=now, started=started)
            while not cluster.is_enough(share):
                cluster.round()
        while cluster.log._num_events < nearly:
            cluster.round()
        store.commit()
        cluster.metrics.close()


def add_run_argument(parser: argparse.ArgumentParser) -> None:
    """Add `--run`, for `kept`."""
    what = "where the run is kept, or is to be had"
    parser.add_argument("--run", metavar="DIR", type=Path, help=what)


@contextmanager
def kept(folder: Path | None, size: Size, **how: Any) -> Iterator[Path]:
    """A run of this size in `folder`, or one that is deleted; built if it is not there."""
    with tempfile.TemporaryDirectory(prefix="rhymeflow-made-up-") as temporary:
        folder = folder or Path(temporary) / "run"
        if not (folder / EVENTS).exists():
            folder.mkdir(parents=True, exist_ok=True)
            build_log(folder, size, **how)
        yield folder


class Cluster:
    """Instances, a learner and rewards that answer at once, and store what real ones would."""

    def __init__(
        self, config: Config, store: SqliteTrajectoryStore, folder: Path, size: Size
    ) -> None:
        self.size, self.store, self.prompts = size, store, Questions(size.rows)
        training: Any = SimpleNamespace(
            batch=None, published=0, checkpoints=SimpleNamespace(newest=None)
        )
        in_flight: Any = SimpleNamespace(seal_all=lambda: None)
        self.log = EventLog(config, store, beginning(config), in_flight, training)
        self.training = training
        self.metrics = (folder / metrics.FILE).open("wb")
        self.random = random.Random(0)
        self.rounds = self.num_events = self.num_groups = self.num_responses = 0
        self.started = time.perf_counter()
        self.running: deque[c.Route] = deque()
        self.lengths: dict[Any, int] = {}
        """Tokens that are stored of responses that were interrupted."""
        self.numbers: dict[str, int] = {}
        self.mean = math.log(size.tokens) - SPREAD**2 / 2
        self.names = [f"rollout-{i}" for i in range(size.instances)]
        self.events = [e.LearnerReady(0, _checksum(0)), *map(self.joined, self.names)]

    def is_enough(self, share: float) -> bool:
        events, responses = share * self.size.num_events, share * self.size.num_responses
        return self.num_events >= events and self.num_responses >= responses

    def joined(self, name: str) -> e.Event:
        version = self.training.published
        return e.InstanceJoined(name, version, CAPACITY, 10**6, _checksum(version))

    def round(self) -> None:
        self.rounds += 1
        now = self.rounds * ROUND_SECONDS
        events = [*self.events, *self.finish()]
        self.events = []
        if self.training.batch is not None:
            events += self.publish(now)
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
        for _ in range(min(CAPACITY, len(self.running))):
            self.running.rotate(-self.random.randrange(8))
            route = self.running.popleft()
            touched.add(route.instance)
            yield from self.end(route)
        for name in sorted(touched)[: self.size.instances // 4]:  # each about twice a second
            yield e.Snapshot(name, self.numbers[name], (), 3000, self.rounds * ROUND_SECONDS)

    def end(self, route: c.Route) -> Iterator[e.Event]:
        trajectory, draw = route.trajectory, self.random
        start = self.lengths.pop(trajectory, 0)
        length = start + self.length()
        self.segment(route, start, length)
        reason: Any = "length" if length >= LONGEST else "stop"
        self.store.put_finished(trajectory, length=length, reason=reason)
        self.store.put_text(trajectory, "7 = " * length)
        self.num_responses += 1
        yield e.TrajectoryFinished(trajectory, route.instance, length, reason)
        if trajectory.group % 33 == 5:
            yield e.RewardFailed(trajectory, "reward failed: no number in the answer")
            return
        epoch, row = divmod(trajectory.group, self.size.rows)
        reward = float(draw.random() < (row * 7919 % 1000) / 1000 + 0.05 * epoch)
        self.store.put_reward(trajectory, reward=reward, components={"correct": reward})
        yield e.TrajectoryRewarded(trajectory, reward)

    def length(self) -> int:
        return min(int(self.random.lognormvariate(self.mean, SPREAD)) + 1, LONGEST)

    def segment(self, route: c.Route, start: int, end: int) -> None:
        """Tokens of a response; some were drafted from the second epoch on."""
        length, group = end - start, route.trajectory.group
        epoch, steps = group // self.size.rows, length
        if epoch:
            steps = max(int(length / (1.2 + 0.3 * epoch + group * 31 % 100 / 50)), 1)
        self.store.put_segment(
            route.trajectory, start=start, version=route.version, instance=route.instance,
            steps=steps, drafted=2 * (length - steps),
            tokens=[i % VOCABULARY for i in range(length)], logprobs=[-0.5] * length,
        )  # fmt: skip

    def publish(self, now: float) -> Iterator[e.Event]:
        """The learner is done with its batch; now and then an instance dies."""
        version = self.training.published = self.training.batch.version + 1
        self.training.batch = None
        if version % SAVE_STEPS == 0:
            self.training.checkpoints.newest = version
        names = [*METRICS, *(f"other/number_{i}" for i in range(NUM_METRICS - len(METRICS)))]
        numbers = ", ".join(f'"{name}": {version / (i + 1)}' for i, name in enumerate(names))
        self.metrics.write(f'{{"step": {version}, "time": {now}, {numbers}}}\n'.encode())
        yield e.VersionPublished(version, _checksum(version))
        if version % 500 == 499:
            name = self.names.pop(0)
            base, _, lives = name.partition(".")
            self.names.append(f"{base}.{int(lives or 0) + 1}")
            self.running = deque(r for r in self.running if r.instance != name)
            yield e.InstanceLeft(name, "its process died")
            yield self.joined(self.names[-1])

    def answer(self, command: c.Command) -> Iterator[e.Event]:  # noqa: C901 - a line a command
        if isinstance(command, c.InstanceCommand):
            self.numbers[command.instance] = command.number
        match command:
            case c.RequestPrompts(count):
                for _ in range(count):
                    yield self.create()
            case c.Route():
                self.running.append(command)
            case c.Interrupt(instance, number, trajectories):
                yield from self.interrupt(instance, number, set(trajectories))
            case c.Abort(trajectories=trajectories):
                self.running = deque(r for r in self.running if r.trajectory not in trajectories)
            case c.Pull(instance, number, version):
                yield e.Pulled(instance, number, version, _checksum(version))
            case c.Train(version, groups, members):
                self.training.batch = command
                for group, chosen in zip(groups, members, strict=True):
                    self.store.put_consumed(group, version=version, members=chosen)
            case c.Drop(group, ending, reason):
                version = self.training.published
                self.store.put_ending(group, ending, version=version, reason=reason)
            case c.Evaluate(instance, _, version, suite):
                for row in range(16):
                    self.evaluate(version, suite, row)
                yield e.Evaluated(instance, version, 0.5, suite, version)
            case c.Accumulate():
                pass
            case _:
                raise AssertionError(f"{command} is not to be had with this configuration")

    def evaluate(self, version: int, suite: str, row: int) -> None:
        stores.answered(
            self.store, -1 - row - 16 * version, [0.5], suite=suite, version=version,
            tokens=[1] * 8, row=row, prompt=str(self.prompts[row].prompt), prompt_tokens=[1] * 20,
        )  # fmt: skip

    def interrupt(self, instance: str, number: int, stopped: set[Any]) -> Iterator[e.Event]:
        """A part of each is stored; it goes on later, or elsewhere."""
        for route in [route for route in self.running if route.trajectory in stopped]:
            start = self.lengths.get(route.trajectory, 0)
            end = self.lengths[route.trajectory] = start + max(self.length() // 2, 1)
            self.segment(route, start, end)
            yield e.TrajectoryInterrupted(route.trajectory, instance, number, end)
        self.running = deque(r for r in self.running if r.trajectory not in stopped)

    def create(self) -> e.Event:
        group, self.num_groups = self.num_groups, self.num_groups + 1
        epoch, row = divmod(group, self.size.rows)
        prompt = self.prompts[row]
        ids = self.prompts.encode(prompt)
        self.store.put_group(
            group, row=row, epoch=epoch, prompt=str(prompt.prompt), prompt_tokens=ids,
            columns=prompt.columns,
        )  # fmt: skip
        return e.GroupCreated(group, row, epoch, len(ids))


def _checksum(version: int) -> str:
    return f"{version:016x}"
