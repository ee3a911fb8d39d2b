"""One fake run from its first prompt to its last version, through all that a seed draws.

Whatever ends an attempt, the next one begins with what is on the disk, by the product's own way of
resuming. The same seed gives the same run and the same faults.
"""

from __future__ import annotations

import io
import random
import shutil
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import closing, contextmanager
from pathlib import Path
from typing import Any

from rich.console import Console

from rhymeflow.config import Config
from rhymeflow.core.commands import Command
from rhymeflow.core.coordinator import Coordinator
from rhymeflow.core.events import Event
from rhymeflow.core.strategies.schedules import SCHEDULES
from rhymeflow.errors import StorageError, UserError
from rhymeflow.runtime import event_log, start
from rhymeflow.runtime.replay import beginning, recall
from rhymeflow.runtime.train import attempt, in_force
from rhymeflow.store.checkpoint_dirs import CHECKPOINTS
from rhymeflow.store.damage import check_log
from tests.fake_run import check
from tests.fake_run.disk import MortalStore, damaged
from tests.fake_run.models import HELD_OUT, load
from tests.fake_run.runtime import FakeProcesses, Rates
from tests.fake_run.world import Killed, World

WORKER_TIMEOUT = 5.0
"""Virtual seconds."""
NUM_FAULTS = (4, 40)
"""Of a run, at most so many."""
OFTEN = (0.005, 0.06)
"""Probability of a fault at a step."""
DAMAGE_SHARE = 0.1
"""Of the deaths of a controller, those after which a damaged copy of the log has to be refused."""
SNAPSHOT_EVENTS = (20, 300)
SAVE_STEPS = (0, 1, 2)
KEEP_TOKENS = (None, 0, 0, 1)
"""Of versions that have tokens in the log; mostly as few as may be."""
LONGER_SHARE = 0.2
"""Of the runs, those that are resumed after their end, and made a step longer."""
CHANGE_SHARE = 0.3
"""Of resumed attempts, those with other options."""

AGENT_SHARE = 0.25
"""Of runs, those of an agent."""
IN_AGENTS = "all, in runs of an agent"
NOT_COUNTED = ("messages twice", "messages late", "call dropped", IN_AGENTS)
"""What is no fault, or is many and small, or is counted already."""

NO_FAULTS = Rates()
Look = Callable[[Coordinator], None]
"""Looks at the coordinator; raises `AssertionError`."""


def run_with_faults(
    seed: int, directory: Path, schedule: str, counts: Counter[str], look: Look | None = None
) -> None:
    """Carry a run through its faults, and check it; add the faults to `counts`, by kind.

    `look` is called with the coordinator after each event.

    Raises:
        AssertionError, or whatever else ends a run: something is violated.
    """
    draw = random.Random(f"{seed} {schedule}")
    world = World(draw.getrandbits(64), draw.randint(*NUM_FAULTS), draw.uniform(*OFTEN))
    config, drawn = configuration(draw, schedule), rates(draw)
    if random.Random(f"agent {seed} {schedule}").random() < AGENT_SHARE:
        config = with_agent(config)
    fake = FakeRun(world, directory, config, drawn, look)
    try:
        with adapted(draw.randint(*SNAPSHOT_EVENTS)):
            fake.carry_through()
        check.ended(fake.path, fake.config, fake.seen)
    finally:
        counts.update(world.counts)
        if config.environment.agent:
            kinds = world.counts.keys() - {*NOT_COUNTED}
            counts[IN_AGENTS] += sum(world.counts[kind] for kind in kinds)


def configuration(draw: random.Random, schedule: str) -> Config:
    """A small run, of this schedule."""
    choose = draw.choice
    keep_tokens = KEEP_TOKENS[draw.randrange(len(KEEP_TOKENS))]
    bound = {"synchronous": 0, "one_step": 1, "histopipe": 1}.get(schedule, choose([1, 1, 2, 3]))
    given: dict[str, Any] = {
        "name": "fake",
        "data": {"source": "fake.jsonl", "eval_size": choose([0, HELD_OUT])},
        "rollout": {
            "num_generations": choose([2, 2, 3]),
            "max_completion_length": choose([4, 12, 20]),
            "num_instances": choose([1, 2, 2, 3]),
            "max_num_seqs": choose([2, 4]),
            "rhyming_noise": choose([0.0, 0.5]),
        },
        "drafting": {"window": "off"},
        "reward": {
            "functions": [
                {"function": name, "per": choose(["group", "response"])}
                for name in choose([["a.f"], ["a.f", "a.g"]])
            ],
            "on_failure": "drop",
            "max_consecutive_failures": 10**6,
        },
        "environment": {
            "classes": choose([[], [], [{"environment": "a.Fake"}]]),
            "max_turns": choose([2, 4, 10]),
            "on_failure": "drop",
            "max_consecutive_failures": 10**6,
        },
        "eval": {"suites": suites(choose)},
        "learner": {
            "max_steps": choose([2, 4, 6]),
            "groups_per_batch": choose([1, 2, 3]),
            "max_skipped_steps": 10**6,
        },
        "schedule": {
            "name": schedule,
            "max_staleness": bound,
            "extra_groups": choose([0, 0, 1]),
            "extra_generations": choose([0, 0, 1]),
            "filter_zero_variance": choose([False, False, True]),
            "on_stuck": choose(["wait", "retry", "truncate"]),
        },
        "run": {
            "eval_steps": choose([0, 1, 2]),
            "save_steps": choose(SAVE_STEPS),
            "save_total_limit": choose([1, 2]) if keep_tokens is None else 2,
            "keep_tokens": keep_tokens,
            "worker_timeout": WORKER_TIMEOUT,
            "instance_restarts": 10**6,
            "report_to": [],
            "seed": draw.randrange(1000),
        },
    }
    with_own = [each for each in given["eval"]["suites"] if "environments" in each]
    if not given["environment"]["classes"] and not with_own:
        del given["environment"]  # a resumed run reads it, and would refuse what has no effect
    return in_force(Config.model_validate(given), Path("run"))


def with_agent(config: Config) -> Config:
    """The run with programs that call the policy, instead of environments."""
    own = [suite.model_copy(update={"environments": None}) for suite in config.eval.suites]
    on_stuck = "wait" if config.schedule.on_stuck == "truncate" else config.schedule.on_stuck
    changed = config.changed(
        environment={
            "classes": (),
            "agent": "a.py:f",
            "on_failure": "drop",
            "max_consecutive_failures": 10**6,
        },
        eval={"suites": tuple(own)},
        schedule={"on_stuck": on_stuck},
    )
    return Config.model_validate(changed.model_dump(mode="json"))


def quiet_run(seed: int, directory: Path, schedule: str) -> FakeRun:
    """A run that nothing happens to, without snapshots; it has ended."""
    config = configuration(random.Random(f"{seed} {schedule}"), schedule)
    fake = FakeRun(World(seed), directory, config)
    with adapted(10**9):
        fake.carry_through()
    return fake


def suites(choose: Callable[[list[Any]], Any]) -> list[dict[str, Any]]:
    """None, or one with several answers to a prompt, which may have what judges them of its own."""
    functions = [{"function": "a.h", "per": choose(["group", "response"])}]
    many = {"name": "many", "n": choose([2, 3]), "steps": choose([1, 2, 3])}
    own = choose([{}, {"functions": functions}])
    environments = choose([{}, {"environments": []}, {"environments": [{"environment": "b.Fake"}]}])
    return choose([[], [many | own | environments]])


def rates(draw: random.Random) -> Rates:
    """How often messages come twice and late, and rewards fail."""
    return Rates(
        twice=draw.choice([0.0, 0.02, 0.2]),
        late=draw.choice([0.0, 0.02, 0.1]),
        failures=draw.choice([0.0, 0.0, 0.05]),
    )


@contextmanager
def adapted(num_events: int) -> Iterator[None]:
    """Have the coordinator's state stored every so many events, and no `config.yaml` written twice:
    nobody reads it, and that takes longest.
    """
    before, dump = event_log.SNAPSHOT_EVENTS, start.dump_config
    written: dict[str, str] = {}

    def dump_once(config: Config) -> str:
        key = config.model_dump_json()
        return written.get(key) or written.setdefault(key, dump(config))

    event_log.SNAPSHOT_EVENTS, start.dump_config = num_events, dump_once
    try:
        yield
    finally:
        event_log.SNAPSHOT_EVENTS, start.dump_config = before, dump


def watch(coordinator: Coordinator, look: Look) -> None:
    """Look at a coordinator after each event that it handles."""
    handle = coordinator.handle

    def watched(event: Event) -> list[Command]:
        commands = handle(event)
        look(coordinator)
        return commands

    coordinator.handle = watched  # type: ignore[method-assign]


class FakeRun:
    """A run in `directory`, in which each attempt after a death has a folder of its own."""

    def __init__(
        self,
        world: World,
        directory: Path,
        config: Config,
        rates: Rates = NO_FAULTS,
        look: Look | None = None,
    ) -> None:
        self._world, self._directory, self._rates, self._look = world, directory, rates, look
        self.config = config
        self.path = directory / "0"
        self._goes_on = world.chance(LONGER_SHARE)
        self.seen = check.Seen()
        """What was stored when an attempt ended, and has to be in the end."""
        self._num_heirs = self._num_signals = 0
        self.path.mkdir(parents=True)
        start.write_config(config, self.path)

    def carry_through(self) -> None:
        while True:
            store = self.store()
            try:
                with closing(store):
                    self.attempt(store)
                if not self._goes_on:
                    return
                self._goes_on = False
                steps = self.config.learner.max_steps + 1
                self.config = self.config.changed(learner={"max_steps": steps})
            except Killed:
                self._inherit(store.heir)
            except StorageError:
                self._world.count("disk full")
            except KeyboardInterrupt:
                if self._world.counts["controller signalled"] == self._num_signals:
                    raise  # it is this program's user who wants to stop
                self._num_signals = self._world.counts["controller signalled"]
            self.seen.look(self.path, store.committed, self._world)

    def store(self) -> MortalStore:
        """That of the next attempt."""
        heir = self._directory / str(self._num_heirs + 1)
        prunes = self.config.run.keep_tokens is not None
        return MortalStore(self.path, heir, self._world, respects_flushes=prunes)

    def attempt(self, store: MortalStore) -> None:
        """Go on until the run ends, or something ends it."""
        if self.seen.num_attempts == 0:
            config, past = self.config, beginning(self.config)
        else:
            check_log(self.path)
            past, config = recall(self.path, self._changed)
        self.seen.num_attempts += 1
        if self._look is not None:
            watch(past.coordinator, self._look)
        attempt(
            config,
            self.path,
            store,
            past,
            Console(file=io.StringIO(), quiet=True),
            runtime=lambda config, path, _: FakeProcesses(
                self._world, self._rates, store.killing, config, path
            ),
            load=load,
            clock=self._world.clock,
        )

    def _changed(self, config: Config) -> Config:
        """At times, other values of fields that may be changed when a run is resumed."""
        steps = self.config.learner.max_steps
        config = config.changed(learner={"max_steps": steps})
        if not self._world.chance(CHANGE_SHARE):
            return config
        choose = self._world.rng.choice
        rollout = {"num_instances": choose([1, 2, 3]), "max_num_seqs": choose([2, 4])}
        return config.changed(rollout=rollout, run={"save_steps": choose(SAVE_STEPS)})

    def _inherit(self, heir: Path) -> None:
        """Go on in the directory that is left; checkpoints are where they were."""
        self._num_heirs += 1
        checkpoints = self.path / CHECKPOINTS
        if checkpoints.exists():
            checkpoints.rename(heir / CHECKPOINTS)
        shutil.rmtree(self.path)
        self.path = heir
        if self._world.chance(DAMAGE_SHARE):
            self._refuses_damage()

    def _refuses_damage(self) -> None:
        copy = damaged(self.path, self._directory / "damaged", self._world)
        try:
            check_log(copy)
        except UserError:
            self._world.counts["log damaged"] += 1
        else:
            raise AssertionError("a damaged log was not refused")
        finally:
            shutil.rmtree(copy)


SCHEDULE_NAMES = tuple(sorted(SCHEDULES))
