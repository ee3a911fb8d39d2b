"""The simulated body: carries out the mind's commands in virtual time and reports what happened.

One heap holds all that is to come, ordered by (time, kind, the order it was entered), so that what
happens at one instant has a fixed order: the world moves, commands arrive, facts arrive, instances
are looked at, the mind plans. Nothing is random.

Modelled: commands and facts take `command_seconds` and `fact_seconds`; facts of one sender arrive
in order. A response is judged `reward_seconds` after it is finished. The learner trains for
`train_step` and `train_token` for each token of prompts and responses (`measure_token` in groups
whose rewards are all equal), then pushes; it begins nothing else meanwhile, and the version can be
pulled when the push is over. Held-out evaluation is left out.

Holds true: the same coordinator that drives real runs decides everything; the laws are checked by
the ledger on what the world did. Knows no strategy.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from heapq import heappop, heappush
from typing import Any

from rhymeflow.core.commands import (
    Command,
    Conclude,
    Draw,
    Drop,
    Finish,
    InstanceCommand,
    Pull,
    Redraw,
    Route,
    Train,
)
from rhymeflow.core.coordinator import Coordinator
from rhymeflow.core.events import (
    Event,
    GroupDrawn,
    InstanceJoined,
    InstanceLeft,
    LearnerReady,
    Pulled,
    Tick,
    TrajectoryFinished,
    TrajectoryRewarded,
    VersionPublished,
)
from rhymeflow.core.plan import Plan, Schedule
from rhymeflow.core.types import GroupId, InstanceId, TrajectoryId, Version
from rhymeflow.sim.hardware import Hardware, Outage, Pace
from rhymeflow.sim.instance import Instance
from rhymeflow.sim.ledger import Ledger, Step
from rhymeflow.sim.response import Response
from rhymeflow.sim.timeline import Timeline
from rhymeflow.sim.workload import Prompt, Workload

_WORLD, _COMMAND, _FACT, _LOOK, _PLAN = range(5)
"""What comes first of what happens at one instant."""


class Cluster:
    """A run on so many instances.

    Args:
        plan: of the run; it does not evaluate.
        schedule: its rules.
        hardware: of the instances; its cost model is the learner's too.
        workload: prompts, lengths and rewards.
        pace: of everything else.
        num_instances: at the beginning, which is second 0.
        outages: instances that leave.
        timeline: where what happens is written; None: nowhere.
    """

    def __init__(
        self,
        plan: Plan,
        schedule: Schedule,
        hardware: Hardware,
        workload: Workload,
        pace: Pace,
        *,
        num_instances: int,
        outages: Sequence[Outage] = (),
        timeline: Timeline | None = None,
    ) -> None:
        assert plan.eval_steps is None, "held-out evaluation is not simulated"
        self.plan, self.hardware, self.workload, self.pace = plan, hardware, workload, pace
        self.mind = Coordinator(plan, schedule)
        self.ledger = Ledger(
            num_generations=plan.num_generations,
            groups_per_batch=plan.groups_per_batch,
            max_staleness=plan.max_staleness,
        )
        self.now = 0.0
        self.published: Version = 0
        self.steps: list[Step] = []
        self.everyone: list[Instance] = []
        """Instances that ever were, in the order they joined."""
        self.commands = self.facts = self.ticks = 0
        self.num_instances = num_instances
        self._timeline = timeline
        self._heap: list[tuple[float, int, int, Callable[[Any], None], Any]] = []
        self._serial = 0
        self._names: list[InstanceId] = []
        self._instances: dict[InstanceId, Instance] = {}
        self._told: dict[InstanceId, Version] = {}
        """What the mind takes each instance to hold: it was told so, or it told it to."""
        self._draws = self._groups = 0
        self._tick_due = self._look_due = False
        self._last_tick = -pace.tick_seconds
        self._learner_busy = 0.0
        self._finished = False
        self._report([LearnerReady(0)])
        for index in range(num_instances):
            self._join(index)
        for outage in outages:
            self._at(outage.at, _WORLD, self._leave, outage)

    def run(self) -> None:
        """Go on until the mind says `Finish`.

        Raises:
            LawBroken: the run broke the bound, or lost a group.
        """
        heap = self._heap
        while not self._finished:
            assert heap, f"nothing can happen at {self.now} s, and the run is not finished"
            self.now, _, _, action, argument = heappop(heap)
            action(argument)
        self.ledger.close(self.plan.num_batches)

    # -- virtual time ------------------------------------------------------------------------

    def _at(
        self, time: float, kind: int, action: Callable[[Any], None], argument: Any = None
    ) -> None:
        self._serial += 1
        heappush(self._heap, (time, kind, self._serial, action, argument))

    def _report(self, facts: list[Event], seconds: float | None = None) -> None:
        """The mind hears of these, `fact_seconds` from now."""
        delay = self.pace.fact_seconds if seconds is None else seconds
        self._at(self.now + delay, _FACT, self._hear, facts)

    # -- the mind ----------------------------------------------------------------------------

    def _hear(self, facts: list[Event]) -> None:
        handle = self.mind.handle
        for fact in facts:
            if isinstance(fact, Pulled | InstanceJoined):
                self._told[fact.instance] = max(self._told.get(fact.instance, 0), fact.version)
            if commands := handle(fact, self.now):
                self._obey(commands)
        self.facts += len(facts)
        if not self._tick_due:
            self._tick_due = True
            time = max(self.now, self._last_tick + self.pace.tick_seconds)
            self._at(time, _PLAN, self._tick)

    def _tick(self, _: None) -> None:
        self._tick_due, self._last_tick = False, self.now
        self.ticks += 1
        self._obey(self.mind.handle(Tick(), self.now))

    def _obey(self, commands: list[Command]) -> None:
        self.commands += len(commands)
        to_instances: list[InstanceCommand] = []
        for command in commands:
            match command:
                case Route(instance=name, trajectory=trajectory):
                    if trajectory not in self.ledger.responses:
                        self._begin(trajectory, self._told[name])
                    to_instances.append(command)
                case Pull(instance=name, version=version):
                    self._told[name] = max(self._told[name], version)
                    to_instances.append(command)
                case Draw(count):
                    self._report([self._draw() for _ in range(count)], 0.0)
                case Redraw(group):
                    self._report([self._drawn(self.ledger.prompt(group), group)], 0.0)
                case Conclude(trajectory):
                    self.ledger.complete(trajectory)
                    self._judge([trajectory], self.pace.reward_seconds)
                case Train():
                    self._at(self.now + self.pace.command_seconds, _COMMAND, self._train, command)
                case Drop():
                    self.ledger.drop(command)
                case Finish():
                    self._finished = True
                case _:
                    to_instances.append(command)
        if to_instances:
            self._at(self.now + self.pace.command_seconds, _COMMAND, self._deliver, to_instances)

    # -- prompts and rewards -----------------------------------------------------------------

    def _draw(self) -> GroupDrawn:
        self._draws += 1
        return self._drawn(self.workload.prompt(self._draws - 1), None)

    def _drawn(self, prompt: Prompt, repeats: GroupId | None) -> GroupDrawn:
        group, self._groups = self._groups, self._groups + 1
        self.ledger.draw(group, prompt)
        return GroupDrawn(group, prompt.row, prompt.epoch, prompt.tokens, repeats)

    def _begin(self, trajectory: TrajectoryId, version: Version) -> None:
        row, epoch, tokens = self.ledger.prompt(trajectory.group)
        length = self.workload.length(row, epoch, trajectory.member)
        response = Response(trajectory, tokens, length, known=epoch > 0)
        response.routed_version = version
        self.ledger.admit(response)

    def _judge(self, trajectories: list[TrajectoryId], seconds: float) -> None:
        rewarded: list[Event] = []
        for trajectory in trajectories:
            row, epoch, _ = self.ledger.prompt(trajectory.group)
            reward = self.workload.reward(row, epoch, trajectory.member)
            self.ledger.judge(trajectory, reward)
            rewarded.append(TrajectoryRewarded(trajectory, reward))
        self._report(rewarded, seconds)

    # -- instances ---------------------------------------------------------------------------

    def _deliver(self, commands: list[InstanceCommand]) -> None:
        touched: dict[InstanceId, Instance] = {}
        for command in commands:
            instance = self._instances.get(command.instance)
            if instance is not None:  # one that left hears nothing
                instance.deliver(command, self.now)
                touched[command.instance] = instance
        for instance in touched.values():
            self._at(instance.next, _WORLD, self._advance, instance)
        if not self._look_due:
            self._look_due = True
            self._at(self.now + self.pace.snapshot_seconds, _LOOK, self._look)

    def _advance(self, instance: Instance) -> None:
        if instance.next != self.now:
            return  # it was told something meanwhile, which changed what comes next
        facts = instance.advance(self.now)
        if instance.busy:
            self._at(instance.next, _WORLD, self._advance, instance)
        if not facts:
            return
        self._report(facts)
        done = [fact.trajectory for fact in facts if isinstance(fact, TrajectoryFinished)]
        if done:
            for trajectory in done:
                self.ledger.complete(trajectory)
            self._judge(done, self.pace.fact_seconds + self.pace.reward_seconds)

    def _look(self, _: None) -> None:
        """Busy instances say how they are; with none, until there is one."""
        busy = [instance for instance in self._instances.values() if instance.busy]
        self._look_due = bool(busy)
        if busy:
            self._at(self.now + self.pace.snapshot_seconds, _LOOK, self._look)
            self._report([i.snapshot(self.now) for i in busy if not i.pulling])

    def _join(self, index: int) -> None:
        name = f"rollout-{index}"
        rejoined = sum(old.partition(".")[0] == name for old in self._names)
        name += f".{rejoined}" if rejoined else ""
        self._names.append(name)
        instance = Instance(
            name,
            self._timeline.join(name, self.now) if self._timeline is not None else 0,
            self.hardware,
            version=self.published,
            now=self.now,
            find=self.ledger.responses.__getitem__,
            published=lambda: self.published,
            timeline=self._timeline,
        )
        self._instances[name] = instance
        self.everyone.append(instance)
        joined = InstanceJoined(
            name, instance.version, self.hardware.capacity, self.hardware.kv_capacity
        )
        self._report([joined])

    def _leave(self, outage: Outage) -> None:
        prefix = f"rollout-{outage.index}"
        for name in [n for n in self._instances if n.partition(".")[0] == prefix]:
            self._instances.pop(name).crash(self.now)
            self._report([InstanceLeft(name, "outage")])
            self._at(self.now + outage.seconds, _WORLD, self._join, outage.index)

    # -- the learner -------------------------------------------------------------------------

    def _train(self, command: Train) -> None:
        batch = self.ledger.train(command)
        cost = self.hardware.cost
        moving = batch.prompt_tokens + batch.response_tokens - batch.still_tokens
        tokens_seconds = cost.train_token * moving + cost.measure_token * batch.still_tokens
        trained = self.now + cost.train_step + tokens_seconds
        published = trained + cost.push
        self._learner_busy += published - self.now
        if self._timeline is not None:
            self._timeline.learn("train", self.now, trained, command.version)
            self._timeline.learn("push", trained, published, command.version)
        self._at(published, _WORLD, self._publish, command.version + 1)

    def _publish(self, version: Version) -> None:
        self.published = version
        busy = sum(instance.busy_seconds(self.now) for instance in self.everyone)
        self.steps.append(Step(version, self.now, busy, self._learner_busy))
        self._report([VersionPublished(version)])
