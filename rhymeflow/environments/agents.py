"""Runs an agent's programs, and has the policy answer their calls: each is a turn of a response.

An episode of an agent is that of an environment whose observations are calls. Its first turn is
empty: then the program begins. One call at a time is answered, in the order in which they arrive.
"""

from __future__ import annotations

import json
import math
import os
import secrets
import subprocess
import sys
import time
from collections import deque
from collections.abc import Iterable
from dataclasses import dataclass, field
from itertools import count
from multiprocessing.connection import wait
from pathlib import Path
from typing import Any

import msgspec

from rhymeflow.config import Config
from rhymeflow.data.generators import derived_seed
from rhymeflow.environments import launcher, program_of
from rhymeflow.environments.agent_server import AgentServer, HttpAnswer, HttpRequest
from rhymeflow.environments.conversations import AnsweredTurn, Asking, Conversations
from rhymeflow.environments.dialect_answers import (
    ModelTurn,
    answer,
    chunks,
    models,
    refusal,
    too_long,
)
from rhymeflow.environments.dialects import DIALECTS, BadRequest, ModelCall, read
from rhymeflow.environments.episode import Episode, TurnFigures
from rhymeflow.environments.episodes import End, Wanted
from rhymeflow.environments.messages import Answered, Rewarded
from rhymeflow.errors import UserError
from rhymeflow.suites.suite import RUN, of_run
from rhymeflow.utils import child

MODEL = "policy"
"""The model's name for programs, which may use any."""


@dataclass(eq=False)
class AgentTask:
    """A request of the controller, with its reply, which is like that of an `EpisodeTask`."""

    episode: Episode
    wants: Wanted
    room: int
    logprobs: list[float] = field(default_factory=list)
    submitted: float = 0.0
    environment = "agent"
    result: Answered | Rewarded | None = None
    asked: _Call | None = None  # what follows the turn; None: the program has ended
    error: str | None = None
    is_lost: bool = False

    @property
    def follows(self) -> int | None:
        """See `TurnAnswered`, here and below."""
        return None if self.asked is None else self.asked.asking.follows

    @property
    def max_turn_tokens(self) -> int | None:
        """The most that the call asks for."""
        return None if self.asked is None else self.asked.call.max_tokens

    def observed(self) -> list[int] | End:
        """Return the tokens of the next call, or why there is none."""
        return "stop" if self.asked is None else self.asked.asking.new


@dataclass(eq=False)
class _Call:
    """A call that is waiting for its turns, or was answered."""

    path: str
    body: bytes
    call: ModelCall
    asking: Asking
    limit: int  # most tokens of a turn
    numbers: list[int]
    """Of the requests that wait for the answer: none if the client went away."""
    turns: list[ModelTurn] = field(default_factory=list)
    answer: HttpAnswer | None = None


@dataclass(eq=False)
class _Program:
    """A run of the program, for one response."""

    id: int  # for the launcher
    token: str
    task: AgentTask
    """The last request about it."""
    waits_since: float
    is_waited_for: bool = False  # whether `task` waits for a call
    queue: deque[_Call] = field(default_factory=deque)
    current: _Call | None = None  # the policy answers it
    calls: list[_Call] = field(default_factory=list)
    known: list[AnsweredTurn] = field(default_factory=list)
    num_turns: int = 0  # that it has asked for
    tool_calls: tuple[int, int] = (0, 0)
    """How many its last turn has, and how many of them cannot be read."""
    has_ended: bool = False
    value: float | None = None
    error: str | None = None


class Agents:
    """Serves tasks as a pool does; see `Pool` for its methods."""

    def __init__(self, config: Config, tokenizer: Any, log: Path) -> None:
        self._config, self._log = config, log
        self._configs = {RUN: config} | {suite.name: suite.config for suite in of_run(config)}
        self._conversations = Conversations(config, tokenizer)
        self._server, self._ids = AgentServer(), count()
        self._programs: dict[str, _Program] = {}
        """By the key of the episode."""
        self._by_token: dict[str, _Program] = {}
        self._by_id: dict[int, _Program] = {}
        self._finished: list[AgentTask] = []
        self._launcher: subprocess.Popen[bytes] | None = None
        self._received = b""

    def start(self) -> None:
        """Start the launcher and the server. Raises `UserError` if the function cannot be used."""
        environment = self._config.environment
        assert environment.agent is not None, "there is no agent"
        program, where = program_of(environment.agent), f"environment.agent {environment.agent}"
        wanted = {"call" if isinstance(program, str) else "command": program}
        python, variables = environment.agent_python or sys.executable, dict(os.environ)
        if environment.agent_python is None:  # it imports what this process can
            variables["PYTHONPATH"] = os.pathsep.join(filter(None, sys.path))
        with self._log.open("ab") as log:
            try:
                self._launcher = subprocess.Popen(
                    [python, launcher.__file__, json.dumps(wanted)],
                    stdin=subprocess.PIPE,
                    stdout=subprocess.PIPE,
                    stderr=log,
                    env=variables,
                    bufsize=0,
                )
            except OSError as error:
                raise UserError(f"environment.agent_python {python}: {error.strerror}") from None
        os.set_blocking(self._out.fileno(), False)
        if not wait([self._out], child.START_SECONDS):
            raise UserError(f"{where}: importing it takes longer than {child.START_SECONDS:g} s")
        first = next(iter(self._lines()), {"failed": "importing it ended the process"})
        if first["failed"] is not None:
            raise UserError(f"{where}: {first['failed']}")
        self._server.start()

    def close(self) -> None:
        """End all programs and the server."""
        if self._launcher is not None:
            assert self._launcher.stdin is not None
            self._launcher.stdin.close()  # it ends them
            try:
                self._launcher.wait(5.0)
            except subprocess.TimeoutExpired:
                self._launcher.kill()
                self._launcher.wait()
        self._server.close()

    def first_print(self) -> str | None:
        """Return None: what programs print is in the worker's log alone."""
        return None

    def task(self, episode: Episode, wants: Wanted, room: int = 0) -> AgentTask:
        """Return a task for `submit`; `room` is that of a prompt."""
        return AgentTask(episode, wants, room)

    def submit(self, task: AgentTask) -> None:
        """Begin, go on with or judge an episode."""
        key, turns = task.episode.key, task.episode.turns
        program = self._programs.get(key)
        if task.wants == "answer" and len(turns) == 1:
            if program is not None:
                self._forget(key)
            program = self._begin(task)
        elif program is None:
            task.error = f"the agent of {key} was lost with the process that ran it"
            task.is_lost = True
            self._finished.append(task)
            return
        elif task.wants == "reward":
            task.result = Rewarded(program.id, program.value)
            self._forget(key)
            self._finished.append(task)
            return
        else:
            self._deliver(program, task)
        program.task, program.is_waited_for = task, True
        program.waits_since = time.monotonic()
        self._go_on(program)

    def drop(self, keys: Iterable[str]) -> None:
        """End the programs of these episodes; their tasks are not returned."""
        for key in keys:
            if key in self._programs:
                self._forget(key)

    def wait(self, seconds: float, *others: Any) -> None:
        """Wait up to `seconds` until a `poll` is due or one of `others` is readable."""
        deadlines = [self._deadline(each) for each in self._programs.values()]
        seconds = min(seconds, max(0.0, min(deadlines, default=math.inf) - time.monotonic()))
        wait([*others, self._out, self._server.woken], 0.0 if self._finished else seconds)

    def poll(self, now: float) -> list[AgentTask]:
        """Take what programs have asked, and how they ended; return the finished tasks."""
        while self._server.woken.poll():
            self._server.woken.recv_bytes()
        while self._server.arrived:
            self._take(self._server.arrived.popleft())
        for line in self._lines():
            self._end(line)
        for program in list(self._programs.values()):
            if self._deadline(program) <= now:
                seconds = self._config.environment.timeout
                self._fail(program, f"made no call for environment.timeout = {seconds:g} seconds")
        finished, self._finished = self._finished, []
        return finished

    # -- programs -----------------------------------------------------------------------------

    @property
    def _out(self) -> Any:
        assert self._launcher is not None, "not started"
        return self._launcher.stdout

    def _lines(self) -> list[dict[str, Any]]:
        """Return what the launcher has said since the last call."""
        lines: list[bytes] = []
        while (data := self._out.read(1 << 16)) is not None:
            if not data:
                assert self._launcher is not None
                how = child.how_it_ended(self._launcher.wait())
                if lines:
                    break
                raise UserError(f"environment.agent: the process that starts it ended {how}")
            *whole, self._received = (self._received + data).split(b"\n")
            lines += whole
        return [json.loads(line) for line in lines]

    def _send(self, job: launcher.Job) -> None:
        assert self._launcher is not None, "not started"
        assert self._launcher.stdin is not None
        message = memoryview(msgspec.json.encode(job) + b"\n")
        while message:
            message = message[self._launcher.stdin.write(message) :]

    def _begin(self, task: AgentTask) -> _Program:
        episode, token, id = task.episode, secrets.token_urlsafe(16), next(self._ids)
        program = _Program(id, token, task, time.monotonic())
        self._programs[episode.key] = program
        self._by_token[token] = self._by_id[id] = program
        job = {
            "id": id,
            "base_url": f"{self._server.address}/e/{token}/v1",
            "row": {**episode.columns, "prompt": episode.prompt},
            "seed": derived_seed(self._config.run.seed, episode.row, episode.epoch),
        }
        self._send(job)
        return program

    def _end(self, line: dict[str, Any]) -> None:
        """Take how a program ended."""
        program = self._by_id.get(line["id"])
        if program is None:
            return  # it was dropped
        if "error" in line:
            self._fail(program, line["error"])
            return
        program.has_ended, program.value = True, line["value"]
        self._go_on(program)

    def _fail(self, program: _Program, why: str) -> None:
        """End a program with an error, which is no reward (law 6)."""
        if not program.has_ended:
            program.has_ended = True
            self._send({"id": program.id, "kill": True})
        program.error = program.error or f"the agent of {program.task.episode.key} {why}"
        self._go_on(program)

    def _forget(self, key: str) -> None:
        program = self._programs.pop(key)
        del self._by_token[program.token], self._by_id[program.id]
        if not program.has_ended:
            self._send({"id": program.id, "kill": True})
        gone = _refused("/v1", BadRequest("the episode has ended", status=404))
        for call in program.calls:
            if call.answer is None:
                self._answer(call, gone)

    def _deadline(self, program: _Program) -> float:
        """Return when a program that has to call next is given up."""
        if not program.is_waited_for:
            return math.inf
        return program.waits_since + self._config.environment.timeout

    def _go_on(self, program: _Program) -> None:
        """Finish the task that waits for a program, if that has called or ended."""
        task = program.task
        if not program.is_waited_for:
            return
        seconds = time.monotonic() - program.waits_since
        figures = TurnFigures(seconds, *program.tool_calls)
        if program.error is not None:
            task.error = program.error
        elif program.has_ended and not program.num_turns:
            task.error = f"the agent of {task.episode.key} ended without a call to the policy"
        elif not program.has_ended and not program.queue:
            return
        elif not program.has_ended:
            task.asked = program.current = program.queue.popleft()
        task.result = None if task.error else Answered(program.id, None, figures)
        program.is_waited_for = False
        self._finished.append(task)
        if task.error is not None:
            self._forget(task.episode.key)

    # -- calls --------------------------------------------------------------------------------

    def _take(self, request: HttpRequest) -> None:
        """Take a request, or that its client is gone."""
        _, _, token, rest = [*request.path.split("/", 3), "", "", ""][:4]
        path, program = f"/{rest}", self._by_token.get(token)
        if request.body is None:
            if program is not None:
                self._leave(program, request.number)
            return
        try:
            if program is None or program.has_ended:
                raise BadRequest("there is no such episode, or it has ended", status=404)
            if path == "/v1/models" and request.method == "GET":
                room = program.task.room + self._most(program.task)
                body = msgspec.json.encode(models(MODEL, room))
                self._server.answer(request.number, HttpAnswer(200, body))
                return
            if path not in DIALECTS or request.method != "POST":
                allowed = ", ".join(DIALECTS)
                raise BadRequest(f"there is GET /v1/models, and POST to {allowed}", status=404)
            self._call(program, path, request)
        except BadRequest as error:
            self._server.answer(request.number, _refused(path, error))

    def _leave(self, program: _Program, number: int) -> None:
        """Take that a client is gone: its call is forgotten, unless its turn has begun."""
        for call in program.calls:
            if number in call.numbers:
                call.numbers.remove(number)
                if call in program.queue and not (call.numbers or call.turns):
                    program.queue.remove(call)
                    program.calls.remove(call)
                    program.num_turns -= call.call.n
                return

    def _call(self, program: _Program, path: str, request: HttpRequest) -> None:
        """Queue a call, or attach its client to one that it has made before. Raises
        `BadRequest`."""
        assert request.body is not None
        again = [call for call in program.calls if (call.path, call.body) == (path, request.body)]
        again = [call for call in again if request.is_retry or not call.numbers]
        if again:
            again.sort(key=lambda call: len(call.numbers))
            again[0].numbers.append(request.number)
            if again[0].answer is not None:
                self._server.answer(request.number, again[0].answer)
            return
        call, task = read(path, request.body), program.task
        self._conversations.check(call)
        asking = self._conversations.asking(call, program.known)
        limit = self._conversations.limit(call, asking, self._most(task))
        if asking.num_prompt > task.room or limit < 1:
            raise too_long(path, len(asking.ids), task.room + self._most(task))
        most = self._config.environment.max_turns
        if program.num_turns + call.n > most:
            self._fail(program, f"made more calls than environment.max_turns = {most}")
            raise BadRequest(f"there are {most} turns in an episode", status=429)
        program.num_turns += call.n
        made = _Call(path, request.body, call, asking, limit, [request.number])
        program.calls.append(made)
        program.queue.append(made)
        self._go_on(program)

    def _deliver(self, program: _Program, task: AgentTask) -> None:
        """Give the policy's turn to the call that it answers."""
        made, conversations = program.current, self._conversations
        assert made is not None, f"nothing was asked in {task.episode.key}"
        parts = [*task.episode.turns, *task.episode.observed]
        tokens, end = task.episode.turns[-1], sum(map(len, parts))
        turn, calls = conversations.turn(
            made.call, made.asking, tokens, task.logprobs, end=end, limit=made.limit
        )
        program.current = None
        program.known.append(conversations.answered(made.call, made.asking, turn, end))
        program.tool_calls = len(calls), sum(bool(each.error) for each in calls)
        made.turns.append(turn)
        if len(made.turns) < made.call.n:
            program.queue.appendleft(made)
            return
        created = int(time.time())
        if made.call.stream:
            body = b"".join(chunks(made.call, made.turns, created=created))
            self._answer(made, HttpAnswer(200, body, "text/event-stream"))
        else:
            body = msgspec.json.encode(answer(made.call, made.turns, created=created))
            self._answer(made, HttpAnswer(200, body))

    def _answer(self, call: _Call, answer: HttpAnswer) -> None:
        call.answer = answer
        for number in call.numbers:
            self._server.answer(number, answer)

    def _most(self, task: AgentTask) -> int:
        """Return the most tokens after a prompt."""
        config = self._configs.get(task.episode.suite, self._config)
        return config.rollout.max_completion_length


def _refused(path: str, error: BadRequest) -> HttpAnswer:
    return HttpAnswer(error.status, msgspec.json.encode(refusal(path, error)))
