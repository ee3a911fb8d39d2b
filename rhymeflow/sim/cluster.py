"""The simulated runtime: carries out the coordinator's commands in virtual time and reports events.

One heap holds all that is to come, ordered by (time, kind, the order it was entered), so that what
happens at one instant has a fixed order; nothing is random. The same coordinator that drives real
runs decides everything, and the audit checks the laws on what the world did. Held-out evaluation is
left out (docs/simulator.md has what is modelled).
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from heapq import heappop, heappush
from math import inf
from typing import TYPE_CHECKING, Any

from rhymeflow.config import SimulationConfig
from rhymeflow.core.commands import (
    Abort,
    Accumulate,
    Command,
    Drop,
    Finish,
    FinishEarly,
    InstanceCommand,
    Interrupt,
    Pull,
    RequestPrompts,
    RetryPrompt,
    Route,
    Train,
)
from rhymeflow.core.coordinator import Coordinator
from rhymeflow.core.events import (
    Accumulated,
    Event,
    GroupCreated,
    InstanceJoined,
    LearnerReady,
    Observed,
    Pulled,
    Tick,
    TrajectoryFinished,
    TrajectoryRewarded,
    TurnEnded,
    VersionPublished,
)
from rhymeflow.core.plan import Plan, Schedule
from rhymeflow.core.types import GroupId, InstanceId, TrajectoryId, Version
from rhymeflow.sim.audit import Audit, Step, Tokens
from rhymeflow.sim.faults import Deaths, Failure, Recovery
from rhymeflow.sim.hardware import Hardware
from rhymeflow.sim.instance import Instance, Instances
from rhymeflow.sim.learner import Learner
from rhymeflow.sim.response import Response
from rhymeflow.sim.workload import Prompt, Workload

if TYPE_CHECKING:
    from rhymeflow.sim.record import Record
    from rhymeflow.sim.timeline import Timeline

_WORLD, _COMMAND, _EVENT, _LOOK, _PLAN = range(5)
"""What comes first of what happens at one instant."""


class Cluster:
    """A run on so many instances, from second 0; `plan` does not evaluate.

    `latencies` are of everything but `hardware`. Without `recovery` nothing dies, and no checkpoint
    is written; `failures` may be without end.
    """

    def __init__(
        self,
        plan: Plan,
        schedule: Schedule,
        hardware: Hardware,
        workload: Workload,
        latencies: SimulationConfig,
        *,
        num_instances: int,
        recovery: Recovery | None = None,
        failures: Iterable[Failure] = (),
        timeline: Timeline | None = None,
        log: Record | None = None,
    ) -> None:
        assert not plan.eval_steps, "evaluation is not simulated"
        self.plan, self.hardware, self.workload = plan, hardware, workload
        self.latencies = latencies
        self.coordinator = Coordinator(plan, schedule)
        self.audit = Audit(
            num_generations=plan.num_generations,
            groups_per_batch=plan.groups_per_batch,
            max_staleness=plan.max_staleness,
        )
        self.now = 0.0
        self.published: Version = 0
        self.steps: list[Step] = []
        self.commands = self.events = self.ticks = 0
        self.num_instances = num_instances
        row = None if timeline is None else timeline.learner
        self.learner = Learner(hardware.cost, recovery, row)
        self.instances = Instances(self._make_instance, num_instances)
        self.deaths = Deaths(self, recovery, failures)
        self._timeline, self._log = timeline, log
        self._heap: list[tuple[float, int, int, Callable[[Any], None], Any]] = []
        self._num_queued = 0
        self._versions: dict[InstanceId, Version] = {}
        """The version that each instance holds for the coordinator: reported, or commanded."""
        self._requests = self._groups = 0
        self._tick_due = self._look_due = False
        self._last_tick = -latencies.tick_seconds
        self._finished = False
        self.report([LearnerReady(0)])
        for place in range(num_instances):
            self.join((place, 0))
        self.deaths.expect()

    @property
    def all_instances(self) -> list[Instance]:
        """Instances that ever were, in the order they joined."""
        return self.instances.ever

    def run(self) -> None:
        """Go on until the coordinator says `Finish`.

        Raises:
            InvariantViolation: the run broke the bound, or lost a group.
            UserError: so much fails that it never gets to the next step.
        """
        heap = self._heap
        while not self._finished:
            assert heap, f"nothing can happen at {self.now} s, and the run is not finished"
            self.now, kind, number, action, argument = heappop(heap)
            until = self.deaths.silent_until
            if kind != _WORLD and self.now < until:
                # By its old number: what one sender reports stays in order.
                heappush(heap, (until, kind, number, action, argument))
            else:
                action(argument)
        self.audit.close(self.plan.num_batches)

    # -- virtual time ------------------------------------------------------------------------

    def at(self, time: float, action: Callable[[Any], None], argument: Any) -> None:
        """This happens in the world then."""
        self._at(time, _WORLD, action, argument)

    def _at(
        self, time: float, kind: int, action: Callable[[Any], None], argument: Any = None
    ) -> None:
        self._num_queued += 1
        heappush(self._heap, (time, kind, self._num_queued, action, argument))

    def report(self, events: list[Event], seconds: float | None = None) -> None:
        """The coordinator hears of these, `message_seconds` from now."""
        delay = self.latencies.message_seconds if seconds is None else seconds
        self._at(self.now + delay, _EVENT, self._hear, events)

    # -- the coordinator ---------------------------------------------------------------------

    def _hear(self, events: list[Event]) -> None:
        handle, versions = self.coordinator.handle, self._versions
        for event in events:
            if isinstance(event, Pulled | InstanceJoined):
                versions[event.instance] = max(versions.get(event.instance, 0), event.version)
            if self._log is not None:
                self._log.hear(self, event)
            if commands := handle(event):
                self._obey(commands)
        self.events += len(events)
        if not self._tick_due:
            self._tick_due = True
            time = max(self.now, self._last_tick + self.latencies.tick_seconds)
            self._at(time, _PLAN, self._tick)

    def _tick(self, _: None) -> None:
        self._tick_due, self._last_tick = False, self.now
        self.ticks += 1
        commands: list[Command] = []
        while True:
            if self._log is not None:
                self._log.hear(self, Tick())
            commands += self.coordinator.handle(Tick())
            if not self.coordinator.state.has_more:
                break
        self._obey(commands)

    def _obey(self, commands: list[Command]) -> None:
        self.commands += len(commands)
        if self._log is not None:
            self._log.obey(self, commands)
        self._carry_out(commands)

    def _carry_out(self, commands: list[Command]) -> None:
        to_instances: list[InstanceCommand] = []
        for command in commands:
            match command:
                case Route(instance=name, trajectory=trajectory):
                    self._begin(trajectory, self._versions[name])
                    to_instances.append(command)
                case Pull(instance=name, version=version):
                    self._versions[name] = max(self._versions[name], version)
                    to_instances.append(command)
                case RequestPrompts(count):
                    self.report([self._request() for _ in range(count)], 0.0)
                case RetryPrompt(group):
                    self.report([self._requested(self.audit.prompt(group), group)], 0.0)
                case FinishEarly(trajectory):
                    self.audit.complete(trajectory)
                    self._score([trajectory], self.latencies.reward_seconds)
                case Accumulate() | Train():
                    self._at(
                        self.now + self.latencies.message_seconds, _COMMAND, self._learn, command
                    )
                case Drop():
                    self.audit.drop(command)
                case Finish():
                    self._finished = True
                case Interrupt() | Abort():
                    to_instances.append(command)
                # CloseEnvironments: what they answer is not waited for.
        if to_instances:
            self._at(
                self.now + self.latencies.message_seconds, _COMMAND, self._deliver, to_instances
            )

    # -- prompts and rewards -----------------------------------------------------------------

    def _request(self) -> GroupCreated:
        self._requests += 1
        return self._requested(self.workload.prompt(self._requests - 1), None)

    def _requested(self, prompt: Prompt, repeats: GroupId | None) -> GroupCreated:
        group, self._groups = self._groups, self._groups + 1
        self.audit.request(group, prompt)
        return GroupCreated(group, prompt.row, prompt.epoch, prompt.tokens, repeats)

    def _begin(self, trajectory: TrajectoryId, version: Version) -> None:
        """It is there from when it is first routed."""
        if trajectory in self.audit.responses:
            return
        row, epoch, tokens = self.audit.prompt(trajectory.group)
        length = self.workload.length(row, epoch, trajectory.member)
        answers = self.workload.answers(row, epoch, trajectory.member, length)
        response = Response(trajectory, tokens, length, known=epoch > 0, answers=answers)
        response.routed_version = version
        self.audit.admit(response)

    def _score(self, trajectories: list[TrajectoryId], seconds: float) -> None:
        rewarded: list[Event] = []
        for trajectory in trajectories:
            row, epoch, _ = self.audit.prompt(trajectory.group)
            reward = self.workload.reward(row, epoch, trajectory.member)
            self.audit.reward(trajectory, reward)
            rewarded.append(TrajectoryRewarded(trajectory, reward))
        self.report(rewarded, seconds)

    # -- instances ---------------------------------------------------------------------------

    def _deliver(self, commands: list[InstanceCommand]) -> None:
        touched: dict[InstanceId, Instance] = {}
        for command in commands:
            instance = self.instances.live.get(command.instance)
            if instance is not None:  # one that left hears nothing
                instance.deliver(command, self.now)
                touched[command.instance] = instance
        for instance in touched.values():
            self._at(instance.next, _WORLD, self._advance, instance)
        if not self._look_due:
            self._look_due = True
            self._at(self.now + self.latencies.snapshot_seconds, _LOOK, self._look)

    def _advance(self, instance: Instance) -> None:
        if instance.next != self.now:
            return  # a command arrived meanwhile and changed what comes next
        events = instance.advance(self.now)
        if instance.busy:
            self._at(instance.next, _WORLD, self._advance, instance)
        if not events:
            return
        self.report(events)
        for event in events:
            if isinstance(event, TurnEnded):
                answer = self.audit.responses[event.trajectory].answers[event.turn - 1]
                self._at(self.now + answer.seconds, _WORLD, self._answer, event)
        done = [event.trajectory for event in events if isinstance(event, TrajectoryFinished)]
        if done:
            for trajectory in done:
                self.audit.complete(trajectory)
            self._score(done, self.latencies.message_seconds + self.latencies.reward_seconds)

    def _answer(self, ended: TurnEnded) -> None:
        """An environment says what it has to, if anybody still waits for it."""
        if self.audit.is_open(ended.trajectory):
            response = self.audit.responses[ended.trajectory]
            response.observe()
            self.report([Observed(ended.trajectory, ended.turn, response.generated)])

    def _look(self, _: None) -> None:
        """Busy instances say how they are; with none, until there is one."""
        busy = [instance for instance in self.instances.live.values() if instance.busy]
        self._look_due = bool(busy)
        if busy:
            self._at(self.now + self.latencies.snapshot_seconds, _LOOK, self._look)
            self.report([i.snapshot(self.now) for i in busy if not i.pulling])

    def _make_instance(self, name: InstanceId) -> Instance:
        return Instance(
            name,
            self.hardware,
            version=self.published,
            now=self.now,
            find=self.audit.responses.__getitem__,
            published=lambda: self.published,
            row=None if self._timeline is None else self._timeline.join(name, self.now),
        )

    def join(self, started: tuple[int, int]) -> None:
        """One is up that was started at this place when the place had had so many losses."""
        place, losses = started
        if losses != self.instances.losses(place):
            return
        if not self.learner.is_there:
            self.instances.wait(place)
            return
        instance, hardware = self.instances.join(place), self.hardware
        joined = InstanceJoined(
            instance.name, instance.version, hardware.capacity, hardware.kv_capacity
        )
        self.report([joined])

    # -- the learner -------------------------------------------------------------------------

    def _learn(self, command: Accumulate | Train) -> None:
        self._train(command) if isinstance(command, Train) else self._accumulate(command)

    def _accumulate(self, command: Accumulate) -> None:
        token_seconds = self._token_seconds(self.audit.tokens(command))
        self.learner.accumulate(command.version, token_seconds, self.now)
        if self.learner.accumulated < inf:
            event = Accumulated(command.version, self.learner.parts)
            self._at(self.learner.accumulated, _WORLD, self._accumulated, event)

    def _accumulated(self, event: Accumulated) -> None:
        if self.learner.accumulated == self.now:  # else it died meanwhile, or trains by now
            self.learner.end_accumulating()
            self.report([event])

    def _train(self, command: Train) -> None:
        token_seconds = self._token_seconds(self.audit.train(command).tokens)
        self.learner.train(command.version, token_seconds, self.now)
        self.expect_version()

    def _token_seconds(self, tokens: Tokens) -> float:
        cost = self.hardware.cost
        return cost.train_token * tokens.moving + cost.measure_token * tokens.still

    def expect_version(self) -> None:
        """What the learner trains on will be published."""
        if self.learner.next < inf:
            self._at(self.learner.next, _WORLD, self._publish)

    def _publish(self, _: None) -> None:
        if self.learner.next != self.now:
            return  # it died meanwhile
        version = self.published = self.learner.publish(self.now)
        busy = sum(instance.busy_seconds(self.now) for instance in self.all_instances)
        self.steps.append(Step(version, self.now, busy, self.learner.busy))
        self.report([VersionPublished(version)])
