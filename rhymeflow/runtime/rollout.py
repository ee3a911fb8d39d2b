"""A rollout instance: an engine in a process of its own, carrying out numbered commands.

Holds true: commands are carried out in order, one delivered twice once; between two iterations of
the engine nothing is half done; after a pull the checksum of the weights is proved before a token
is made under them (law 5). Knows nothing of batches, staleness or rewards.
"""

from __future__ import annotations

import time
from collections.abc import Iterable
from dataclasses import dataclass
from multiprocessing.connection import Connection

from rhymeflow.config import Config
from rhymeflow.core.types import TrajectoryId, Version
from rhymeflow.engine.engine import Engine
from rhymeflow.engine.noise import NoiseKey
from rhymeflow.engine.sequence import Finished, Request, Sampling
from rhymeflow.models.load import (
    empty_model,
    load_tokenizer,
    resolve_device,
    resolve_dtype,
    stop_token_ids,
)
from rhymeflow.runtime.messages import (
    Abort,
    Answer,
    Answered,
    Attach,
    InstanceStatus,
    Joined,
    Produce,
    PullWeights,
    ResponseDone,
    SegmentDone,
    Shutdown,
    WeightsPulled,
    receive,
    send,
)
from rhymeflow.servers.parameters import ParameterReader, Pulled, VersionUnavailable

STATUS_SECONDS = 0.25
"""How often the instance says how it is; short against a step, long against an iteration."""

EVALUATION_EPOCH = 2**31 - 1
"""Noise of held-out answers is keyed by an epoch that training never reaches."""


@dataclass(frozen=True, slots=True)
class HeldOut:
    """Names the answer to a held-out prompt: the version it was asked for, and its row."""

    asked: Version
    row: int


def main(connection: Connection, name: str, config: Config, run_dir: str) -> None:
    """Join the run and serve it until told to end."""
    Instance(connection, name, config).serve()


class Instance:
    """The engine, its weights and its connection."""

    def __init__(self, connection: Connection, name: str, config: Config) -> None:
        self.connection, self.name, self.config = connection, name, config
        device = resolve_device(config.model)
        self.model = empty_model(
            config.model, dtype=resolve_dtype(config.model, device), device=device
        )
        self.stop_tokens = stop_token_ids(self.model, load_tokenizer(config.model))
        attach = receive(connection)
        assert isinstance(attach, Attach), attach
        self.parameters = ParameterReader(attach.handle)
        pulled = self._take(None)
        self.engine = Engine(
            self.model,
            seed=config.run.seed,
            max_running=config.rollout.max_running,
            max_prefill_tokens=config.rollout.max_prefill_tokens,
            instance=name,
            version=pulled.version,
        )
        self.requests: dict[TrajectoryId | HeldOut, Request] = {}
        """What the engine has."""
        self.last_number = 0
        self.busy_seconds = 0.0
        self._last_status = 0.0
        self._ending = False
        send(connection, Joined(pulled.version))

    def serve(self) -> None:
        """Carry out commands and iterate, until `Shutdown`."""
        while not self._ending:
            self._listen()
            if self.engine.has_work:
                started = time.perf_counter()
                self._report(self.engine.step())
                self.busy_seconds += time.perf_counter() - started
            self._report_status()

    def _listen(self) -> None:
        """Carry out what has arrived; with nothing to do, wait a little for more."""
        wait = 0.0 if self.engine.has_work else STATUS_SECONDS
        while self.connection.poll(wait):
            self._carry_out(receive(self.connection))
            if self._ending:
                return
            wait = 0.0

    def _carry_out(self, message: object) -> None:
        if isinstance(message, Produce | PullWeights | Answer):
            if message.number <= self.last_number:
                return
            self.last_number = message.number
        match message:
            case Produce():
                self._submit(
                    message.trajectory,
                    message.prompt_ids,
                    NoiseKey(message.prompt, message.epoch, message.trajectory.member),
                    self.config.rollout.temperature,
                )
            case PullWeights():
                self._pull(message)
            case Answer():
                for row, prompt_ids in enumerate(message.prompts):
                    self._submit(
                        HeldOut(message.version, row),
                        prompt_ids,
                        NoiseKey(row, EVALUATION_EPOCH, 0),
                        self.config.run.eval_temperature,
                    )
            case Abort():
                self._abort(message.group)
            case Shutdown():
                self._ending = True
            case _:
                raise AssertionError(f"unexpected message {message}")

    def _submit(
        self,
        key: TrajectoryId | HeldOut,
        prompt_ids: list[int],
        noise: NoiseKey,
        temperature: float,
    ) -> None:
        rollout = self.config.rollout
        sampling = Sampling(
            temperature=temperature,
            top_p=rollout.top_p,
            top_k=rollout.top_k,
            max_new_tokens=rollout.max_completion_length,
            stop_token_ids=self.stop_tokens,
        )
        request = Request(key, prompt_ids, noise, sampling)
        self.requests[key] = request
        self.engine.submit(request)

    def _pull(self, message: PullWeights) -> None:
        started = time.perf_counter()
        for request in self.requests.values():
            self._send_open_segment(request)  # what is made so far is safe before anything changes
        pulled = self._take(message.version)
        self.engine.set_version(pulled.version)
        seconds = time.perf_counter() - started
        send(self.connection, WeightsPulled(message.number, pulled.version, seconds))

    def _take(self, version: Version | None) -> Pulled:
        """Copy `version` into the model, or the newest if it is gone (or None was asked for)."""
        into = dict(self.model.named_parameters())
        try:
            return self.parameters.pull(into, version)
        except VersionUnavailable:
            pulled = self.parameters.pull(into)
            assert version is not None
            assert pulled.version > version, "a version is published before it is pulled"
            return pulled

    def _abort(self, group: int) -> None:
        members = [k for k in self.requests if isinstance(k, TrajectoryId) and k.group == group]
        self.engine.interrupt(members)
        for key in members:
            del self.requests[key]

    def _report(self, finished: Iterable[Finished]) -> None:
        for request, reason in finished:
            del self.requests[request.id]
            if isinstance(request.id, TrajectoryId):
                self._send_open_segment(request)
                send(self.connection, ResponseDone(request.id, len(request.tokens), reason))
            else:
                answer = Answered(
                    request.id.asked, self.engine.version, request.id.row, request.tokens, reason
                )
                send(self.connection, answer)

    def _send_open_segment(self, request: Request) -> None:
        """Send the last segment. Those before were sent at the pulls that ended them."""
        if not request.segments or not isinstance(request.id, TrajectoryId):
            return
        segment = request.segments[-1]
        tokens, logprobs = request.tokens[segment.start :], request.logprobs[segment.start :]
        done = SegmentDone(request.id, segment.start, segment.version, tokens, logprobs)
        send(self.connection, done)

    def _report_status(self) -> None:
        now = time.perf_counter()
        if now - self._last_status < STATUS_SECONDS:
            return
        self._last_status = now
        engine = self.engine
        status = InstanceStatus(
            engine.num_running,
            engine.num_waiting,
            engine.kv_tokens,
            engine.tokens_made,
            self.busy_seconds,
        )
        send(self.connection, status)
