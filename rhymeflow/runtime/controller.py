"""The controller turns workers' messages into events, and the coordinator's commands into messages.

Each turn of the loop stores the events and tokens that have arrived before the coordinator acts on
them (`event_log.py`). What workers read (a batch, a version) is committed before a message names
it. The controller decides nothing, and knows no processes, shared memory or torch.
"""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Mapping
from typing import TYPE_CHECKING, Any

from rhymeflow.config import Config
from rhymeflow.core import commands, events
from rhymeflow.core.events import Event, GroupCreated
from rhymeflow.core.types import InstanceId, SuiteName, TrajectoryId
from rhymeflow.data.load import RunPrompts
from rhymeflow.observe.printable import conversation
from rhymeflow.observe.progress import ShownResponse
from rhymeflow.runtime.base import News, Received, WorkerLost
from rhymeflow.runtime.checkpoints import Checkpoints
from rhymeflow.runtime.environments import Environments
from rhymeflow.runtime.evaluation import EvaluationAction, EvaluationResult, Evaluations
from rhymeflow.runtime.event_log import EventLog
from rhymeflow.runtime.histories import Histories
from rhymeflow.runtime.in_flight import Drawn, InFlight, NotOpened
from rhymeflow.runtime.joining import FirstInstances
from rhymeflow.runtime.programs import Programs
from rhymeflow.runtime.reporting import Reporter
from rhymeflow.runtime.resume import Past, ask_again, restore
from rhymeflow.runtime.rewards import Rewards
from rhymeflow.runtime.supervisor import Supervisor
from rhymeflow.runtime.training import Training
from rhymeflow.suites.suite import SuitePrompts
from rhymeflow.workers import messages

if TYPE_CHECKING:
    from rhymeflow.store.writer import SqliteTrajectoryStore

TICK_SECONDS = 0.1
"""The longest wait for news, and so the greatest age of the progress display."""

ROUND_SECONDS = 0.005
"""Length of a round, whose events are handled together: planning costs as much for one event as for
many. It is much shorter than a response takes, since the last response of a batch, its reward and
the batch each wait for the end of a round. News from the learner, and any news while an instance
pulls, ends the round."""

MAX_WORK_SHARE = 0.5
LONGEST_ROUND_SECONDS = 0.02
"""Rounds grow, up to this length, so that work takes at most `MAX_WORK_SHARE` of them."""

LAST_SECONDS = 60.0
"""Limit for the step in progress and a last checkpoint once the log cannot be written."""

GROW_SECONDS = 1.0
"""Time between checks for room for another instance."""


class Controller:
    """Carries a run from its first prompt to its last version.

    `supervisor` has started the workers, which may still be loading. `on_model` is called once the
    learner has loaded the model.
    """

    def __init__(
        self,
        config: Config,
        *,
        supervisor: Supervisor,
        store: SqliteTrajectoryStore,
        history: Histories,
        prompts: RunPrompts,
        suites: Mapping[SuiteName, SuitePrompts],
        reporter: Reporter,
        past: Past,
        checkpoints: Checkpoints,
        on_model: Callable[[messages.LoadedModel], None],
    ) -> None:
        self.config, self.supervisor, self.store = config, supervisor, store
        self.history, self.reporter, self.coordinator = history, reporter, past.coordinator
        self._on_model = on_model
        published = self.coordinator.state.published or 0
        self.training = Training(supervisor, checkpoints, store, reporter, published)
        has_agent = config.environment.agent is not None
        self.in_flight = InFlight(store, prompts, suites, has_agent=has_agent)
        self.log = EventLog(config, store, past, self.in_flight, self.training)
        self.evaluations = Evaluations(suites, self.in_flight, store)
        self.rewards = Rewards(config, supervisor, store, self.in_flight, reporter, published)
        self.environments = (Programs if has_agent else Environments)(
            config, supervisor, self.in_flight, self.rewards, reporter.throughput
        )
        self._snapshots: dict[InstanceId, events.Snapshot | None] = {}
        """The last snapshot of each instance that has joined; None: it sent none yet."""
        self._first = FirstInstances(reporter.now)
        self.stop_asked = self.end_asked = False
        """Set upon a signal: to stop after the batch in progress, or to end at once."""
        self._events: list[Event] = []  # not logged yet
        self._pulling: set[InstanceId] = set()
        self._round_began = self._room_checked_at = 0.0
        self._finished = False
        self._continue_from(past)

    def _continue_from(self, past: Past) -> None:
        """Restore what was in flight, and carry out the commands that an earlier attempt left."""
        restore(past, self.in_flight)
        self.evaluations.restore()
        self._take(ask_again(past, self.in_flight, self.environments))
        for number, command in past.unrecorded:
            self.store.record_command(number, command)
            # Others were for workers that are gone, or are requests, which `ask_again` repeats.
            if isinstance(command, commands.FinishEarly | commands.Drop | commands.Train):
                self._carry_out(command)
        if self.training.batch is None and past.training is not None:
            self.training.begin(past.training)
        if self.training.published == self.config.learner.max_steps > 0:
            self.training.save()
        if past.attempts:  # so that the next attempt replays only what comes after
            self.log.take_snapshot()
        for note in past.notes:
            self.reporter.warn(note)

    def run(self) -> None:
        """Run until the coordinator commands `Finish` or the user stops the run."""
        self.history.start()
        try:
            while not (self._finished and not self.training.checkpoints.is_pending):
                if self.end_asked:
                    raise KeyboardInterrupt
                self._receive(self._wait())
                self._events += self._joined()
                self._stop_or_save_if_asked()
                self._tick()
                self._grow()
                if not self.config.learner.is_used and (progress := self.evaluations.progress):
                    self.reporter.say(progress)
                else:
                    self.reporter.show()
            self.log.take_snapshot()
        finally:  # however the run ends, its log is complete
            self.in_flight.seal_all()
            self._record_events()
            self.store.commit()

    def save_last(self) -> None:
        """Have the learner write a last checkpoint when the log can no longer be written. If the
        log lacks its version, `resume` sets the checkpoint aside; the user still has it."""
        learner, end = self.supervisor.learner.name, time.monotonic() + LAST_SECONDS
        if self.training.weights is None or not (self.training.published or self.training.batch):
            return
        self.training.save()
        while self.training.checkpoints.is_pending and time.monotonic() < end:
            if self.end_asked:
                return
            for item in self.supervisor.wait(0.1, for_any_of=[learner]):
                if item.worker != learner:
                    continue
                if isinstance(item, WorkerLost) or isinstance(item.message, messages.Failed):
                    return
                if not isinstance(item.message, messages.Alive):
                    deque(self.training.hear(item.message), maxlen=0)  # its events are dropped

    # -- receiving ---------------------------------------------------------------------------

    def _wait(self) -> list[News]:
        """Wait for news, and then for the end of the round unless the news is urgent."""
        learner = self.supervisor.learner.name
        has_more = self.coordinator.state.has_more  # commands to give before anything else happens
        worked = self.reporter.now - self._round_began  # seconds
        news = self.supervisor.wait(0.0 if has_more else TICK_SECONDS)
        round_seconds = min(max(ROUND_SECONDS, worked / MAX_WORK_SHARE), LONGEST_ROUND_SECONDS)
        rest = self._round_began + round_seconds - self.reporter.now
        is_urgent = has_more or self._pulling or any(item.worker == learner for item in news)
        if news and not is_urgent and rest > 0:
            news += self.supervisor.wait(rest, for_any_of=[learner])
        self._round_began = self.reporter.now
        return news

    def _receive(self, news: Iterable[News]) -> None:
        for item in self.supervisor.watch(news, self.reporter.now):
            match item:
                case Received(worker=worker, message=message):
                    self._hear(worker, message)
                case WorkerLost():
                    self._lose(item)

    def _hear(self, worker: str, message: Any) -> None:
        role = self.supervisor.role(worker)
        if isinstance(message, messages.Printed):
            is_reward = role == "reward"
            of = self.supervisor.rewards if is_reward else self.supervisor.environments
            self.reporter.printed(role, message.line, of.log)
            return
        match role:
            case "learner" | "policy":
                self._from_learner(message)
            case "rollout":
                self._events += self._from_instance(worker, message)
                self._take(self.environments.due())
            case "reward":
                self._take(self.rewards.take(message))
            case "environment":
                self._take(self.environments.take(message))
            case "history":
                self.history.hear(worker, message)
                if self.training.weights is not None:
                    for instance in self.supervisor.instances.values():
                        self.history.let_draft(instance)

    def _from_instance(self, name: InstanceId, message: Any) -> Iterator[Event]:
        """Store a message's data and yield its event, unless that is of a response that is over."""
        throughput = self.reporter.throughput
        match message:
            case events.InstanceJoined():
                self.history.let_draft(self.supervisor.instances[name])
                self._first.join(message, self.reporter.now)
            case messages.TokensGenerated():
                for part in message.parts:
                    self.environments.generated(name, part)
                    if part.trajectory.group >= 0:
                        throughput.add(part)
            case events.TrajectoryFinished() | events.TurnEnded() | events.TrajectoryInterrupted():
                if message.trajectory in self.in_flight:
                    yield self.environments.stopped(message)
            case messages.CallEnded():
                if message.trajectory in self.in_flight:
                    self.environments.call_ended(message)
            case messages.Envelope(events.Pulled() as pulled, seconds):
                throughput.pull_seconds.append(seconds)
                self._pulling.discard(name)
                yield pulled
            case messages.Envelope(events.Snapshot() as snapshot, status):
                throughput.statuses[name] = status
                # An instance that waits for others has no entry; an idle one repeats its last.
                if snapshot != self._snapshots.get(name, snapshot):
                    self._snapshots[name] = snapshot
                    yield snapshot
            case _:
                raise AssertionError(f"unexpected message {message}")

    def _joined(self) -> Iterator[Event]:
        for event in self._first.joined(len(self.supervisor.instances), self.reporter.now):
            self._snapshots[event.instance] = None
            self.reporter.begin_training()
            yield event

    def _take(self, incoming: Iterable[Event | NotOpened]) -> None:
        """Pass events to the evaluations, and to the log if they are the coordinator's."""
        for event in incoming:
            is_of_suite = isinstance(event, GroupCreated) and event.group < 0
            if not is_of_suite and not isinstance(event, NotOpened):
                self._events.append(event)
            self._evaluate(self.evaluations.hear(event))

    def _evaluate(self, actions: Iterable[EvaluationAction]) -> None:
        for action in actions:
            match action:
                case Drawn():
                    self._take(self.environments.request(action))
                case EvaluationResult():
                    self.training.evaluated(action)
                    self._events.append(action.event)
                case _:
                    self._carry_out(action)

    def _instance_left(self, name: InstanceId, reason: str) -> Iterator[Event]:
        """Store the tokens of an instance that is gone; yield its events, if it had joined."""
        for trajectory, length in self.in_flight.seal_all(name):
            yield events.TrajectoryInterrupted(trajectory, name, 0, length)
        self.evaluations.leave(name)
        self.reporter.throughput.leave(name)
        self._pulling.discard(name)
        self._first.leave(name)
        if name in self._snapshots:
            del self._snapshots[name]
            yield events.InstanceLeft(name, reason)

    def _from_learner(self, message: Any) -> None:
        if isinstance(message, messages.Envelope) and isinstance(
            message.data, messages.LoadedModel
        ):
            self._on_model(message.data)
        self._events += self.training.hear(message)
        match message:
            case messages.Envelope(events.LearnerReady(), _):
                for name in self.supervisor.instances:
                    self._connect(name)
            case messages.Envelope(events.VersionPublished(version), _):
                self.rewards.published = version
                self.reporter.end_step(
                    *self.training.last_step,
                    {**self.history.metrics(), **self.coordinator.state.lengths.metrics()},
                    coordinator=self.log.coordinator_seconds,
                    store=self.store.seconds,
                )
            case messages.CheckpointEnded(error=None):
                self.log.is_snapshot_due = True

    def _lose(self, loss: WorkerLost) -> None:
        """Replace a worker that died or hangs, or end the run."""
        match role := self.supervisor.role(loss.worker):
            case "rollout":
                worker = self.supervisor.replace_instance(loss)
                self._events += self._instance_left(loss.worker, loss.reason)
                if worker is not None:
                    self._connect(worker.name)
                successor = "no instance" if worker is None else worker.name
                self.reporter.warn(
                    f"{loss.reason}; its responses continue elsewhere, {successor} replaces it"
                )
            case "reward" | "environment":
                self.supervisor.replace(loss)
                (self.rewards if role == "reward" else self.environments).ask_again()
                self.reporter.warn(f"{loss.reason}; it was replaced")
            case "history":
                self.history.lose(loss)
            case "learner" | "learner_rank" | "policy":
                another = self.supervisor.replace(loss)
                self.training.lose()
                self.reporter.warn(f"{loss.reason}; {another.name} restores its state")

    def _grow(self) -> None:
        if self.reporter.now - self._room_checked_at < GROW_SECONDS:
            return
        self._room_checked_at = self.reporter.now
        worker = self.supervisor.grow()
        if worker is not None:
            self._connect(worker.name)
            self.reporter.say(f"there is room: {worker.name} joins")

    def _connect(self, instance: InstanceId) -> None:
        """Tell an instance where the weights are, once there are any: then it joins."""
        if self.training.weights is not None:
            worker = self.supervisor.instances[instance]
            worker.send(self.training.weights)
            self.history.let_draft(worker)

    # -- acting ------------------------------------------------------------------------------

    def _tick(self) -> None:
        """Log new events and let the coordinator act on them, until there are no more."""
        has_more = self.coordinator.state.has_more
        while (self._events or has_more) and not self._finished:
            happened, self._events, has_more = self._events, [], False
            self.reporter.count_failures(happened)
            for command in self.log.act_on(happened, self.reporter.now):
                self._carry_out(command)
        self._record_events()
        self.log.end_round(self.reporter.now)

    def _record_events(self) -> None:
        """Log events without acting on them, so that no tokens are stored without their events."""
        self.log.record(self._events, self.reporter.now)
        self._events = []

    def _carry_out(self, command: commands.Command) -> None:
        match command:
            case commands.RequestPrompts():
                for _ in range(command.count):
                    self._take(self.environments.request(self.in_flight.draw()))
            case commands.RetryPrompt():
                drawn = self.in_flight.draw_again(command.group)
                self._take(self.environments.request(drawn))
            case commands.FinishEarly():
                self.environments.finished(command.trajectory, "finished_early")
            case commands.CloseEnvironments():
                self._abort(command.trajectories)
            case commands.Accumulate():
                self.log.commit(self.reporter.now)  # the learner reads the groups from the store
                self.training.accumulate(command)
            case commands.Train():
                self._train(command)
            case commands.Drop():
                self._drop(command)
            case commands.Finish():
                self._finished = True
            case _:
                self._instruct(command)

    def _instruct(self, command: commands.InstanceCommand) -> None:
        if isinstance(command, commands.Abort):
            self._abort(command.trajectories)
        worker = self.supervisor.instances.get(command.instance)
        if worker is None:
            return  # it is gone, which the coordinator is about to learn
        match command:
            case commands.Route():  # the tokens so far may be another instance's
                first, *others = self.environments.continuations(command)
                worker.send(messages.Envelope(command, first))
                for call in others:
                    worker.send(messages.AskPolicy(command.trajectory, call))
            case commands.Evaluate():
                worker.send(command)
                keeps_version = command.instance not in self._pulling
                what = command.instance, command.suite, command.version
                self._evaluate(self.evaluations.begin(*what, keeps_version=keeps_version))
            case commands.Pull():
                self._pulling.add(command.instance)
                worker.send(command)
            case _:
                worker.send(command)

    def _abort(self, trajectories: Iterable[TrajectoryId]) -> None:
        """Abort responses that are no longer needed, and close their environments."""
        self.environments.close(trajectories)
        for trajectory in trajectories:
            self.in_flight.abort(trajectory)

    def _train(self, command: commands.Train) -> None:
        if self.reporter.wants_response:
            self._show_response(command)
        for group, members in zip(command.groups, command.members, strict=True):
            self.store.put_consumed(group, version=command.version, members=members)
            self.in_flight.end(group)
        self.reporter.endings["consumed"] += len(command.groups)
        self.log.commit(self.reporter.now)
        self.training.begin(command)

    def _show_response(self, command: commands.Train) -> None:
        """Show a response of the batch, of another place in each."""
        place = command.version % len(command.groups)
        members = command.members[place]
        which = TrajectoryId(command.groups[place], members[command.version % len(members)])
        prompt = conversation(self.in_flight[which.group].whole_prompt)
        text, reward = self.store.judged(which)
        step = command.version + 1
        self.reporter.show_response(ShownResponse(str(which), step, reward, prompt, text))

    def _drop(self, command: commands.Drop) -> None:
        self.in_flight.end(command.group)
        self.store.put_ending(
            command.group, command.ending, version=self.training.published, reason=command.reason
        )
        self.reporter.dropped(command)

    def _stop_or_save_if_asked(self) -> None:
        """Between batches, stop or save if the user or the observer asked for it."""
        observer = self.reporter.observer
        if self._finished or self.training.batch is not None:
            return
        if self.stop_asked or observer.stop_asked:
            if self.training.published:
                self.reporter.say(f"stopping: saving version {self.training.published}")
                self.training.save()
            self._finished = True
        elif observer.save_asked:
            observer.save_asked = False
            self.training.save()
