"""Run directories of any size, of runs that never were: what the dashboard is measured on.

    build(folder, Size(trajectories=1_000_000))

The store is written by its own writer, a step at a time, so every table, mark and note of a change
is as a run leaves it, and an audit finds nothing (`examples/audit_run.py`). What the coordinator
would have decided is not asked (`logs/long.py` does), so a replay would give other commands.
Lengths are log-normal with a long tail; one response in ten goes on under a later version; drafts
get better from epoch to epoch.
"""

from __future__ import annotations

import math
import random
import sys
from collections.abc import Sequence
from contextlib import closing
from pathlib import Path
from typing import Any, NamedTuple

from rhymeflow.config.load import dump_config, read_config
from rhymeflow.core import commands as c
from rhymeflow.core import events as e
from rhymeflow.core.types import HELD_OUT, TrajectoryId
from rhymeflow.observe.metrics import MetricsWriter
from rhymeflow.store.schema import EVENTS
from rhymeflow.store.writer import SqliteTrajectoryStore

STEP_SECONDS = 4.0
SPREAD, LIMIT = 1.2, 2048
"""Of lengths: standard deviation of their logarithm, and the longest there are."""
LAG = 3
"""Versions that an instance may be behind: the bound of staleness."""
VOCABULARY = 58
"""Tokens of the demo."""
METRICS = (
    *("reward", "reward_std", "entropy", "grad_norm", "clip_ratio", "step_time", "loss", "kl"),
    *("completions/mean_length", "completions/max_length", "completions/clipped_ratio"),
    *("staleness/mean", "staleness/max", "idle/rollout", "idle/learner", "num_tokens"),
    *("draft/mean_acceptance_length", "draft/acceptance_rate", "draft/time_saved"),
    *("lengths/rank_correlation", "lengths/coverage", "lengths/explained_variance"),
    *("lengths/seen_prompt_share", "off_policy/mismatch_kl", "rewards/correct/mean"),
    *(f"other/number_{i}" for i in range(30)),
)


class Size(NamedTuple):
    """How much there is."""

    trajectories: int = 1_000_000
    tokens: int = 100
    """Of a response, on average."""
    members: int = 8
    groups_per_step: int = 16
    epochs: int = 8
    instances: int = 16


def build(folder: Path, size: Size) -> None:
    """Write such a run into `folder`, which is there."""
    overrides = {
        "learner.max_steps": str(-(-size.trajectories // (size.members * size.groups_per_step))),
        "learner.groups_per_batch": str(size.groups_per_step),
        "schedule.max_staleness": str(LAG),
        "schedule.max_inflight_batches": "4",
        "rollout.num_instances": str(size.instances),
        "rollout.num_generations": str(size.members),
        "rollout.max_completion_length": str(LIMIT),
        "run.output_dir": str(folder),
    }
    config = read_config("demo", overrides)
    (folder / "config.yaml").write_text(dump_config(config), encoding="utf-8")
    writer = MetricsWriter(folder, report_to=(), name=folder.name, config={})
    with closing(SqliteTrajectoryStore(folder / EVENTS)) as store, closing(writer):
        Run(store, writer, size).write(config.model_dump_json())


class Run:
    """What happens, step by step."""

    def __init__(self, store: SqliteTrajectoryStore, metrics: MetricsWriter, size: Size) -> None:
        self.store, self.metrics, self.size = store, metrics, size
        self.random = random.Random(0)
        self.groups = size.trajectories // size.members
        self.rows = -(-self.groups // size.epochs)
        self.steps = -(-self.groups // size.groups_per_step)
        self.instances = [f"rollout-{i}" for i in range(size.instances)]
        self.numbers = dict.fromkeys(self.instances, 0)
        self.held = dict.fromkeys(self.instances, 0)
        """By instance, its last command's number and the version that it holds."""
        self.words = [_word(self.random) for _ in range(2_000)]
        self.letters = "".join(self.random.choices("0123456789abcdef =+", k=1 << 16))
        self.tokens = self.random.choices(range(VOCABULARY), k=1 << 16)
        self.logprobs = [-self.random.expovariate(3.0) for _ in range(1 << 16)]
        self.mean = math.log(size.tokens) - SPREAD**2 / 2
        self.now = 0.0

    def write(self, config: str) -> None:
        """All of it: two attempts, and at its end some groups that have not ended."""
        self.store.begin_attempt(config, now=0.0, started="2026-01-01T00:00:00+00:00")
        first: list[e.Event] = [e.LearnerReady(0, _checksum(0))]
        first += [e.InstanceJoined(name, 0, 64, 10**6, _checksum(0)) for name in self.instances]
        self.report(first)
        for step in range(self.steps):
            if step == self.steps // 2:
                started = "2026-01-02T00:00:00+00:00"
                self.store.begin_attempt(config, now=self.now, started=started)
            self.step(step)
            if step % 32 == 31:
                self.store.commit()
            if step % 1000 == 999:
                print(f"{step + 1:,} of {self.steps:,} steps", file=sys.stderr, flush=True)
        self.store.commit()

    def step(self, version: int) -> None:
        """Groups of one batch, from their prompts to the training on them."""
        first = version * self.size.groups_per_step
        groups = range(self.groups)[first : first + self.size.groups_per_step]
        begin = version * STEP_SECONDS
        self.pull(version, begin)
        started = []
        for place, group in enumerate(groups):
            self.now = begin + STEP_SECONDS * (0.05 + 0.2 * place / len(groups))
            started.append(self.begin_group(group, version))
        consumed, members = [], []
        for place, (group, responses) in enumerate(zip(groups, started, strict=True)):
            self.now = begin + STEP_SECONDS * (0.3 + 0.6 * place / len(groups))
            chosen = self.end_group(group, responses, version)
            if chosen:
                consumed.append(group)
                members.append(chosen)
        self.now = begin + STEP_SECONDS * 0.99
        train = c.Train(version, tuple(consumed), tuple(members))
        self.report([e.Tick()], [train])
        numbers = {name: self.random.random() for name in METRICS}
        self.metrics.write(version + 1, self.now, numbers)
        self.change_instances(version)

    def pull(self, version: int, begin: float) -> None:
        """What the step before was trained for is published, and instances get it."""
        if not version:
            return
        self.now = begin + 0.05
        checksum = _checksum(version)
        late = [n for n in self.instances if self.held[n] <= version - LAG]
        late += [n for n in self.instances if n not in late and self.random.random() < 0.7]
        pulls = [c.Pull(name, self.number(name), version) for name in late]
        evaluates = version % 50 == 0
        name = self.instances[0]
        evaluate = [c.Evaluate(name, self.number(name), version)] if evaluates else []
        self.report([e.VersionPublished(version, checksum), e.Tick()], [*pulls, *evaluate])
        for pull in pulls:
            self.now += 0.002
            self.held[pull.instance] = version
            self.report([e.Pulled(pull.instance, pull.number, version, checksum)])
        if evaluates:
            reward = self.random.random()
            self.report([e.Evaluated(name, version, reward, held=version)])
            self.metrics.write(version, self.now, {"eval/reward": reward})
            for row in range(16):
                self.answer(version, row, reward)

    def answer(self, version: int, row: int, reward: float) -> None:
        """A held-out prompt, and its answer."""
        store, group = self.store, -1 - row - 16 * version
        prompt, about = self.prompt(self.rows + row), {"suite": HELD_OUT, "version": version}
        store.put_group(
            group, row=row, epoch=0, prompt=prompt, prompt_tokens=[1] * 20, columns={}, **about
        )
        one = TrajectoryId(group, 0)
        store.put_segment(
            one, start=0, version=version, instance=self.instances[0], steps=8, drafted=0,
            tokens=[1] * 8, logprobs=[-1.0] * 8,
        )  # fmt: skip
        store.put_finished(one, length=8, reason="stop")
        store.put_text(one, "7 = 7")
        store.put_reward(one, reward=reward, components={"correct": reward})
        store.put_evaluated(group, version)

    def begin_group(self, group: int, version: int) -> list[c.Route]:
        """A prompt, and its responses begin; some under the version before, or an earlier one."""
        draw, row, epoch = self.random, group % self.rows, group // self.rows
        self.store.put_group(
            group, row=row, epoch=epoch, prompt=self.prompt(row), prompt_tokens=[1] * 20,
            columns={"answer": str(row)},
        )  # fmt: skip
        self.report([e.Tick()], [c.RequestPrompts(1)])
        self.report([e.GroupCreated(group, row, epoch, 20)])
        routes = []
        for member in range(self.size.members):
            name = draw.choice(self.instances)
            held = self.held[name]
            routes.append(c.Route(name, self.number(name), TrajectoryId(group, member), held))
        self.report([e.Tick()], routes)
        return routes

    def end_group(self, group: int, routes: list[c.Route], version: int) -> tuple[int, ...]:
        """Its responses end; return the members to be trained on, () if it ends otherwise."""
        row, epoch = group % self.rows, group // self.rows
        is_open = version == self.steps - 1 and group % 2 == 0
        chance = 1.0 if row % 40 == 1 else (row * 7919 % 1000) / 1000 + 0.05 * epoch
        rewards = [
            self.response(route, version, chance, is_open and not route.trajectory.member % 2)
            for route in routes
        ]
        name = self.random.choice(self.instances)
        self.report([e.Snapshot(name, self.numbers[name], (), 3000, self.now)])
        if is_open:
            return ()
        if group % 33 == 5:
            return self.drop(group, version, "aborted", "reward failed: no number in the answer")
        if len(set(rewards)) == 1:
            return self.drop(group, version, "filtered", "all rewards are equal")
        members = tuple(range(self.size.members))
        self.store.put_consumed(group, version=version, members=members)
        return members

    def drop(self, group: int, version: int, ending: Any, reason: str) -> tuple[int, ...]:
        """It ends without being trained on."""
        self.store.put_ending(group, ending, version=version, reason=reason)
        self.report([e.Tick()], [c.Drop(group, ending, reason)])
        return ()

    def response(self, route: c.Route, version: int, chance: float, is_open: bool) -> float | None:
        """One response; return its reward."""
        draw, trajectory = self.random, route.trajectory
        name, first = route.instance, route.version
        length = min(int(draw.lognormvariate(self.mean, SPREAD)) + 1, LIMIT)
        begin = 0
        if length > 4 and draw.random() < 0.1:
            begin = length // 2
            self.segment(trajectory, 0, begin, first, name)
            stop = c.Interrupt(name, self.number(name), (trajectory,))
            self.report([e.Tick()], [stop])
            self.report([e.TrajectoryInterrupted(trajectory, name, stop.number, begin)])
            name = draw.choice([each for each in self.instances if self.held[each] >= first])
            first = self.held[name]
            self.report([e.Tick()], [c.Route(name, self.number(name), trajectory, first)])
        self.segment(trajectory, begin, length, first, name)
        if is_open:
            return None
        reason: Any = "length" if length == LIMIT else "stop"
        reward = float(draw.random() < chance)
        place = draw.randrange(1 << 15)
        self.store.put_finished(trajectory, length=length, reason=reason)
        self.store.put_text(trajectory, self.letters[place : place + 3 * length])
        self.store.put_reward(trajectory, reward=reward, components={"correct": reward})
        self.report(
            [
                e.TrajectoryFinished(trajectory, name, length, reason),
                e.TrajectoryRewarded(trajectory, reward),
            ]
        )
        return reward

    def segment(
        self, trajectory: TrajectoryId, start: int, end: int, version: int, name: str
    ) -> None:
        """Tokens of it; from the second epoch on some were drafted."""
        length, group = end - start, trajectory.group
        epoch = group // self.rows
        rate = 1.0 if not epoch else 1.2 + 0.3 * epoch + (group % self.rows * 31 % 100) / 50
        steps = max(int(length / rate), 1)
        place = self.random.randrange(1 << 15)
        self.store.put_segment(
            trajectory, start=start, version=version, instance=name, steps=steps,
            drafted=2 * (length - steps), tokens=self.tokens[place : place + length],
            logprobs=self.logprobs[place : place + length],
        )  # fmt: skip

    def change_instances(self, version: int) -> None:
        """Now and then one dies, and another takes its place."""
        if version % 500 != 499:
            return
        place = version // 500 % len(self.instances)
        name = self.instances[place]
        base, _, lives = name.partition(".")
        new = f"{base}.{int(lives or 0) + 1}"
        self.instances[place] = new
        self.numbers[new], self.held[new] = 0, version
        joined = e.InstanceJoined(new, version, 64, 10**6, _checksum(version))
        self.report([e.InstanceLeft(name, "its process died"), joined])

    def number(self, name: str) -> int:
        """Of the next command to this instance."""
        self.numbers[name] += 1
        return self.numbers[name]

    def prompt(self, row: int) -> str:
        """Some forty words; the last one is in this prompt alone."""
        draw = random.Random(row)
        chosen = draw.choices(self.words, k=draw.randrange(20, 60))
        return f"Question: {' '.join(chosen)}, and number{row:07}x?"

    def report(self, events: list[Any], commands: Sequence[c.Command] = ()) -> None:
        """Events, and the commands upon the last one."""
        first = self.store.record(self.now, events)
        for command in commands:
            self.store.record_command(first + len(events) - 1, command)


def _word(draw: random.Random) -> str:
    return "".join(draw.choices("etaoinshrdlcumwfgypbvk", k=draw.randrange(2, 9)))


def _checksum(version: int) -> str:
    return f"{version:016x}"


__all__ = ["LIMIT", "METRICS", "STEP_SECONDS", "Run", "Size", "build"]
