"""Runs an agent's programs, and has the policy answer their calls: each is a turn of a response.

An episode of an agent is that of an environment whose observations are calls, any number at once.
Its first turn is empty: then the program begins.
"""

from __future__ import annotations

import json
import math
import os
import secrets
import subprocess
import sys
import time
from collections.abc import Iterable, Iterator
from contextlib import closing
from dataclasses import dataclass, field
from itertools import count
from multiprocessing.connection import wait
from pathlib import Path
from typing import Any, Literal

import msgspec

from rhymeflow.config import Config
from rhymeflow.data.generators import derived_seed
from rhymeflow.data.prompts import kind_of
from rhymeflow.environments import launcher, program_of
from rhymeflow.environments.agent_server import AgentServer, HttpAnswer, HttpRequest
from rhymeflow.environments.conversations import AnsweredTurn, Asking, Conversations, Growing
from rhymeflow.environments.dialect_answers import ModelTurn, answer, models, refusal, too_long
from rhymeflow.environments.dialect_streams import STREAMS, Stream
from rhymeflow.environments.dialects import DIALECTS, BadRequest, ModelCall, read
from rhymeflow.environments.episode import Episode, TurnFigures, Until
from rhymeflow.environments.episodes import End, Wanted
from rhymeflow.environments.messages import Answered, Called, Left, Rewarded
from rhymeflow.errors import UserError
from rhymeflow.suites.suite import RUN, of_run
from rhymeflow.utils import child
from rhymeflow.utils.objects import LOOPBACK

MODEL = "policy"
"""The model's name for programs, which may use any."""

RETRY_SECONDS = 10.0
"""How long a call whose client is gone waits for it to come back: OpenAI's and Anthropic's clients
ask again after 8 seconds at most."""

EVENTS = "text/event-stream"


@dataclass(eq=False)
class AgentTask:
    """A request of the controller with its reply, or what a program does. See `EpisodeTask`."""

    episode: Episode
    wants: Wanted
    room: int
    submitted: float = 0.0
    environment: str = "agent"  # name of its reward
    result: Called | Left | Answered | Rewarded | None = None
    error: str | None = None
    is_lost: bool = False

    def observed(self) -> list[int] | End:
        """Return why nothing follows: the program has ended."""
        return "stop"


@dataclass(eq=False)
class _Call:
    """A call that waits for its turns, or was answered."""

    path: str
    body: bytes
    call: ModelCall
    asking: Asking
    requests: list[int]
    """Numbers of those that wait for the answer, or did."""
    growing: dict[int, Growing]
    """Its turns by their numbers, in order."""
    stream: Stream | None
    turns: dict[int, ModelTurn] = field(default_factory=dict)
    """Those that are finished."""
    sent: bytes = b""  # of the stream
    left_at: float = math.inf
    """When its last client went away."""
    answer: HttpAnswer | None = None


@dataclass(eq=False)
class _Program:
    """A run of the program, for one response."""

    id: int  # for the launcher
    token: str
    episode: Episode
    room: int  # of a prompt
    began: float
    last_heard: float
    """When it last called, was answered or began."""
    calls: list[_Call] = field(default_factory=list)
    asked: dict[int, _Call] = field(default_factory=dict)
    """By the numbers of the turns that are not answered yet."""
    known: list[AnsweredTurn] = field(default_factory=list)
    num_turns: int = 0  # that it has asked for
    tool_calls: tuple[int, int] = (0, 0)
    """How many there were since it last called, and how many of them cannot be read."""
    was_answered: bool = False
    refused: str | None = None
    """Why its last call was refused, if it was."""
    has_ended: bool = False
    value: float | None = None


class Agents:
    """Serves tasks as a pool does; see `Pool` for its methods. It listens on `host`."""

    def __init__(self, config: Config, tokenizer: Any, log: Path, host: str) -> None:
        self._config, self._log = config, log
        self._configs = {RUN: config} | {suite.name: suite.config for suite in of_run(config)}
        self._conversations = Conversations(config, tokenizer)
        self._server, self._ids = AgentServer(host), count()
        self._programs: dict[str, _Program] = {}
        """By the key of the episode."""
        self._by_token: dict[str, _Program] = {}
        self._by_id: dict[int, _Program] = {}
        self._finished: list[AgentTask] = []
        self._launcher: subprocess.Popen[bytes] | None = None
        self._received = b""
        self._check_at = 0.0
        """When some program or call may have to be given up; none before."""

    def start(self) -> None:
        """Start the launcher and the server. Raises `UserError` if the function cannot be used."""
        environment = self._config.environment
        assert environment.agent is not None, "there is no agent"
        program, where = program_of(environment.agent), f"environment.agent {environment.agent}"
        wanted = {"call" if isinstance(program, str) else "command": program}
        if environment.plays_classes:
            wanted = {"play": environment.model_dump_json()}
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
        named = AgentTask(episode, wants, room)
        if self._config.environment.plays_classes:
            classes = self._config.environment.classes
            names = [each.reward_name for each in classes] or ["tools"]
            named.environment = names[kind_of(names, episode.columns, f"agent of {episode.key}")]
        return named

    def submit(self, task: AgentTask) -> None:
        """Begin or judge an episode."""
        key = task.episode.key
        program = self._programs.get(key)
        if task.wants == "answer" and len(task.episode.turns) == 1:
            if program is not None:
                self._forget(key)
            self._begin(task)
            return
        if program is None:
            task.error = f"the agent of {key} was lost with the process that ran it"
            task.is_lost = True
        else:
            assert task.wants == "reward", f"the agent of {key} goes on by itself"
            task.result = Rewarded(program.id, program.value)
            self._forget(key)
        self._finished.append(task)

    def grow(self, key: str, number: int, tokens: list[int], logprobs: list[float]) -> None:
        """Give more of the policy's turn to the program that reads it as it comes."""
        program = self._programs.get(key)
        made = None if program is None else program.asked.get(number)
        if program is None or made is None or made.stream is None:
            return
        growing = made.growing[number]
        growing.add(tokens, logprobs)
        turn = self._conversations.begun(made.call, made.asking, growing, number)
        if not made.requests or not (more := made.stream.more([*made.growing].index(number), turn)):
            return
        made.sent, program.was_answered = made.sent + more, True
        for request in made.requests:
            self._server.answer(request, HttpAnswer(200, more, EVENTS, is_last=False))

    def answer(
        self,
        key: str,
        number: int,
        tokens: list[int],
        logprobs: list[float],
        end: int,
        reason: Literal["stop", "length"],
    ) -> None:
        """Give the policy's turn to the call that it answers, if the program still waits for it.
        The turn ends at `end` in the response, and why."""
        program = self._programs.get(key)
        made = None if program is None else program.asked.pop(number, None)
        if program is None or made is None:
            return
        conversations, place = self._conversations, (made.call, made.asking)
        growing = made.growing[number]
        num_known = len(growing.tokens)
        growing.add(tokens[num_known:], logprobs[num_known:])
        turn, calls = conversations.turn(*place, growing, number, reason)
        program.known.append(conversations.answered(*place, turn, end))
        num_calls, num_failed = program.tool_calls
        num_failed += sum(bool(each.error) for each in calls)
        program.tool_calls = num_calls + len(calls), num_failed
        program.last_heard, program.was_answered = time.monotonic(), True
        made.turns[number] = turn
        if len(made.turns) == made.call.n:
            self._answer(made, _answered(made, [made.turns[each] for each in made.growing]))

    def drop(self, keys: Iterable[str]) -> None:
        """End the programs of these episodes; nothing more is returned of them."""
        for key in keys:
            if key in self._programs:
                self._forget(key)

    def wait(self, seconds: float, *others: Any) -> None:
        """Wait up to `seconds` until a `poll` is due or one of `others` is readable."""
        seconds = min(seconds, max(0.0, self._check_at - time.monotonic()))
        wait([*others, self._out, self._server.woken], 0.0 if self._finished else seconds)

    def poll(self, now: float) -> list[AgentTask]:
        """Take what programs have asked, and how they ended; return the finished tasks."""
        while self._server.woken.poll():
            self._server.woken.recv_bytes()
        while self._server.arrived:
            self._take(self._server.arrived.popleft())
        for line in self._lines():
            self._end(line)
        if now >= self._check_at:
            for program in list(self._programs.values()):
                self._check_time(program, now)
            self._check_at = self._next_check(now)
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
                if lines:
                    break
                raise self._gone()
            *whole, self._received = (self._received + data).split(b"\n")
            lines += whole
        return [json.loads(line) for line in lines]

    def _send(self, job: launcher.Job) -> None:
        assert self._launcher is not None, "not started"
        assert self._launcher.stdin is not None
        message = memoryview(msgspec.json.encode(job) + b"\n")
        try:
            while message:
                message = message[self._launcher.stdin.write(message) :]
        except BrokenPipeError:  # for the worker it would be the controller's end
            raise self._gone() from None

    def _gone(self) -> UserError:
        """Return the error that the launcher has ended. A program can kill it."""
        assert self._launcher is not None, "not started"
        how = child.how_it_ended(self._launcher.wait())
        where = f"what was printed is in {self._log}"
        return UserError(f"environment.agent: the process that starts it ended {how}; {where}")

    def _begin(self, task: AgentTask) -> None:
        episode, token, id = task.episode, secrets.token_urlsafe(16), next(self._ids)
        now = time.monotonic()
        program = _Program(id, token, episode, task.room, now, now)
        self._programs[episode.key] = program
        self._by_token[token] = self._by_id[id] = program
        job = {
            "id": id,
            "base_url": f"{self._server.address}/e/{token}/v1",
            "row": {**episode.columns, "prompt": episode.prompt},
            "seed": derived_seed(self._config.run.seed, episode.row, episode.epoch),
        }
        self._send(job)

    def _end(self, line: dict[str, Any]) -> None:
        """Take how a program ended."""
        program = self._by_id.get(line["id"])
        if program is None:
            return  # it was dropped
        program.has_ended = True
        error = line.get("error")
        if error is None and not program.was_answered:
            error = "ended without a call that the policy answered"
        if error is not None:
            if program.refused is not None:
                error += f"; its last call was refused: {program.refused}"
            self._fail(program, f"{error}; what it printed is in {self._log}")
        else:
            program.value = line["value"]
            self._say(program, Answered(program.id, None, self._figures(program)))

    def _fail(self, program: _Program, why: str) -> None:
        """End a program with an error, which is no reward (law 6)."""
        key = program.episode.key
        self._forget(key)
        task = self._say(program, None)
        task.error = f"the agent of {key} {why}"

    def _forget(self, key: str) -> None:
        program = self._programs.pop(key)
        del self._by_token[program.token], self._by_id[program.id]
        if not program.has_ended:
            self._send({"id": program.id, "kill": True})
        gone = BadRequest("the episode has ended", status=404)
        for call in program.calls:
            if call.answer is None:
                self._answer(call, _refused(call.path, gone, call.sent))

    def _say(self, program: _Program, what: Called | Left | Answered | None) -> AgentTask:
        task = AgentTask(program.episode, "answer", program.room, program.last_heard, result=what)
        self._finished.append(task)
        return task

    def _figures(self, program: _Program) -> TurnFigures:
        """Return what the program did since it was last heard of."""
        seconds, calls = time.monotonic() - program.last_heard, program.tool_calls
        program.tool_calls = 0, 0
        return TurnFigures(seconds, *calls)

    # -- time ---------------------------------------------------------------------------------

    def _deadlines(self, program: _Program) -> Iterator[tuple[float, str, _Call | None]]:
        """Yield when a program is given up, and why, and when a call of it is."""
        if program.has_ended:
            return
        limits, seconds = self._config.environment, "{} = {:g} seconds"
        whole = seconds.format("environment.agent_timeout", limits.agent_timeout)
        yield program.began + limits.agent_timeout, f"took longer than {whole}", None
        if not program.asked:
            idle = seconds.format("environment.idle_timeout", limits.idle_timeout)
            yield program.last_heard + limits.idle_timeout, f"made no call for {idle}", None
        for call in program.calls:
            if call.left_at < math.inf:
                yield call.left_at + RETRY_SECONDS, "", call

    def _next_check(self, now: float) -> float:
        """Return the first deadline; one that is not there yet is a whole limit after `now`."""
        limits = self._config.environment
        shortest = min(limits.agent_timeout, limits.idle_timeout, RETRY_SECONDS)
        deadlines = [at for each in self._programs.values() for at, *_ in self._deadlines(each)]
        return min([now + shortest, *deadlines])

    def _check_time(self, program: _Program, now: float) -> None:
        for at, why, call in list(self._deadlines(program)):
            if at > now:
                continue
            if call is None:
                self._fail(program, why)
                return
            for number in self._give_up(program, call):
                del program.asked[number]
            program.last_heard = now

    # -- calls --------------------------------------------------------------------------------

    def _take(self, request: HttpRequest) -> None:
        """Take a request, or that its client is gone."""
        _, _, token, rest = [*request.path.split("/", 3), "", "", ""][:4]
        path, program = f"/{rest}", self._by_token.get(token)
        path = path.replace("/v1/v1/", "/v1/")  # Anthropic's clients add a /v1 to the base URL
        if request.body is None:
            if program is not None:
                self._leave(program, request.number)
            return
        try:
            if program is None or program.has_ended:
                raise BadRequest("there is no such episode, or it has ended", status=404)
            if path == "/v1/models" and request.method == "GET":
                room = program.room + self._most(program)
                body = msgspec.json.encode(models(MODEL, room))
                self._server.answer(request.number, HttpAnswer(200, body))
                return
            if path not in DIALECTS or request.method != "POST":
                allowed = ", ".join(DIALECTS)
                raise BadRequest(f"there is GET /v1/models, and POST to {allowed}", status=404)
            self._call(program, path, request)
        except BadRequest as error:
            if program is not None:
                program.refused = error.message
            self._server.answer(request.number, _refused(path, error))

    def _leave(self, program: _Program, number: int) -> None:
        """Take that a client is gone. Its call waits a while for another."""
        for call in program.calls:
            if number in call.requests:
                call.requests.remove(number)
                if call.requests or call.answer is not None:
                    return
                if call.sent:  # no client asks for that again; what it has read is a turn
                    for each in self._give_up(program, call):
                        if not call.growing[each].tokens:  # there is nothing to be a turn
                            del program.asked[each]
                    program.last_heard = time.monotonic()
                else:
                    call.left_at = time.monotonic()
                return

    def _give_up(self, program: _Program, call: _Call) -> list[int]:
        """Say that nobody waits for a call; return the numbers of its turns that go on."""
        program.calls.remove(call)
        numbers = [each for each in call.growing if each not in call.turns]
        for number in numbers:
            self._say(program, Left(number)).submitted = time.monotonic()
        return numbers

    def _call(self, program: _Program, path: str, request: HttpRequest) -> None:
        """Have the policy answer a call, or attach its client to one that it has made before.
        Raises `BadRequest`."""
        assert request.body is not None
        again = [call for call in program.calls if (call.path, call.body) == (path, request.body)]
        again = [call for call in again if request.is_retry or not call.requests]
        again = [call for call in again if call.answer is not None or not call.sent]
        if again:
            earlier = min(again, key=lambda call: len(call.requests))
            earlier.requests.append(request.number)
            earlier.left_at = math.inf
            if earlier.answer is not None:
                self._server.answer(request.number, earlier.answer)
            return
        call = read(path, request.body)
        self._conversations.check(call)
        asking = self._conversations.asking(call, program.known)
        num_prompt, most = asking.num_prompt, self._most(program)
        limit = self._conversations.limit(call, asking, most)
        if num_prompt > program.room:
            raise too_long(path, num_prompt, program.room)
        if limit < 1:
            raise too_long(path, len(asking.ids), num_prompt + most - 1)
        turns = self._config.environment.max_turns
        if program.num_turns + call.n > turns:
            self._fail(program, f"made more calls than environment.max_turns = {turns}")
            raise BadRequest(f"there are {turns} turns in an episode", status=429)
        numbers = range(program.num_turns, program.num_turns + call.n)
        growing = {number: self._conversations.growing(call) for number in numbers}
        stream = self._stream(call, asking, growing)
        made = _Call(path, request.body, call, asking, [request.number], growing, stream)
        program.calls.append(made)
        program.refused = None
        until = Until(call.max_tokens, call.stop, call.stop_token_ids)
        for number in numbers:
            program.asked[number] = made
            about = asking.new, asking.follows, until
            self._say(program, Called(number, *about, self._figures(program), call.stream))
            program.last_heard = time.monotonic()
        program.num_turns += call.n

    def _stream(
        self, call: ModelCall, asking: Asking, growing: dict[int, Growing]
    ) -> Stream | None:
        if not call.stream:
            return None
        empty = [
            self._conversations.begun(call, asking, each, number)
            for number, each in growing.items()
        ]
        return STREAMS[call.dialect](call, empty, created=int(time.time()))

    def _answer(self, call: _Call, answer: HttpAnswer) -> None:
        """Answer a call; its clients have what was sent."""
        call.answer, call.left_at = answer, math.inf
        for number in call.requests:
            self._server.answer(number, answer._replace(body=answer.body[len(call.sent) :]))

    def _most(self, program: _Program) -> int:
        """Return the most tokens after a prompt."""
        config = self._configs.get(program.episode.suite, self._config)
        return config.rollout.max_completion_length


def check_program(config: Config, tokenizer: Any) -> None:
    """Raise `UserError` if the agent's program could not be started."""
    with closing(Agents(config, tokenizer, Path(os.devnull), LOOPBACK)) as agents:
        agents.start()


def _answered(made: _Call, turns: list[ModelTurn]) -> HttpAnswer:
    if made.stream is not None:
        return HttpAnswer(200, made.sent + made.stream.end(turns), EVENTS)
    body = answer(made.call, turns, created=int(time.time()))
    return HttpAnswer(200, msgspec.json.encode(body))


def _refused(path: str, error: BadRequest, sent: bytes = b"") -> HttpAnswer:
    """Return the answer that refuses a request; if a stream has begun, it is its last event."""
    body = msgspec.json.encode(refusal(path, error))
    if sent:
        return HttpAnswer(200, sent + b"event: error\ndata: " + body + b"\n\n", EVENTS)
    return HttpAnswer(error.status, body)
