"""The local body: turns what workers report into facts for the mind, and its intents into messages.

Each turn of the loop takes in everything that has arrived, stores it (events and tokens, one
transaction), and only then lets the mind act on it. Holds true: nothing is acted on that is not
stored; nothing here decides what the mind should: there is no rule about versions, buffers or
loads. Knows no torch beyond what the tokenizer brings.
"""

from __future__ import annotations

import time
from multiprocessing.connection import wait
from pathlib import Path
from typing import Any

from rhymeflow.config import Config
from rhymeflow.core.commands import Command, Draw, Drop, Evaluate, Finish, Pull, Route, Train
from rhymeflow.core.coordinator import Coordinator, Plan
from rhymeflow.core.events import (
    Evaluated,
    Event,
    GroupDrawn,
    InstanceJoined,
    LearnerReady,
    Pulled,
    RewardFailed,
    TrajectoryFinished,
    TrajectoryRewarded,
    VersionPublished,
)
from rhymeflow.core.types import GroupId, TrajectoryId
from rhymeflow.data.encode import PromptEncoder
from rhymeflow.data.load import load_prompts
from rhymeflow.data.prompts import Prompt
from rhymeflow.data.stream import PromptStream
from rhymeflow.errors import UserError
from rhymeflow.models.load import load_tokenizer
from rhymeflow.observe.metrics import MetricsWriter
from rhymeflow.observe.progress import Progress, ProgressState
from rhymeflow.reward.executor import RewardDone, RewardError, RewardExecutor
from rhymeflow.reward.messages import RewardRequest
from rhymeflow.runtime.evaluation import Evaluation
from rhymeflow.runtime.messages import (
    Abort,
    Answer,
    Answered,
    Attach,
    BatchTrained,
    CheckpointSaved,
    InstanceStatus,
    Joined,
    LearnerAlive,
    LearnerLoaded,
    LearnerUp,
    Produce,
    PullWeights,
    ResponseDone,
    SaveCheckpoint,
    SegmentDone,
    TrainBatch,
    WeightsPulled,
)
from rhymeflow.runtime.pace import Pace
from rhymeflow.runtime.process import Worker, WorkerDied
from rhymeflow.servers.parameters import ParameterServer
from rhymeflow.servers.trajectories import TrajectoryServer

TICK_SECONDS = 0.1
"""Longest wait for news; the progress display is at most this old."""


def plan(config: Config) -> Plan:
    """The part of the configuration that the mind needs."""
    return Plan(
        num_batches=config.learner.max_steps,
        groups_per_batch=config.learner.groups_per_batch,
        num_generations=config.rollout.num_generations,
        max_staleness=config.schedule.max_staleness,
        eval_steps=config.run.eval_steps if config.data.eval_size else None,
    )


class Controller:
    """Owns the mind, the servers, the rewards and the connections to the workers."""

    def __init__(
        self,
        config: Config,
        run_dir: Path,
        learner: Worker,
        instances: dict[str, Worker],
        metrics: MetricsWriter,
        progress: Progress,
    ) -> None:
        self.config, self.run_dir = config, run_dir
        self.learner, self.instances = learner, instances
        self.metrics, self.progress = metrics, progress
        self.stop_asked = False
        self.checkpoint: str | None = None
        self.mind = Coordinator(plan(config))
        self.started = time.monotonic()
        self.state = ProgressState(
            config.name, config.learner.max_steps, config.schedule.max_staleness
        )
        self._say("loading the model, the data and the reward functions")
        self.trajectories = TrajectoryServer(run_dir / "events.db")
        self.parameters: ParameterServer | None = None
        self.rewards = RewardExecutor(config.reward, run_dir / "logs" / "reward.log")
        self.pace = Pace(since=0.0)
        self._events: list[Event] = []
        self._drawn: dict[GroupId, tuple[int, Prompt, list[int]]] = {}
        self._num_drawn = 0
        self._evaluations: dict[int, Evaluation] = {}
        self._endings = {"consumed": 0, "filtered": 0, "aborted": 0}
        self._trained_tokens = 0.0
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
        self.trajectories.close()
        if self.parameters is not None:
            self.parameters.close()

    def _load(self) -> None:
        """What takes a while; the workers load meanwhile."""
        config = self.config
        self.tokenizer = load_tokenizer(config.model)
        self.encoder = PromptEncoder(self.tokenizer, config.data)
        train, self.held_out = load_prompts(config.data, config.run.seed)
        self.stream = PromptStream(train, config.run.seed, config.data.shuffle)
        self.held_out_ids = [
            self.encoder.encode(self.held_out[row]) for row in range(len(self.held_out))
        ]
        self.rewards.start()

    @property
    def now(self) -> float:
        """Seconds since the run began."""
        return time.monotonic() - self.started

    def run(self) -> None:
        """Go on until the mind says `Finish`, or the user wants to stop."""
        while not (self._finished and not self._saving):
            self._wait()
            self._take_in()
            self._tick()
            self._check_alive()
            self._show()
            if self.stop_asked and not self._finished and self.mind.training is None:
                self._stop_early()

    # -- taking in ---------------------------------------------------------------------------

    def _workers(self) -> list[Worker]:
        return [self.learner, *self.instances.values()]

    def _wait(self) -> None:
        deadline = self.rewards.next_deadline()
        patience = TICK_SECONDS if deadline is None else min(TICK_SECONDS, deadline - self.now)
        connections = [worker.connection for worker in self._workers()]
        wait([*connections, *self.rewards.connections()], timeout=max(patience, 0.0))

    def _take_in(self) -> None:
        for message in self.learner.messages(self.now):
            self._from_learner(message)
        for name, worker in self.instances.items():
            for message in worker.messages(self.now):
                self._from_instance(name, message)
        for outcome in self.rewards.poll(self.now):
            self._judged(outcome)

    def _from_learner(self, message: Any) -> None:
        match message:
            case LearnerLoaded():
                self.parameters = ParameterServer.create(message.layout)
                self.learner.send(Attach(self.parameters.handle))
            case LearnerUp():
                assert self.parameters is not None
                for worker in self.instances.values():
                    worker.send(Attach(self.parameters.handle))
                self._events.append(LearnerReady(message.version))
                self.pace.since = self.now
                self.state.first_step_at = self.now
                self._say("training")
            case BatchTrained():
                self._events.append(VersionPublished(message.version + 1))
                self._end_step(message)
            case CheckpointSaved():
                self.checkpoint = message.path
                self._saving = False
            case LearnerAlive():
                pass
            case _:
                raise AssertionError(f"unexpected message {message}")

    def _from_instance(self, name: str, message: Any) -> None:
        match message:
            case Joined():
                capacity = self.config.rollout.max_running
                self._events.append(InstanceJoined(name, message.version, capacity))
            case SegmentDone():
                self.trajectories.put_segment(
                    message.trajectory,
                    start=message.start,
                    version=message.version,
                    instance=name,
                    tokens=message.tokens,
                    logprobs=message.logprobs,
                )
            case ResponseDone():
                self._response_done(name, message)
            case WeightsPulled():
                self.pace.pull_seconds.append(message.seconds)
                self._events.append(Pulled(name, message.number, message.version))
            case Answered():
                self._answered(message)
            case InstanceStatus():
                self.pace.statuses[name] = message
            case _:
                raise AssertionError(f"unexpected message {message}")

    def _response_done(self, name: str, message: ResponseDone) -> None:
        trajectory = message.trajectory
        if trajectory.group not in self._drawn:
            return  # dropped meanwhile
        prompt = self._drawn[trajectory.group][1]
        tokens = self.trajectories.tokens(trajectory)
        text = self._text(tokens)
        self.trajectories.put_finished(
            trajectory, length=message.length, reason=message.reason, text=text
        )
        self._events.append(TrajectoryFinished(trajectory, name, message.length, message.reason))
        self.rewards.submit(trajectory, RewardRequest(prompt.prompt, text, tokens, prompt.columns))

    def _answered(self, message: Answered) -> None:
        prompt = self.held_out[message.row]
        text = self._text(message.tokens)
        evaluation = self._evaluations[message.asked]
        evaluation.version = message.version
        evaluation.texts[message.row] = text
        self.rewards.submit(
            ("held out", message.asked, message.row),
            RewardRequest(prompt.prompt, text, message.tokens, prompt.columns),
        )

    def _text(self, tokens: list[int]) -> str:
        return self.tokenizer.decode(tokens, skip_special_tokens=True)

    def _judged(self, outcome: RewardDone | RewardError) -> None:
        if isinstance(outcome, RewardError) and (
            self.config.reward.on_failure == "stop" or not isinstance(outcome.key, TrajectoryId)
        ):
            raise UserError(outcome.message)
        if not isinstance(outcome.key, TrajectoryId):
            self._judged_held_out(outcome)
        elif outcome.key.group not in self._drawn:
            return  # dropped meanwhile
        elif isinstance(outcome, RewardError):
            self._events.append(RewardFailed(outcome.key, outcome.message))
        else:
            self.trajectories.put_reward(
                outcome.key, reward=outcome.reward, components=outcome.components
            )
            self._events.append(TrajectoryRewarded(outcome.key, outcome.reward))

    def _judged_held_out(self, outcome: RewardDone) -> None:
        _, asked, row = outcome.key
        evaluation = self._evaluations[asked]
        version = evaluation.version
        assert version is not None
        evaluation.rewards[row] = outcome.reward
        self.trajectories.put_evaluation(
            version, row, text=evaluation.texts[row], reward=outcome.reward
        )
        if evaluation.is_complete:
            del self._evaluations[asked]
            self._events.append(Evaluated(evaluation.instance, asked, evaluation.reward))
            self.state.eval_rewards.append(evaluation.reward)
            self.metrics.write(version, self.now, {"eval/reward": evaluation.reward})

    # -- acting ------------------------------------------------------------------------------

    def _tick(self) -> None:
        """Store what has happened, let the mind act on it, and again with what that caused."""
        while True:
            events, self._events = self._events, []
            now = self.now
            if events:
                self.trajectories.record(now, events)
            is_boundary = any(isinstance(e, VersionPublished | LearnerReady) for e in events)
            self.trajectories.commit(durable=is_boundary)
            if not events or self._finished:
                return
            for event in events:
                for command in self.mind.handle(event, now):
                    self._carry_out(command)

    def _carry_out(self, command: Command) -> None:
        match command:
            case Draw():
                for _ in range(command.count):
                    self._draw()
            case Route():
                self._route(command)
            case Pull():
                worker = self.instances[command.instance]
                worker.send(PullWeights(command.number, command.version))
            case Evaluate():
                self._evaluate(command)
            case Train():
                self._train(command)
            case Drop():
                self._drop(command)
            case Finish():
                self._finished = True

    def _draw(self) -> None:
        group = self._num_drawn
        self._num_drawn += 1
        epoch, prompt = self.stream.at(group)
        ids = self.encoder.encode(prompt)
        self._drawn[group] = (epoch, prompt, ids)
        self.trajectories.put_group(
            group,
            row=prompt.row,
            epoch=epoch,
            prompt=prompt.prompt,
            prompt_tokens=ids,
            columns=prompt.columns,
        )
        self._events.append(GroupDrawn(group, prompt.row, epoch, len(ids)))

    def _route(self, command: Route) -> None:
        epoch, prompt, ids = self._drawn[command.trajectory.group]
        self.instances[command.instance].send(
            Produce(command.number, command.trajectory, prompt.row, epoch, ids)
        )

    def _evaluate(self, command: Evaluate) -> None:
        self._evaluations[command.version] = Evaluation(
            command.instance, command.version, len(self.held_out_ids)
        )
        self.instances[command.instance].send(
            Answer(command.number, command.version, self.held_out_ids)
        )

    def _train(self, command: Train) -> None:
        for group in command.groups:
            self.trajectories.put_ending(group, "consumed", version=command.version)
            del self._drawn[group]
        self._endings["consumed"] += len(command.groups)
        # The learner reads the batch from the store, where it must be when it is told.
        self.trajectories.commit()
        made, every = command.version + 1, self.config.run.save_steps
        is_last = made == self.config.learner.max_steps
        save = is_last or (every > 0 and made % every == 0)
        self._saving = self._saving or save
        self.learner.send(TrainBatch(command.version, list(command.groups), save))

    def _drop(self, command: Drop) -> None:
        assert self.mind.published is not None
        self.trajectories.put_ending(
            command.group, "aborted", version=self.mind.published, reason=command.reason
        )
        del self._drawn[command.group]
        self._endings["aborted"] += 1
        self._say(f"group {command.group} dropped: {command.reason}")
        for worker in self.instances.values():
            worker.send(Abort(command.group))

    def _stop_early(self) -> None:
        """Ctrl-C: the step is over; keep the version that was reached."""
        if self.mind.published:
            self._say(f"stopping: saving version {self.mind.published}")
            self._saving = True
            self.learner.send(SaveCheckpoint())
        self._finished = True

    # -- watching ----------------------------------------------------------------------------

    def _check_alive(self) -> None:
        limit = self.config.run.worker_timeout
        for worker in self._workers():
            if worker.last_heard is not None and self.now - worker.last_heard > limit:
                raise WorkerDied(
                    f"{worker.name} has been silent for {limit:g} seconds "
                    f"(run.worker_timeout, process {worker.pid}): it hangs"
                )

    def _end_step(self, message: BatchTrained) -> None:
        now = self.now
        busy = message.train_seconds + message.push_seconds
        metrics = {
            **message.metrics,
            **self.pace.end_step(now, learner_seconds=busy),
            "params/push_s": message.push_seconds,
            **{f"endings/{name}": float(count) for name, count in self._endings.items()},
        }
        self.metrics.write(message.version + 1, now, metrics)
        state = self.state
        state.step = message.version + 1
        state.rewards.append(metrics["reward"])
        tokens = metrics["num_tokens"]
        state.trained_tokens_per_s = (tokens - self._trained_tokens) / metrics["step_time"]
        self._trained_tokens = tokens
        state.staleness_mean = metrics["staleness/mean"]
        state.staleness_max = int(metrics["staleness/max"])
        state.rollout_tokens_per_s = metrics["rollout/tokens_per_s"]
        state.idle_rollout = metrics["idle/rollout"]
        state.idle_learner = metrics["idle/learner"]

    def _say(self, message: str) -> None:
        self.state.message = message
        self._show()

    def _show(self) -> None:
        self.state.elapsed = self.now
        if self.state.step or self.state.first_step_at is not None:
            self.state.running, self.state.waiting = self.pace.running, self.pace.waiting
        self.progress.update(self.state)
