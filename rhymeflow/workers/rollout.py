"""The rollout worker: an instance whose engine carries out numbered commands in order.

While new weights are fetched the engine continues, and later commands wait. A response's tokens are
sent before its events; an instance's version never falls; the checksum of pulled weights is
verified before a token is generated under them (law 5).
"""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Callable, Collection, Hashable, Iterable
from contextlib import suppress
from dataclasses import dataclass
from functools import cached_property, partial
from pathlib import Path
from typing import Any, Literal

from rhymeflow.config import Config
from rhymeflow.core import events
from rhymeflow.core.commands import Abort, Evaluate, Interrupt, Pull, Route
from rhymeflow.core.types import TrajectoryId
from rhymeflow.data.text import StopTexts
from rhymeflow.engine.base import Finished, NoiseKey, Request, RolloutEngine, Sampling
from rhymeflow.histospec.draft import DraftStats
from rhymeflow.histospec.drafter import drafter_of, rehearse
from rhymeflow.histospec.noise_sharing import epoch_of_noise
from rhymeflow.suites.suite import RUN, of_run
from rhymeflow.utils import progress
from rhymeflow.utils.gpu_turn import GpuTurn
from rhymeflow.utils.objects import OwnerLost
from rhymeflow.weights.base import WeightReader
from rhymeflow.weights.proof import as_text
from rhymeflow.workers import messages
from rhymeflow.workers.channel import Channel
from rhymeflow.workers.messages import Envelope, receive, send

STATUS_SECONDS = 0.25
"""Time between two reports of state and new tokens, and so the most work that is lost with an
instance. It is short compared with a step, long compared with an iteration of the engine."""

POLL_SECONDS = 0.01
"""How long an engine that computes in another process may delay a command."""


@dataclass(slots=True)
class HeldResponse:
    """A response in the engine, or an agent's call, and how much of it the controller has been
    sent."""

    request: Request
    trajectory: TrajectoryId
    turn: int  # of the policy, from 1
    num_sent: int  # tokens
    branch: int | None = None  # of an agent's call; see `Continuation`
    steps: int = 0  # in which these were generated
    drafted: int = 0  # in these steps


def prepare(config: Config) -> None:
    """Load or compile the code of the configured engine."""
    if config.rollout.engine == "vllm":
        from rhymeflow.engine.vllm.arguments import import_vllm

        import_vllm()
        if config.drafting.window != "off":
            rehearse(config)  # the history worker compiles for another Python
        return
    from rhymeflow.engine.native.native_engine import load_kernels

    load_kernels(config)


def make_engine(config: Config, weights: WeightReader, name: str) -> RolloutEngine:
    """Make the engine of instance `name`, which begins with the newest weights."""
    drafts = partial(drafter_of, config, stats=DraftStats())  # one total of all its drafters
    if config.rollout.engine == "vllm":
        from rhymeflow.engine.vllm.vllm_engine import VllmEngine

        return VllmEngine(config, weights, instance=name, drafter_for=drafts)
    from rhymeflow.engine.native.native_engine import NativeEngine

    return NativeEngine(config, weights, instance=name, drafter_for=drafts)


def main(connection: Channel, name: str, config: Config, run_dir: Path) -> None:
    """Join the run and serve it until `Shutdown`."""
    from rhymeflow.models.precision import resolve_device

    shape = config.draft_shape(str(resolve_device(config.model)))
    config = config.changed(drafting={"shape": shape})
    prepare(config)  # while the learner loads
    turn = GpuTurn(run_dir, is_learner=False) if config.rollout.vllm_sleeps else None
    instance = RolloutInstance(connection, name, config, make_engine, turn)
    try:
        instance.serve()
    finally:
        instance.engine.close()


class RolloutInstance:
    """The engine, the weights that it pulls and the connection; `engine` makes the engine. With a
    `turn` it sleeps, if it has no work, while the learner wants the GPU."""

    def __init__(
        self,
        connection: Channel,
        name: str,
        config: Config,
        engine: Callable[[Config, WeightReader, str], RolloutEngine],
        turn: GpuTurn | None = None,
    ) -> None:
        self.connection, self.name, self.config = connection, name, config
        self._later: deque[object] = deque()
        """Messages that arrived while there was no learner; they are handled once there is one."""
        self._turn, self._sleeps = turn, False
        self.weights, self.engine = self._begin(lambda weights: engine(config, weights, name))
        limits = self.engine.limits()
        self.stop_tokens = limits.stop_token_ids
        self._held: dict[Hashable, HeldResponse] = {}
        """By the requests' ids: responses, and agents' calls with their branches."""
        self._configs = {RUN: config} | {suite.name: suite.config for suite in of_run(config)}
        self.last_number = 0
        self.busy_seconds = 0.0
        self._scale = config.emulation.scale
        self._last_status = 0.0
        self._pulling: Pull | None = None
        """The pull that is being fetched; later commands wait."""
        self._is_cut_off = False
        """Whether the pull waits for another learner because the one before is gone."""
        self._ending = False
        joined = events.InstanceJoined(
            name,
            self.engine.version,
            limits.max_num_seqs,
            limits.kv_capacity,
            as_text(self.engine.checksum),
        )
        send(connection, joined)

    def open_weights(self, message: messages.ConnectWeights) -> WeightReader:
        """Open the memory to which the learner publishes."""
        return message.handle.open()

    def _begin(
        self, engine: Callable[[WeightReader], RolloutEngine]
    ) -> tuple[WeightReader, RolloutEngine]:
        """Make the engine; try again with the next learner if one is lost meanwhile."""
        while True:
            weights = self._connect()
            if self._turn is not None:
                self._turn.take()
            with suppress(OwnerLost):
                return weights, engine(weights)

    def _connect(self) -> WeightReader:
        """Wait for the weights of a learner that can be reached."""
        while True:
            match receive(self.connection):
                case messages.ConnectWeights() as connect:
                    with suppress(FileNotFoundError):  # lost meanwhile; wait for the next
                        return self.open_weights(connect)
                case messages.Shutdown():
                    raise EOFError("the run has ended")
                case message:  # it belongs to lost weights
                    self._later.append(message)

    def serve(self) -> None:
        """Carry out commands and generate, until `Shutdown`."""
        progress.has_started = True
        while not self._ending:
            self.turn()
            progress.advance()

    def turn(self) -> None:
        """Carry out what has arrived, run an iteration if there is work, and report."""
        if self._pulling is not None and not self._is_cut_off:
            self._pull(self._pulling)
        self._listen()
        if self.engine.has_work:
            started = time.perf_counter()
            self._report(self.engine.poll(POLL_SECONDS))
            self.busy_seconds += (time.perf_counter() - started) * self._scale
        self._report_status()
        self._sleep_if_wanted()

    def _sleep_if_wanted(self) -> None:
        if self._turn is None or self._sleeps or self.engine.has_work or self._pulling:
            return
        if self._turn.is_wanted:
            engine: Any = self.engine  # vLLM's: no other sleeps
            engine.sleep()
            self._turn.give()
            self._sleeps = True

    def _wake(self) -> None:
        if self._turn is not None and self._sleeps:
            self._turn.take()
            engine: Any = self.engine
            engine.wake()
            self._sleeps = False

    def _listen(self) -> None:
        """Carry out messages that have arrived; without work, wait a little for one."""
        wait = 0.0 if self.engine.has_work else STATUS_SECONDS
        while (message := self._next(wait)) is not None:
            self._carry_out(message)
            if self._ending:
                return
            wait = 0.0

    def _next(self, wait: float) -> object | None:
        """Return the next message; None: there is none, or a pull must end first. While a pull
        waits for another learner, only `ConnectWeights` and `Shutdown` are returned."""
        if self._pulling is not None and not self._is_cut_off:
            return None
        if self._later and not self._is_cut_off:
            return self._later.popleft()
        while self.connection.poll(wait):
            message: object = receive(self.connection)
            if not self._is_cut_off or isinstance(
                message, messages.ConnectWeights | messages.Shutdown
            ):
                return message
            self._later.append(message)
        return None

    def _carry_out(self, message: object) -> None:
        command = message.what if isinstance(message, Envelope) else message
        if isinstance(command, Route | Interrupt | Abort | Pull | Evaluate):
            self.last_number = max(command.number, self.last_number)  # 0 for suites' responses
        match message:
            case Envelope(Route(trajectory=trajectory), data):
                self._route(trajectory, data)
            case Interrupt():
                self._interrupt(message)
            case Abort():
                self._forget(self.engine.interrupt(self._requests(message.trajectories)))
            case messages.AskPolicy() | messages.DropCall():
                self._change_calls(message)
            case Pull():
                self._pull(message)
            case Evaluate():
                pass  # each answer is routed
            case messages.ConnectWeights():  # another learner took the place of a lost one
                with suppress(FileNotFoundError):  # lost too; wait for the next
                    self.weights = self.open_weights(message)
                    self._is_cut_off = False
            case messages.UseDrafter():
                with suppress(FileNotFoundError):  # its worker is gone; wait for the next
                    self.engine.draft_from(message.index)
            case messages.Shutdown():
                self._ending = True
            case _:
                raise AssertionError(f"unexpected message {message}")

    def _route(self, trajectory: TrajectoryId, message: messages.Continuation) -> None:
        if not message.prompt_ids:  # an agent's program, which is started now, calls first
            send(self.connection, events.TurnEnded(trajectory, self.name, message.turn, 0))
            return
        tokens = message.tokens
        epoch = epoch_of_noise(self.config, message.epoch, trajectory.member)
        sample = trajectory.member if message.noise is None else message.noise
        noise = NoiseKey(message.row, epoch, sample)
        config = self._configs[message.suite]
        rollout, most = config.rollout, config.rollout.max_completion_length
        if message.until.max_tokens is not None:
            most = min(most, message.turn_start + message.until.max_tokens)
        sampling = Sampling(
            temperature=rollout.temperature,
            top_p=rollout.top_p,
            top_k=rollout.top_k,
            max_new_tokens=most,
            stop_token_ids=self.stop_tokens | message.until.tokens,
        )
        accepted = bytearray() if self.config.run.token_details else None
        has_agent = config.environment.agent is not None
        id = (trajectory, message.branch) if has_agent else trajectory
        request = Request(id, message.prompt_ids, noise, sampling, tokens, accepted=accepted)
        request.turn_start, request.keeps_cache = message.turn_start, config.environment.is_used
        request.row_prompt = message.row_prompt
        if stops := (*rollout.stop, *message.until.texts):
            request.stop_texts = StopTexts(self._tokenizer.decode, stops)
            request.kept(tokens[message.turn_start :])
        request.is_urgent = message.suite != RUN  # evaluations come first
        branch = message.branch if has_agent else None
        held = HeldResponse(request, trajectory, message.turn, len(tokens), branch)
        if reason := request.finish_reason():
            # The response is complete: an earlier instance died after it had sent the last token.
            self._send_ended(held, reason)
            return
        self._held[request.id] = held
        self._wake()
        self.engine.submit(request)

    @cached_property
    def _tokenizer(self) -> Any:
        from rhymeflow.models.tokenizer import load_tokenizer  # few runs need it here

        return load_tokenizer(self.config.model)

    def _requests(self, trajectories: Collection[TrajectoryId]) -> list[Hashable]:
        """Return the ids of these responses' requests: of an agent's, one for each call."""
        if self.config.environment.agent is None:
            return [*trajectories]
        return [id for id, held in self._held.items() if held.trajectory in trajectories]

    def _interrupt(self, message: Interrupt) -> None:
        stopped = self.engine.interrupt(self._requests(message.trajectories))
        self._hand_over(stopped)
        lengths = {self._held[each.id].trajectory: len(each.tokens) for each in stopped}
        self._forget(stopped)
        for trajectory, length in lengths.items():
            done = events.TrajectoryInterrupted(trajectory, self.name, message.number, length)
            send(self.connection, done)

    def _change_calls(self, message: messages.AskPolicy | messages.DropCall) -> None:
        """Answer another call of an agent's response, or stop the answer to one."""
        trajectory = message.trajectory
        if isinstance(message, messages.AskPolicy):
            if self._requests([trajectory]):
                self._route(trajectory, message.call)
            return
        for request in self.engine.interrupt([(trajectory, message.branch)]):
            held = self._held.pop(request.id)
            self._end_turn(held, len(request.tokens))

    def _forget(self, requests: Iterable[Request]) -> None:
        for request in requests:
            del self._held[request.id]

    def _pull(self, message: Pull) -> None:
        """Fetch new weights and install them; while there is work, only once they are fetched."""
        if message.version <= self.engine.version:
            # An earlier pull got newer weights, on which the coordinator counts (law 1).
            self._send_pulled(message, 0.0)
            return
        self._pulling = message
        self._wake()
        with suppress(OwnerLost):
            is_ready = self.engine.prepare(self.weights, message.version)
            if is_ready or not self.engine.has_work:
                self._install(message)
            return
        self._is_cut_off = True

    def _install(self, message: Pull) -> None:
        started = time.perf_counter()
        self._hand_over_all()  # tokens so far are the old version's
        keep = self.config.rollout.kv_cache_on_pull == "keep"
        self.engine.install(self.weights, message.version, keep_cache=keep)
        self._pulling = None
        seconds = (time.perf_counter() - started) * self._scale
        self.busy_seconds += seconds
        self._send_pulled(message, seconds)

    def _send_pulled(self, message: Pull, seconds: float) -> None:
        version, checksum = self.engine.version, as_text(self.engine.checksum)
        pulled = events.Pulled(self.name, message.number, version, checksum)
        send(self.connection, Envelope(pulled, seconds))

    def _report(self, finished: list[Finished]) -> None:
        self._hand_over(request for request, _ in finished)
        for request, reason in finished:
            self._send_ended(self._held.pop(request.id), reason)

    def _send_ended(self, held: HeldResponse, reason: Literal["stop", "length"]) -> None:
        """Report that a response is complete, or that the policy's turn has ended. An agent goes on
        after a turn that was cut."""
        key, length = held.trajectory, len(held.request.tokens)
        if held.branch is not None:
            send(self.connection, messages.CallEnded(key, held.branch, reason))
        if held.request.keeps_cache and (reason == "stop" or held.branch is not None):
            self._end_turn(held, length)
        else:
            send(self.connection, events.TrajectoryFinished(key, self.name, length, reason))

    def _end_turn(self, held: HeldResponse, length: int) -> None:
        """Report that the policy's turn has ended; an agent's has not while it answers a call. Of
        an agent, the controller knows the length."""
        if held.branch is None or not self._requests([held.trajectory]):
            ended = events.TurnEnded(held.trajectory, self.name, held.turn, length)
            send(self.connection, ended)

    def _hand_over(self, requests: Iterable[Request]) -> None:
        """Send the tokens of these responses that were not sent yet."""
        parts = []
        for request in requests:
            held, end = self._held[request.id], len(request.tokens)
            start = held.num_sent
            if start < end:
                part = messages.Part(
                    held.trajectory,
                    start if held.branch is None else start - request.turn_start,
                    self.engine.version,
                    request.steps - held.steps,
                    request.drafted - held.drafted,
                    request.tokens[start:],
                    request.logprobs[start - end :],
                    b"" if request.accepted is None else bytes(request.accepted[start - end :]),
                    held.branch or 0,
                )
                parts.append(part)
                held.num_sent, held.steps, held.drafted = end, request.steps, request.drafted
        if parts:
            send(self.connection, messages.TokensGenerated(parts))

    def _hand_over_all(self) -> None:
        self._hand_over([held.request for held in self._held.values()])

    def _report_status(self) -> None:
        now = time.perf_counter()
        if now - self._last_status < STATUS_SECONDS:
            return
        self._last_status = now
        self._hand_over_all()
        load = self.engine.load()
        carried_out = self.last_number if self._pulling is None else self._pulling.number - 1
        waiting = self._waiting(load.waiting)
        snapshot = events.Snapshot(
            self.name, carried_out, waiting, load.kv_tokens, load.clock, load.prefill_seconds
        )
        status = messages.Status(
            load.num_running,
            len(waiting),
            load.num_generated,
            self.busy_seconds,
            load.drafts,
            load.behind_seconds,
        )
        send(self.connection, Envelope(snapshot, status))

    def _waiting(self, ids: Collection[Hashable]) -> tuple[TrajectoryId, ...]:
        """Return the responses to train on of which nothing is decoded, but these requests wait."""
        waiting = dict.fromkeys(self._held[id].trajectory for id in ids)
        if self.config.environment.agent is not None:
            waits = {*ids}
            decoded = {held.trajectory for id, held in self._held.items() if id not in waits}
            waiting = dict.fromkeys(each for each in waiting if each not in decoded)
        return tuple(trajectory for trajectory in waiting if trajectory.group >= 0)
