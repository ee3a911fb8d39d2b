"""A `runtime.base.Runtime` without processes: workers take turns while the controller waits.

Faults of workers are injected here: each may die at any message that it sends, or stand still for a
while, which the controller takes for a hang if it is long. What carries their messages repeats some
and is late (`benchmarks/faults/messages.py`).
"""

from __future__ import annotations

import signal
from collections import deque
from collections.abc import Callable, Collection
from pathlib import Path
from typing import Any, NamedTuple

from benchmarks.faults.messages import Transport
from rhymeflow.config import Config
from rhymeflow.runtime.base import News, Received, Resources, Role, WorkerLost
from rhymeflow.utils.stopping import STOP_SIGNALS
from rhymeflow.workers.channel import Channel
from rhymeflow.workers.messages import Message, decode, encode
from tests.fake_run.agents import FakePrograms
from tests.fake_run.environments import FakeEnvironments
from tests.fake_run.models import Weights
from tests.fake_run.workers import FakeInstance, FakeLearner, FakeRewards
from tests.fake_run.world import World

MOST_TURNS_AT_ONCE = 10
TURNS_A_SECOND = 10
"""Of all workers together, at least."""
SIGNAL_SHARE = 0.05
"""How often the user stops the run, against how often a worker's turn meets a fault."""
CONTROLLER_STOP_SHARE, CONTROLLER_STOP_SECONDS = 0.1, 20.0
"""How often the controller stands still, against how often a worker's turn meets a fault, and how
long at most."""
STOP_SECONDS = 8.0
"""Longest time that a worker stands still; longer than the run's `worker_timeout`."""


class Rates(NamedTuple):
    """How often what is no death happens, as shares: of messages and of calls for a reward."""

    twice: float = 0.0
    late: float = 0.0
    failures: float = 0.0


class Death(BaseException):
    """A worker has died."""


class FakeProcesses:
    """The workers of one attempt. `killing` is called where the controller may die."""

    def __init__(
        self, world: World, rates: Rates, killing: Callable[[], None], config: Config, run_dir: Path
    ) -> None:
        self._world, self._rates, self._killing = world, rates, killing
        self._config, self._run_dir = config, run_dir
        self._workers: dict[str, FakeWorker] = {}
        self._shared: dict[str, Weights] = {}

    def __enter__(self) -> FakeProcesses:
        return self

    def __exit__(self, *_: object) -> None:
        for worker in self._workers.values():
            worker.die()

    def start(self, role: Role, name: str, resources: Resources) -> FakeWorker:
        assert name not in self._shared, f"{name} was used before"
        worker = FakeWorker(role, name, self._world, self._rates, self._killing, self._make)
        self._workers[name] = worker
        return worker

    def wait(self, timeout: float, *, for_any_of: Collection[str] | None = None) -> list[News]:
        self._killing()
        world, there = self._world, list(self._workers.values())
        if world.strikes(SIGNAL_SHARE):
            world.count("controller signalled")
            signal.raise_signal(world.rng.choice(STOP_SIGNALS))  # `train.interruptible` hears it
        if world.strikes(CONTROLLER_STOP_SHARE):
            world.count("controller stopped")
            timeout = world.rng.uniform(0.0, CONTROLLER_STOP_SECONDS)
        seconds = world.rng.uniform(0.0, timeout)
        num_turns = world.rng.randint(1, MOST_TURNS_AT_ONCE) + int(TURNS_A_SECOND * seconds)
        for _ in range(num_turns):
            world.rng.choice(there).turn()
            world.now += seconds / num_turns
            world.turn()
        world.rng.shuffle(there)
        return [item for worker in there for item in worker.news()]

    def stop(self, name: str, *, patience: float) -> None:
        self._workers.pop(name).die()

    def _make(self, role: Role, name: str, connection: Channel) -> Any:
        world, config = self._world, self._config
        match role:
            case "learner":
                return FakeLearner(connection, name, config, self._run_dir, self._shared, world)
            case "rollout":
                return FakeInstance(connection, name, config, self._shared, world)
            case "reward":
                return FakeRewards(connection, config, world, self._rates.failures)
            case "environment":
                fake = FakePrograms if config.environment.agent else FakeEnvironments
                return fake(connection, config, world, self._rates.failures)
        raise AssertionError(role)


class FakeWorker:
    """A worker, its channel, and the controller's handle of it."""

    def __init__(
        self,
        role: Role,
        name: str,
        world: World,
        rates: Rates,
        killing: Callable[[], None],
        make: Callable[[Role, str, Channel], Any],
    ) -> None:
        self.role, self.name, self.log = role, name, f"{name}.log"
        self._world, self._killing, self._make = world, killing, make
        to_it, self._from_it = (Wire(world, rates.twice, rates.late) for _ in range(2))
        self._its_end = End(to_it, self._from_it, self._sends)
        self._theirs = Channel(self._its_end)
        self._ours = Channel(End(self._from_it, to_it, killing))
        self._worker: Any = None
        self._is_alive, self._is_reported = True, False
        self._stopped_until = 0.0
        self._sends_left: int | None = None
        """Messages until it dies; `None`: it is to live."""

    @property
    def node(self) -> str:
        return "here"

    def send(self, message: Message) -> None:
        self._ours.send_bytes(encode(message))

    def news(self) -> list[News]:
        """What the controller hears: at times not yet all that has arrived."""
        news: list[News] = []
        while self._from_it.is_ready and not self._world.chance(0.05):
            message = self._ours.read()
            if message is not None:
                news.append(Received(self.name, decode(message)))
        if not self._is_alive and self._from_it.is_empty and not self._is_reported:
            self._is_reported = True
            news.append(WorkerLost(self.name, f"{self.name} died"))
        return news

    def turn(self) -> None:
        """Go on a little, if it can, or meet a fault."""
        world = self._world
        if not self._is_alive or world.now < self._stopped_until:
            return
        if world.strikes():
            if world.chance(0.25):
                world.count(f"{self.role} stopped")
                self._stopped_until = world.now + world.rng.uniform(0.0, STOP_SECONDS)
                return
            self._sends_left = world.rng.choice([0, 0, 1, 2])
        try:
            self._go_on()
        except Death:
            self.die()
        if self._sends_left is not None and self._is_alive:  # it had no more to send
            self.die()

    def die(self) -> None:
        if self._is_alive and self._sends_left is not None:
            self._world.count(f"{self.role} killed")
        self._is_alive = False
        if isinstance(self._worker, FakeLearner):
            self._worker.close()

    def _go_on(self) -> None:
        if self._worker is not None:
            is_idle = not self._its_end.inbound.is_ready
            if self.role == "learner" and is_idle and self._world.chance(0.7):
                return  # else it would do little but say that it is alive
            self._worker.turn()
        elif self.role != "rollout" or self._theirs.poll():  # one waits for its first message
            self._worker = self._make(self.role, self.name, self._theirs)

    def _sends(self) -> None:
        if self._sends_left is not None:
            if self._sends_left == 0:
                raise Death
            self._sends_left -= 1


DELAY_SECONDS = (0.1, 1.0)
"""Mean and most; long against a turn, short against what counts as a hang."""


class Wire:
    """One direction; `twice` and `late` as of `Transport`."""

    def __init__(self, world: World, twice: float, late: float) -> None:
        self._world = world
        self._transport = Transport(world.rng, twice=twice, late=late, seconds=DELAY_SECONDS)
        self._frames: deque[bytes] = deque()
        self._opens_at = 0.0

    def put(self, frame: bytes) -> None:
        transport, before = self._transport, self._transport.num_twice
        if delay := transport.delay():
            self._opens_at = max(self._opens_at, self._world.now) + delay
            self._world.counts["messages late"] += 1
        self._frames += transport.deliver(frame)
        self._world.counts["messages twice"] += transport.num_twice - before

    @property
    def is_empty(self) -> bool:
        return not self._frames

    @property
    def is_ready(self) -> bool:
        return bool(self._frames) and self._world.now >= self._opens_at

    def take(self) -> bytes:
        assert self.is_ready, "nothing is there"
        return self._frames.popleft()


class End:
    """One end of a pipe: what `workers.channel.Connection` asks for. It never waits."""

    def __init__(self, inbound: Wire, outbound: Wire, sending: Callable[[], None]) -> None:
        """`sending` is called before each message that is sent."""
        self.inbound, self._outbound, self._sending = inbound, outbound, sending

    def send_bytes(self, frame: bytes) -> None:
        self._sending()
        self._outbound.put(frame)

    def recv_bytes(self) -> bytes:
        return self.inbound.take()

    def poll(self, timeout: float) -> bool:
        return self.inbound.is_ready

    def fileno(self) -> int:
        raise AssertionError("a fake pipe has no descriptor")

    def close(self) -> None:
        pass
