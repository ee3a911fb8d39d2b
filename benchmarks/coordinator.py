"""How long the coordinator takes for one call of `handle`, with many instances.

All is answered at once; each round a few hundred trajectories finish at random, and a tick follows.
Each call is timed alone, by the processor's clock of its thread. After a publication every instance
pulls at the same moment: all that is in flight is interrupted and routed anew.
"""

from __future__ import annotations

import argparse
import gc
import random
import time
from collections.abc import Iterable
from typing import Any

from benchmarks import harness
from rhymeflow import build
from rhymeflow.config.load import read_config
from rhymeflow.core import commands as c
from rhymeflow.core import events as e
from rhymeflow.core.coordinator import Coordinator
from rhymeflow.core.types import TrajectoryId, Version

CAPACITY = 64
"""Trajectories an instance decodes at a time."""
NUM_GENERATIONS = 16
SCHEDULE, BOUND = "staleflow", 5
VERSIONS, FINISHED = 6, 256
"""Batches to train on; trajectories that finish in a round."""
RESPONSE_TOKENS, KV_TOKENS = 1000, 40_000
"""Of a response; in the cache of an instance, as its snapshots say."""


def add_arguments(parser: argparse.ArgumentParser) -> None:
    harness.add_number(parser, "--instances", 1024, "of rollout")


def run(args: argparse.Namespace) -> dict[str, Any]:
    """Drive the coordinator and report."""
    driver = Driver(args.instances)
    driver.run()
    rows = [row(name, times) for name, times in driver.times.items()]
    everything = [t for times in driver.times.values() for t in times]
    rows.append(row("all calls", everything))
    # Of the call that plans: among a million small ones its times do not show.
    planning = driver.times[e.Tick.__name__]
    p99 = harness.percentile(planning, 0.99) * 1e3
    targets = [
        harness.at_most("coordinator/Tick, p99 ms", p99, 10),
        harness.at_most("coordinator/Tick, greatest ms", max(planning) * 1e3, 100),
    ]
    notes = (
        f"{args.instances} instances, {args.instances * CAPACITY} trajectories in flight, schedule "
        f"{SCHEDULE}, {VERSIONS} versions, {FINISHED} trajectories finish between "
        f"two ticks. Processor time. Filling the instances at first ({driver.filling:.2f} s) is "
        f"not counted. Never fewer than {driver.least} in flight."
    )
    return harness.report("coordinator", rows, targets, args, notes=notes)


def row(name: str, times: list[float]) -> dict[str, Any]:
    return {
        "call": name,
        "calls": len(times),
        "median ms": harness.percentile(times, 0.5) * 1e3,
        "p99 ms": harness.percentile(times, 0.99) * 1e3,
        "greatest ms": max(times) * 1e3,
        "sum s": sum(times),
    }


class Driver:
    """Answers the coordinator's commands at once."""

    def __init__(self, instances: int) -> None:
        self.instances = instances
        self.capacity = instances * CAPACITY
        # Four batches run while a fifth's worth of entries may hold finished groups, so the fleet
        # stays full.
        groups_per_batch = self.capacity // NUM_GENERATIONS // (BOUND - 1)
        config = read_config(
            "demo",
            {
                "schedule.name": SCHEDULE,
                "schedule.max_staleness": str(BOUND),
                "schedule.cost_model": "qwen2.5-14b-h20",
                "schedule.max_inflight_batches": str(BOUND + 1),
                "rollout.num_generations": str(NUM_GENERATIONS),
                "learner.groups_per_batch": str(groups_per_batch),
                "learner.max_steps": str(VERSIONS + BOUND + 1),
                "data.eval_size": "0",
            },
        )
        self.coordinator = Coordinator(build.plan(config), build.schedule(config))
        self.times: dict[str, list[float]] = {}
        self.filling = 0.0
        self.random = random.Random(0)
        self.groups: list[int] = []
        """Groups that have begun, oldest first; one of the older ones finishes next."""
        self.least = self.capacity
        """Fewest trajectories in flight at one time."""
        self.where: dict[TrajectoryId, str] = {}
        self.numbers: dict[str, int] = {}
        self.group_id = 0
        self.seen: set[int] = set()
        self.training: Version | None = None
        self.trained = 0
        self.rounds = 0

    def run(self) -> None:
        """Fill the fleet, then go on until so many batches are trained on."""
        gc.collect()
        gc.disable()  # its pauses belong to whoever makes cycles; the coordinator makes none
        self.tell([e.LearnerReady(0)])
        self.tell(
            e.InstanceJoined(f"rollout-{i}", 0, CAPACITY, 10**7) for i in range(self.instances)
        )
        while len(self.where) < self.capacity:
            before = len(self.where), self.group_id
            self.tell([])
            assert (len(self.where), self.group_id) != before, "the instances cannot be filled"
        self.filling = sum(sum(times) for times in self.times.values())
        self.times = {}
        while self.trained < VERSIONS:
            self.round()
        gc.enable()

    def round(self) -> None:
        """Some trajectories finish; the batch that is trained on is done two rounds later."""
        self.rounds += 1
        events: list[e.Event] = []
        touched = set()
        for _ in range(FINISHED // NUM_GENERATIONS):
            index = self.random.randrange(len(self.groups) // 4)
            members = [TrajectoryId(self.groups[index], m) for m in range(NUM_GENERATIONS)]
            if any(trajectory not in self.where for trajectory in members):
                continue  # one of them waits to be routed
            self.groups.pop(index)
            for trajectory in members:
                name = self.where.pop(trajectory)
                touched.add(name)
                events.append(e.TrajectoryFinished(trajectory, name, RESPONSE_TOKENS, "stop"))
                events.append(e.TrajectoryRewarded(trajectory, self.random.random()))
        self.least = min(self.least, len(self.where))
        events += [
            e.Snapshot(n, self.numbers.get(n, 0), (), KV_TOKENS, 0.0) for n in sorted(touched)
        ]
        if self.training is not None and self.rounds % 2 == 0:
            events.append(e.VersionPublished(self.training + 1))
            self.trained += 1
            self.training = None
        self.tell(events)

    def tell(self, events: Iterable[e.Event]) -> None:
        """Report events and a tick; answer until there is nothing to answer."""
        while True:
            answers: list[e.Event] = []
            for event in [*events, e.Tick()]:
                started = time.thread_time()
                told = self.coordinator.handle(event)
                self.times.setdefault(type(event).__name__, []).append(time.thread_time() - started)
                for command in told:
                    answers += self.answer(command)
            if not answers and not self.coordinator.state.has_more:
                return
            events = answers

    def answer(self, command: c.Command) -> Iterable[e.Event]:  # noqa: C901 - a line a command
        """What a cluster reports that carries everything out at once."""
        if isinstance(command, c.InstanceCommand):
            self.numbers[command.instance] = command.number
        match command:
            case c.RequestPrompts(count):
                for _ in range(count):
                    yield e.GroupCreated(self.group_id, self.group_id, 0, 500)
                    self.group_id += 1
            case c.Route(instance, _, trajectory):
                self.where[trajectory] = instance
                if trajectory.group not in self.seen:
                    self.seen.add(trajectory.group)
                    self.groups.append(trajectory.group)
            case c.Interrupt(instance, number, trajectories):
                for trajectory in trajectories:
                    if self.where.pop(trajectory, None) is not None:
                        yield e.TrajectoryInterrupted(trajectory, instance, number, 400)
            case c.Pull(instance, number, version):
                yield e.Pulled(instance, number, version)
            case c.Abort(_, _, trajectories):
                for trajectory in trajectories:
                    self.where.pop(trajectory, None)
            case c.Train(version):
                self.training = version
