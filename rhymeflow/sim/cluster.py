"""The simulated runtime: carries out the coordinator's commands in virtual time and reports events.

One heap holds all scheduled actions, ordered by (time, kind, order of entry), so simultaneous
events have a fixed order; nothing is random. The audit checks the laws on what instances did.
Evaluation is not simulated (docs/simulator.md says what is)."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import dataclass
from heapq import heappop, heappush
from itertools import count, islice
from math import inf
from typing import TYPE_CHECKING, Any

from rhymeflow.config import SimulationConfig
from rhymeflow.core import commands, events
from rhymeflow.core.commands import Command, InstanceCommand
from rhymeflow.core.coordinator import Coordinator
from rhymeflow.core.events import Event
from rhymeflow.core.plan import Plan, Schedule
from rhymeflow.core.types import GroupId, InstanceId, TrajectoryId, Version
from rhymeflow.sim.audit import Audit, PublishedStep, RequestedGroup, Tokens
from rhymeflow.sim.continuous_batching import Hardware
from rhymeflow.sim.faults import Death, Deaths, Recovery
from rhymeflow.sim.instance import SimulatedInstance
from rhymeflow.sim.learner import SimulatedLearner
from rhymeflow.sim.response import Response
from rhymeflow.sim.workload import SimulatedPrompt, Workload

if TYPE_CHECKING:
    from rhymeflow.sim.record import Record
    from rhymeflow.sim.timeline import Timeline

_WORLD, _COMMAND, _EVENT, _SNAPSHOT, _PLAN = range(5)
"""Kinds of entries, in the order in which they happen at one time."""
_REPORT_VERSION = events.Pulled, events.InstanceJoined
"""Events that say which version an instance holds."""


@dataclass(slots=True)
class Site:
    """The devices of an instance and of its replacements."""

    instance: InstanceId | None = None
    joined: int = 0  # instances that have joined here
    losses: int = 0  # deaths here, also of instances that were still starting
    is_ready: bool = False  # whether an instance is up and waits for the learner


class Cluster:
    """A simulated run, from second 0; `plan` must have no evaluations. `latencies` has all times
    but those of `hardware`. Without `recovery` nothing dies and no checkpoint is written;
    `failures` may be infinite."""

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
        failures: Iterable[Death] = (),
        timeline: Timeline | None = None,
        log: Record | None = None,
    ) -> None:
        assert not plan.eval_steps, "evaluation is not simulated"
        self.plan, self.hardware, self.workload = plan, hardware, workload
        self.latencies = latencies
        self._prompts = map(workload.prompt, count())
        self.coordinator = Coordinator(plan, schedule)
        self.audit = Audit(plan)
        self.now = 0.0
        self.published: Version = 0
        self.steps: list[PublishedStep] = []
        self.commands = self.events = self.ticks = 0
        self.num_instances = num_instances
        row = None if timeline is None else timeline.learner
        self.learner = SimulatedLearner(hardware.cost, recovery, row)
        self.sites = [Site() for _ in range(num_instances)]
        self.live: dict[InstanceId, SimulatedInstance] = {}
        self.all_instances: list[SimulatedInstance] = []
        """All instances, dead ones included, in the order they joined."""
        self.deaths = Deaths(self, recovery, failures)
        self._timeline, self._log = timeline, log
        self._heap: list[tuple[float, int, int, Callable[[Any], None], Any]] = []
        self._num_queued = 0
        self._versions: dict[InstanceId, Version] = {}
        """The newest version that each instance reported or was commanded to pull."""
        self._tick_due = self._snapshot_due = False
        self._last_tick = -latencies.tick_seconds
        self._finished = False
        self.report([events.LearnerReady(0)])
        for number in range(num_instances):
            self.join((number, 0))
        self.deaths.expect()

    def run(self) -> None:
        """Run until the coordinator commands `Finish`. Raises `InvariantViolation` if the run broke
        the bound or lost a group, `UserError` if failures are too frequent for a step to end."""
        heap = self._heap
        while not self._finished:
            assert heap, f"nothing can happen at {self.now} s, and the run is not finished"
            self.now, kind, number, action, argument = heappop(heap)
            until = self.deaths.silent_until
            if kind != _WORLD and self.now < until:
                # Keep its number, so that the events of one sender stay in order.
                heappush(heap, (until, kind, number, action, argument))
            else:
                action(argument)
        self.audit.close()

    # -- virtual time ------------------------------------------------------------------------

    def at(self, time: float, action: Callable[[Any], None], argument: Any) -> None:
        """Call `action(argument)` at `time`, before commands and events are delivered then."""
        self._at(time, _WORLD, action, argument)

    def _at(
        self, time: float, kind: int, action: Callable[[Any], None], argument: Any = None
    ) -> None:
        self._num_queued += 1
        heappush(self._heap, (time, kind, self._num_queued, action, argument))

    def report(self, happened: list[Event], seconds: float | None = None) -> None:
        """Deliver events to the coordinator after `seconds` (None: `message_seconds`)."""
        delay = self.latencies.message_seconds if seconds is None else seconds
        self._at(self.now + delay, _EVENT, self._hear, happened)

    def _send(self, action: Callable[[Any], None], command: Any) -> None:
        """Deliver a command to a worker after `message_seconds`."""
        self._at(self.now + self.latencies.message_seconds, _COMMAND, action, command)

    # -- the coordinator ---------------------------------------------------------------------

    def _hear(self, happened: list[Event]) -> None:
        versions = self._versions
        for event in happened:
            if isinstance(event, _REPORT_VERSION):
                versions[event.instance] = max(versions.get(event.instance, 0), event.version)
            if issued := self._handle(event):
                self._obey(issued)
        self.events += len(happened)
        if not self._tick_due:
            self._tick_due = True
            time = max(self.now, self._last_tick + self.latencies.tick_seconds)
            self._at(time, _PLAN, self._tick)

    def _tick(self, _: None) -> None:
        self._tick_due, self._last_tick = False, self.now
        self.ticks += 1
        planned: list[Command] = []
        while True:
            planned += self._handle(events.Tick())
            if not self.coordinator.state.has_more:
                break
        self._obey(planned)

    def _handle(self, event: Event) -> list[Command]:
        if self._log is not None:
            self._log.hear(self, event)
        return self.coordinator.handle(event)

    def _obey(self, issued: list[Command]) -> None:
        self.commands += len(issued)
        if self._log is not None:
            self._log.obey(self, issued)
        self._carry_out(issued)

    def _carry_out(self, issued: list[Command]) -> None:
        to_instances: list[InstanceCommand] = []
        for command in issued:
            match command:
                case commands.Route(instance=name, trajectory=trajectory):
                    self._begin(trajectory, self._versions[name])
                case commands.Pull(instance=name, version=version):
                    self._versions[name] = max(self._versions[name], version)
                case commands.RequestPrompts(wanted):
                    self.report([self._created(p) for p in islice(self._prompts, wanted)], 0.0)
                case commands.RetryPrompt(group):
                    self.report([self._created(self.audit.groups[group].prompt, group)], 0.0)
                case commands.FinishEarly(trajectory):
                    self._complete(trajectory, self.latencies.reward_seconds)
                case commands.Accumulate() | commands.Train():
                    self._send(self._learn, command)
                case commands.Drop():
                    self.audit.drop(command)
                case commands.Finish():
                    self._finished = True
                # CloseEnvironments needs no action: `_observe` ignores responses that have ended.
            if isinstance(command, InstanceCommand):
                to_instances.append(command)
        if to_instances:
            self._send(self._deliver, to_instances)

    # -- prompts and rewards -----------------------------------------------------------------

    def _created(self, prompt: SimulatedPrompt, repeats: GroupId | None = None) -> Event:
        self.audit.groups.append(RequestedGroup(prompt))
        group = len(self.audit.groups) - 1
        return events.GroupCreated(group, prompt.row, prompt.epoch, prompt.tokens, repeats)

    def _begin(self, trajectory: TrajectoryId, version: Version) -> None:
        """Sample the response when it is first routed."""
        if trajectory in self.audit.responses:
            return
        prompt = self.audit.groups[trajectory.group].prompt
        spec = self.workload.response(prompt.row, prompt.epoch, trajectory.member)
        response = Response(trajectory, prompt.tokens, spec.length, spec.reward, spec.observations)
        response.draft_classes = [self.hardware.drafts.class_of(each) for each in spec.acceptance]
        response.ending = spec.ending
        response.routed_version = version
        self.audit.admit(response)

    def _complete(self, trajectory: TrajectoryId, seconds: float) -> None:
        """Complete a response, and report its reward after `seconds`."""
        complete = self.audit.complete(trajectory)
        self.report([events.TrajectoryRewarded(complete.id, complete.reward)], seconds)

    # -- instances ---------------------------------------------------------------------------

    def _deliver(self, issued: list[InstanceCommand]) -> None:
        touched: dict[InstanceId, SimulatedInstance] = {}
        for command in issued:
            instance = self.live.get(command.instance)
            if instance is not None:  # else it has died
                instance.deliver(command, self.now)
                touched[command.instance] = instance
        for instance in touched.values():
            self._at(instance.next, _WORLD, self._advance, instance)
        if not self._snapshot_due:
            self._snapshot_due = True
            self._at(self.now + self.latencies.snapshot_seconds, _SNAPSHOT, self._snapshot)

    def _advance(self, instance: SimulatedInstance) -> None:
        if instance.next != self.now:
            return  # a command has changed `next` in the meantime
        happened = instance.advance(self.now)
        if instance.busy:
            self._at(instance.next, _WORLD, self._advance, instance)
        if not happened:
            return
        self.report(happened)
        for event in happened:
            if isinstance(event, events.TurnEnded):
                response = self.audit.responses[event.trajectory]
                seconds = response.observations[event.turn - 1].seconds
                self._at(self.now + seconds, _WORLD, self._observe, event)
            elif isinstance(event, events.TrajectoryFinished):
                ending = self.audit.responses[event.trajectory].ending
                seconds = self.latencies.message_seconds + ending + self.latencies.reward_seconds
                self._complete(event.trajectory, seconds)

    def _observe(self, ended: events.TurnEnded) -> None:
        """Report the environment's observation, unless the response or its group has ended."""
        response = self.audit.responses[ended.trajectory]
        if self.audit.is_open(response):
            response.observe()
            self.report([events.Observed(response.id, ended.turn, response.generated)])

    def _snapshot(self, _: None) -> None:
        """Report snapshots every `snapshot_seconds`, of an instance until it has none to tell."""
        busy = [instance for instance in self.live.values() if instance.has_news]
        self._snapshot_due = bool(busy)
        if busy:
            self._at(self.now + self.latencies.snapshot_seconds, _SNAPSHOT, self._snapshot)
            self.report([i.snapshot(self.now) for i in busy if not i.pulling])

    def join(self, started: tuple[int, int]) -> None:
        """Let an instance join that was started at (site number, the site's `losses` then), unless
        it has died since, or the learner is down: then it waits for the learner."""
        number, losses = started
        site, hardware = self.sites[number], self.hardware
        if losses != site.losses:
            return
        site.is_ready = not self.learner.is_up
        if site.is_ready:
            return
        assert site.instance is None, f"site {number} is taken"
        name = f"rollout-{number}.{site.joined}" if site.joined else f"rollout-{number}"
        instance = self.live[name] = SimulatedInstance(
            name,
            hardware,
            version=self.published,
            now=self.now,
            find=self.audit.responses.__getitem__,
            published=lambda: self.published,
            row=None if self._timeline is None else self._timeline.join(name, self.now),
        )
        site.instance, site.joined = name, site.joined + 1
        self.all_instances.append(instance)
        version, capacity = instance.version, hardware.capacity
        self.report([events.InstanceJoined(name, version, capacity, hardware.kv_capacity)])

    # -- the learner -------------------------------------------------------------------------

    def _learn(self, command: commands.Accumulate | commands.Train) -> None:
        if isinstance(command, commands.Train):
            tokens = self.audit.train(command).tokens
            token_seconds = self._token_seconds(command.version, tokens)
            self.learner.train(command.version, token_seconds, self.now)
            self.expect_version()
            return
        token_seconds = self._token_seconds(command.version, self.audit.tokens(command))
        self.learner.accumulate(command.version, token_seconds, self.now)
        if self.learner.accumulated < inf:
            event = events.Accumulated(command.version, self.learner.parts)
            self._at(self.learner.accumulated, _WORLD, self._accumulated, event)

    def _accumulated(self, event: events.Accumulated) -> None:
        if self.learner.accumulated == self.now:  # else it has died or trains already
            self.learner.end_accumulating()
            self.report([event])

    def _token_seconds(self, version: Version, tokens: Tokens) -> float:
        cost, warmup = self.hardware.cost, self.hardware.warmup
        if warmup is not None and version < warmup[0]:
            cost = warmup[1]
        return cost.train_token * tokens.trained + cost.measure_token * tokens.measured

    def expect_version(self) -> None:
        """Schedule the publication of the batch that the learner trains on."""
        if self.learner.next < inf:
            self._at(self.learner.next, _WORLD, self._publish)

    def _publish(self, _: None) -> None:
        if self.learner.next != self.now:
            return  # it has died
        version = self.published = self.learner.publish(self.now)
        busy = sum(instance.busy_seconds(self.now) for instance in self.all_instances)
        self.steps.append(PublishedStep(version, self.now, busy, self.learner.busy))
        self.report([events.VersionPublished(version)])
