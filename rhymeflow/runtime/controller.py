"""The controller: turns what workers report into events, and the commands upon them into messages.

Each turn of the loop receives everything that has arrived, appends it to the log (events and
tokens), and only then lets the coordinator act on it. A `Tick` ends each round of events.
Transactions span some turns: a controller that is killed takes the end of its log with it, but
never a part from the middle, and its workers end with it, so nothing goes on that had been caused
by what is lost. What others read (a batch, a version) is committed before they are told. Nothing
here decides what the coordinator should: there is no rule about versions, buffers or loads. Knows
no torch beyond what the tokenizer brings.
"""

from __future__ import annotations

import time
from functools import partial
from multiprocessing.connection import wait
from pathlib import Path
from typing import Any

from rhymeflow import build
from rhymeflow.config import Config
from rhymeflow.core import commands
from rhymeflow.core.coordinator import Coordinator
from rhymeflow.core.events import Event, LearnerReady, Tick, VersionPublished
from rhymeflow.core.types import InstanceId, Version
from rhymeflow.data.encode import PromptEncoder
from rhymeflow.data.load import load_prompts
from rhymeflow.data.stream import PromptStream
from rhymeflow.models.load import load_tokenizer
from rhymeflow.reward.executor import RewardExecutor
from rhymeflow.runtime.commands import message_for
from rhymeflow.runtime.evaluation import Evaluations
from rhymeflow.runtime.history_index import HistoryIndex
from rhymeflow.runtime.in_flight import InFlight
from rhymeflow.runtime.instances import Instances
from rhymeflow.runtime.process import Worker, WorkerLost
from rhymeflow.runtime.reporting import Reporter
from rhymeflow.runtime.rewards import RewardDispatcher
from rhymeflow.runtime.workers import Workers
from rhymeflow.store.writer import SqliteTrajectoryStore
from rhymeflow.weights.shared_memory import SharedMemoryWeightStore
from rhymeflow.workers import messages

TICK_SECONDS = 0.1
"""Longest wait for news; the progress display is at most this old."""

ROUND_SECONDS = 0.02
"""Events of this time make a round: what the coordinator plans costs as much for one as for many.
Long against an event's cost, short against a response. The learner's news is acted on at once, and
nobody waits while an instance pulls: it may have nothing to do until the coordinator has heard of
it."""

COMMIT_SECONDS = 1.0
"""How often the log is committed between versions. Every commit writes the pages it touched whole,
so few large ones cost less than many small ones."""


class Controller:
    """Owns the coordinator, the stores and the rewards; talks to the workers."""

    def __init__(self, config: Config, run_dir: Path, workers: Workers, report: Reporter) -> None:
        self.config, self.workers, self.report = config, workers, report
        self.stop_asked = False
        self.checkpoint: str | None = None
        self.coordinator = Coordinator(build.plan(config), build.schedule(config))
        report.say("loading the model, the data and the reward functions")
        self.store = SqliteTrajectoryStore(run_dir / "events.db")
        self.rewards = RewardExecutor(config.reward, run_dir / "logs" / "reward.log")
        self.history = HistoryIndex(config.drafting, workers, report.warn)
        self.weight_store: SharedMemoryWeightStore | None = None
        self._connect_weights: messages.ConnectWeights | None = (
            None  # once there is a version to pull
        )
        self._published: Version = 0
        self._training = False
        self._events: list[Event] = []
        self._pulling: set[InstanceId] = set()
        self._coordinator_seconds = 0.0
        self._round_began = self._committed_at = 0.0
        self._saving = False
        self._finished = False

    def __enter__(self) -> Controller:
        try:
            self._load()
        except BaseException:
            self.__exit__()
            raise
        return self

    def __exit__(self, *_: object) -> None:
        self.rewards.close()
        self.store.close()
        self.history.close()
        if self.weight_store is not None:
            self.weight_store.close()

    def _load(self) -> None:
        """What takes a while; the workers load meanwhile."""
        config = self.config
        self.history.start()
        tokenizer = load_tokenizer(config.model)
        encoder = PromptEncoder(tokenizer, config.data)
        train, held_out = load_prompts(config.data, config.run.seed)
        stream = PromptStream(train, config.run.seed, config.data.shuffle)
        held_out_ids = [encoder.encode(held_out[row]) for row in range(len(held_out))]
        for row, ids in enumerate(held_out_ids):
            self.store.put_held_out(row, prompt=held_out[row].prompt, prompt_tokens=ids)
        self.in_flight = InFlight(self.store, train, stream, encoder)
        self.evaluations = Evaluations(held_out, held_out_ids)

        self.dispatcher = RewardDispatcher(
            self.rewards,
            self.store,
            self.in_flight,
            self.evaluations,
            text_of=partial(tokenizer.decode, skip_special_tokens=True),
            on_failure=config.reward.on_failure,
            evaluated=self.report.evaluated,
        )
        self.instances = Instances(
            config.rollout,
            self.in_flight,
            self.evaluations,
            self.dispatcher,
            self.report.throughput,
        )
        self.rewards.start()

    def run(self) -> None:
        """Go on until the coordinator says `Finish`, or the user wants to stop."""
        try:
            while not (self._finished and not self._saving):
                self._wait()
                self._receive()
                self._tick()
                self.report.show()
                if self.stop_asked and not self._finished and not self._training:
                    self._stop_early()
        finally:  # whatever ends it, the log says how far it came
            self.in_flight.seal_all()
            self.store.record(self.report.now, self._events)
            self.store.commit()

    # -- receiving ---------------------------------------------------------------------------

    def _wait(self) -> None:
        """Wait for news, and then a little, for more to come with it."""
        deadline = self.rewards.next_deadline()
        patience = TICK_SECONDS
        if deadline is not None:
            patience = min(patience, deadline - self.report.now)
        learner = self.workers.learner.connection
        connections = [worker.connection for worker in self.workers.all()]
        news = wait([*connections, *self.rewards.connections()], timeout=max(patience, 0.0))
        rest = self._round_began + ROUND_SECONDS - self.report.now
        if news and learner not in news and not self._pulling and rest > 0:
            wait([learner], timeout=rest)
        self._round_began = self.report.now

    def _receive(self) -> None:
        now, limit = self.report.now, self.config.run.worker_timeout
        for message in self.workers.learner.messages(now):
            self._from_learner(message)
        self.workers.learner.check(now, limit)
        for name, worker in tuple(self.workers.instances.items()):
            try:
                for message in worker.messages(now):
                    self._events += self.instances.events(name, message)
                    if isinstance(message, messages.Pulled):
                        self._pulling.discard(name)
                worker.check(now, limit)
            except WorkerLost as loss:
                self._lose(name, loss)
        was_ready = self.history.is_ready
        self.history.receive(now, limit)
        if self.history.is_ready and not was_ready and self._connect_weights is not None:
            for worker in self.workers.instances.values():
                self._let_draft(worker)
        self._events += self.dispatcher.poll(self.report.now)

    def _from_learner(self, message: Any) -> None:
        match message:
            case messages.LearnerLoaded():
                self.weight_store = SharedMemoryWeightStore.create(message.manifest)
                self.workers.learner.send(messages.ConnectWeights(self.weight_store.handle))
            case messages.LearnerUp():
                assert self.weight_store is not None
                self._connect_weights = messages.ConnectWeights(self.weight_store.handle)
                for worker in self.workers.instances.values():
                    worker.send(self._connect_weights)
                    self._let_draft(worker)
                self._events.append(LearnerReady(message.version))
                self.report.begin_training()
            case messages.BatchTrained():
                self._training, self._published = False, message.version + 1
                self._events.append(VersionPublished(self._published))
                self.report.end_step(
                    message,
                    {
                        **self.history.metrics(),
                        **self.coordinator.books.history.calibration().metrics(),
                    },
                    coordinator=self._coordinator_seconds,
                    store=self.store.seconds,
                )
            case messages.CheckpointSaved():
                self.checkpoint = message.path
                self._saving = False
            case messages.LearnerAlive():
                pass
            case _:
                raise AssertionError(f"unexpected message {message}")

    def _lose(self, name: InstanceId, loss: WorkerLost) -> None:
        """An instance died or hangs: go on without it, and start another."""
        worker = self.workers.replace(name, loss)
        self._events += self.instances.leave(name, str(loss))
        self._pulling.discard(name)
        if self._connect_weights is not None:
            worker.send(self._connect_weights)
            self._let_draft(worker)
        self.report.warn(f"{loss}; its responses go on elsewhere, {worker.name} takes its place")

    def _let_draft(self, worker: Worker) -> None:
        """Once history is ready: an instance that is attached before is told when it is."""
        if self.history.is_ready:
            assert self.history.handle is not None
            worker.send(messages.UseDrafter(self.history.handle))

    # -- acting ------------------------------------------------------------------------------

    def _tick(self) -> None:
        """Log what has happened, let the coordinator act on it, and again with what that caused."""
        while self._events and not self._finished:
            events, self._events = [*self._events, Tick()], []
            now = self.report.now
            self.store.record(now, events)
            if any(isinstance(e, VersionPublished | LearnerReady) for e in events):
                self._commit(now, durable=True)
            for event in events:
                for command in self._handle(event, now):
                    self._carry_out(command)
        if self.report.now - self._committed_at >= COMMIT_SECONDS:
            self._commit(self.report.now)

    def _commit(self, now: float, *, durable: bool = False) -> None:
        self._committed_at = now
        self.store.commit(durable=durable)

    def _handle(self, event: Event, now: float) -> list[commands.Command]:
        started = time.perf_counter()
        planned = self.coordinator.handle(event, now)
        self._coordinator_seconds += time.perf_counter() - started
        return planned

    def _carry_out(self, command: commands.Command) -> None:
        match command:
            case commands.Draw():
                self._events += [self.in_flight.request() for _ in range(command.count)]
            case commands.Redraw():
                self._events.append(self.in_flight.request_again(command.group))
            case commands.Conclude():
                self.dispatcher.finished(command.trajectory, "cut")
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
            for trajectory in command.trajectories:
                self.in_flight.abort(trajectory)
        elif isinstance(command, commands.Evaluate):
            self.evaluations.begin(command.instance, command.version)
        worker = self.workers.instances.get(command.instance)
        if worker is not None:  # else it is gone, and the coordinator is about to learn of it
            if isinstance(command, commands.Pull):
                self._pulling.add(command.instance)
            worker.send(message_for(command, self.in_flight, self.evaluations))

    def _train(self, command: commands.Train) -> None:
        for group, members in zip(command.groups, command.members, strict=True):
            self.store.put_consumed(group, version=command.version, members=members)
            self.in_flight.end(group)
        self.report.endings["consumed"] += len(command.groups)
        # The learner reads the batch from the store, where it must be when it is told.
        self._commit(self.report.now)
        reached, every = command.version + 1, self.config.run.save_steps
        is_last = reached == self.config.learner.max_steps
        save = is_last or (every > 0 and reached % every == 0)
        self._saving, self._training = self._saving or save, True
        self.workers.learner.send(
            messages.TrainBatch(command.version, command.groups, command.members, save)
        )

    def _drop(self, command: commands.Drop) -> None:
        self.in_flight.end(command.group)
        self.store.put_ending(
            command.group, command.ending, version=self._published, reason=command.reason
        )
        self.report.endings[command.ending] += 1
        self.report.say(f"group {command.group} {command.ending}: {command.reason}")

    def _stop_early(self) -> None:
        """Ctrl-C: the step is over; keep the version that was reached."""
        if self._published:
            self.report.say(f"stopping: saving version {self._published}")
            self._saving = True
            self.workers.learner.send(messages.SaveCheckpoint())
        self._finished = True
