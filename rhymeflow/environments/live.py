"""Runs environments in a process of the pool, in one event loop; only this file calls user code.

`async def` methods are awaited. All others run in one thread of the environment, so that they do
not block each other and may depend on their thread. A call that takes too long is cancelled; if
that is impossible, or it blocks the loop and so all others, the process is killed.
"""

from __future__ import annotations

import asyncio
import copy
import inspect
import json
import os
import sys
import threading
import time
from collections.abc import Callable, Coroutine
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from multiprocessing.connection import Connection
from typing import Any

import msgspec

from rhymeflow.config import EnvironmentConfig
from rhymeflow.data.encode import Schema
from rhymeflow.data.prompts import opened, plain
from rhymeflow.environments import messages
from rhymeflow.environments.episode import TurnFigures
from rhymeflow.environments.kinds import Kind, load_kinds
from rhymeflow.environments.mcp_tools import McpServerFailed
from rhymeflow.environments.tools import CallRefused, arguments_of
from rhymeflow.errors import UserError, nearest
from rhymeflow.pool import GRACE_SECONDS, Begun, Close, Failure, Late, clipped, encodable, encode
from rhymeflow.sandbox.programs import SandboxFailed
from rhymeflow.utils.user_values import Arguments, described, reward_number, shown


class CallFailed(Exception):  # noqa: N818 - it is what happened
    """User code raised, or returned a wrong value; the message says what."""

    def __init__(self, text: str, raised: str | None = None) -> None:
        super().__init__(text)
        self.raised = raised or text
        """The text that the policy reads."""


def _raised(error: BaseException) -> CallFailed:
    text = " ".join(str(error).split())
    name = type(error).__name__
    return CallFailed(f"raised {described(error)}", f"{name}: {text}" if text else name)


class LiveEnvironment:
    """An environment object and its conversation so far; it gets one call at a time.

    `open`, `step` and `judge` return a reply, or raise `CallFailed` if user code raises anything.
    """

    def __init__(
        self, id: int, config: EnvironmentConfig, kind: Kind, schemas: list[Schema]
    ) -> None:
        self.id, self._config, self._kind = id, config, kind
        self._schemas = {each["function"]["name"]: each for each in schemas}
        self._thread = ThreadPoolExecutor(1)
        self._object: Any = None
        self._messages: list[dict[str, Any]] = []
        self._prefix = ""
        """Beginning of the policy's first turn, if the prompt ends with it."""
        self.call: asyncio.Task[messages.Reply | Failure] | None = None
        """The latest call."""
        self.is_in_thread = False
        """Whether the call runs in the thread and so cannot be cancelled."""
        self.is_cancelled = False

    async def open(self, opening: messages.Opening) -> messages.Opened:
        """Create the object and reset it."""
        text = ""
        if self._kind.make is not None:
            self._object = await self._call(self._kind.make)
            reset, columns = self._object.reset, opening.columns
            values = {"seed": opening.seed, "prompt": opening.prompt, **columns}
            parameters = Arguments(reset)
            if (name := parameters.missing(values)) is not None:
                raise CallFailed(
                    f"reset takes an argument {name!r}, and the data has no such column"
                    f"{nearest(name, columns)}"
                )
            arguments = parameters.chosen(columns, values)
            returned = await self._call(reset, **copy.deepcopy(arguments))
            if not isinstance(returned, str | None):
                raise CallFailed(f"returned {shown(returned)}, should be text or None")
            text = _shortened(returned or "", self._config.max_observation_chars)
        try:
            prompt = opened(opening.prompt, text)
        except UserError as error:
            raise CallFailed(str(error)) from None
        if isinstance(prompt, str):
            self._messages = [{"role": "user", "content": prompt}]
            return messages.Opened(self.id, text)
        self._messages = copy.deepcopy(prompt)
        if prompt and prompt[-1]["role"] == "assistant":
            self._prefix = self._messages.pop()["content"]
        return messages.Opened(self.id, text)

    async def step(self, said: messages.Said) -> messages.Answered:
        """Answer a turn."""
        begin = time.perf_counter()
        turn = {"role": "assistant", "content": self._prefix + said.text}
        self._prefix = ""
        self._messages.append(turn)
        failed = 0
        if self._kind.methods is None:
            answer = _checked(await self._call(self._object.step, copy.deepcopy(self._messages)))
        elif said.calls:
            answer = []
            for call in said.calls:
                content, is_failed = await self._use_tool(call)
                failed += is_failed
                answer.append({"role": "tool", "name": call.name or "unknown", "content": content})
        else:
            answer = None
        answer = cut(answer, self._config.max_observation_chars)
        if isinstance(answer, str):
            self._messages.append({"role": "user", "content": answer})
        else:
            self._messages += copy.deepcopy(answer or [])
        calls = 0 if self._kind.methods is None else len(said.calls)
        figures = TurnFigures(time.perf_counter() - begin, calls, failed)
        return messages.Answered(self.id, answer, figures)

    async def judge(self) -> messages.Rewarded:
        """Return the reward of the finished episode."""
        name = "reward" if self._kind.methods is None else "get_reward"
        method = getattr(self._object, name, None)
        if method is None:
            return messages.Rewarded(self.id, None)
        try:
            return messages.Rewarded(self.id, reward_number(await self._call(method)))
        except ValueError as error:
            raise CallFailed(f"{name} {error}") from None

    async def close(self) -> None:
        """Call the object's `close`, and end the thread."""
        try:
            if callable(method := getattr(self._object, "close", None)):
                await self._call(method)
        finally:
            self._thread.shutdown(wait=False)

    async def _use_tool(self, call: messages.Call) -> tuple[str, bool]:
        """Call a tool; return what the policy reads, and whether the call failed."""
        try:
            arguments = arguments_of(call, self._schemas)
        except CallRefused as error:
            return f"Error: {error}", True
        if call.name in self._kind.functions:
            tool = self._kind.functions[call.name]
        else:
            tool = getattr(self._object, call.name)
        try:
            return str(await self._call(tool, **arguments)), False
        except CallFailed as error:
            is_ours = isinstance(error.__context__, SandboxFailed | McpServerFailed)
            if self._config.on_tool_error == "fail" or is_ours:
                raise CallFailed(f"tool {call.name} {error}") from None
            return f"Error: {error.raised}", True

    async def _call(self, function: Callable[..., Any], /, *arguments: Any, **named: Any) -> Any:
        """Call user code. Raises `CallFailed` if it raises anything."""
        bound = partial(function, *arguments, **named)
        try:
            if inspect.iscoroutinefunction(function):
                return await bound()
            result = await self._in_thread(bound)
            return await result if inspect.isawaitable(result) else result
        except CallFailed:
            raise
        except BaseException as error:
            if isinstance(error, asyncio.CancelledError) and self.is_cancelled:
                raise
            raise _raised(error) from None

    async def _in_thread(self, function: Callable[[], Any]) -> Any:
        def caught() -> Any:
            try:
                return function()
            except BaseException as error:  # noqa: BLE001 - not all can be raised in a loop
                raise _raised(error) from None

        self.is_in_thread = True
        try:
            return await asyncio.get_running_loop().run_in_executor(self._thread, caught)
        finally:
            self.is_in_thread = False


def _checked(answer: Any) -> messages.Answer:
    wanted = "should be a list of messages, text, or None"
    if answer is None or isinstance(answer, str):
        return answer
    if not isinstance(answer, list):
        raise CallFailed(f"step returned {shown(answer)}, {wanted}")
    if not answer:
        raise CallFailed("step returned an empty list; None ends the episode")
    for each in answer:
        if not isinstance(each, dict) or not isinstance(each.get("role"), str):
            raise CallFailed(f"step returned a list with {shown(each)}, which is no message")
        if not isinstance(each.get("content"), str):
            raise CallFailed(f"step returned the message {shown(each)}, whose content is no text")
        if each["role"] == "assistant":
            raise CallFailed("step returned a message of the assistant, which is the policy's part")
    try:
        return [plain(each, "step returned a message that") for each in answer]
    except UserError as error:
        raise CallFailed(str(error)) from None


def cut(answer: messages.Answer, limit: int) -> messages.Answer:
    """Cut the answer to `limit` characters of content in all, with a note in each cut message."""
    if answer is None:
        return None
    if isinstance(answer, str):
        return _shortened(answer, limit)
    kept = []
    for message in answer:
        kept.append({**message, "content": _shortened(message["content"], max(limit, 0))})
        limit -= len(message["content"])
    return kept


def _shortened(text: str, limit: int) -> str:
    if len(text) > limit:
        text = f"{text[:limit]}\n[cut: {limit} of {len(text)} characters]"
    return encodable(text)


def imported(sections_json: str, schemas_json: str) -> Callable[[Connection], None]:
    """Import classes and tools, and return a function that serves a connection. Limits and
    timeouts are those of the first section; `schemas_json` has the tools of each kind."""
    sections = [EnvironmentConfig.model_validate(each) for each in json.loads(sections_json)]
    kinds = [kind for section in sections for kind in load_kinds(section)]
    schemas = json.loads(schemas_json)

    def serve(connection: Connection) -> None:
        asyncio.run(_Server(connection, sections[0], kinds, schemas).serve())

    return serve


class _Server:
    def __init__(
        self,
        connection: Connection,
        config: EnvironmentConfig,
        kinds: list[Kind],
        schemas: list[list[Schema]],
    ) -> None:
        self._connection, self._config = connection, config
        self._kinds, self._schemas = kinds, schemas
        self._live: dict[int, LiveEnvironment] = {}
        self._tasks: set[asyncio.Task[None]] = set()
        """Strong references, which the event loop does not keep."""

    async def serve(self) -> None:
        """Answer until the parent closes the pipe; never returns."""
        loop = asyncio.get_running_loop()
        decode = msgspec.msgpack.Decoder(messages.Question).decode

        def read() -> None:
            try:
                while True:
                    question = decode(self._connection.recv_bytes())
                    loop.call_soon_threadsafe(self._take, question)
            except (EOFError, OSError):
                os._exit(0)  # the parent has closed the pipe; threads may hang

        threading.Thread(target=read, daemon=True, name="questions").start()
        await loop.create_future()

    def _take(self, question: messages.Question) -> None:
        id = question.id
        match question:
            case messages.Open(opening=opening):
                kind = self._kinds[opening.kind]
                live = LiveEnvironment(id, self._config, kind, self._schemas[opening.kind])
                self._live[id] = live
                self._begin(self._run(live, live.open(opening)))
            case messages.Step(said=said):
                self._begin(self._run(self._live[id], self._live[id].step(said)))
            case messages.GiveReward():
                self._begin(self._run(self._live[id], self._live[id].judge()))
            case Close():
                self._begin(self._close(self._live.pop(id)))

    async def _run(self, live: LiveEnvironment, work: Coroutine[Any, Any, messages.Reply]) -> None:
        """Send the reply of a call; after `timeout` seconds, cancel the call and send `Late`."""
        self._send(Begun(live.id))
        live.call = call = asyncio.create_task(_reply(live.id, work))
        ended, _ = await asyncio.wait([call], timeout=self._config.timeout)
        if not ended:
            if not live.is_in_thread:
                live.is_cancelled = True
                call.cancel()
                await asyncio.wait([call], timeout=GRACE_SECONDS / 2)
            self._send(Late(live.id, is_stuck=not call.done()))
        elif not call.cancelled():  # else `_close` has cancelled it
            self._send(call.result())

    async def _close(self, live: LiveEnvironment) -> None:
        """Close the environment after its call, within `timeout` seconds. Errors are logged."""
        call, live.is_cancelled = live.call, True
        if call is not None and not live.is_in_thread:
            call.cancel()
        try:
            async with asyncio.timeout(self._config.timeout):
                if call is not None:
                    await asyncio.wait([call])
                await live.close()
        except (CallFailed, TimeoutError, asyncio.CancelledError) as error:
            problem = str(error) or "took too long"
            print(f"closing an environment {problem}", file=sys.stderr)

    def _begin(self, work: Coroutine[Any, Any, None]) -> None:
        task = asyncio.create_task(work)
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)

    def _send(self, reply: messages.Reply | Begun | Failure | Late) -> None:
        self._connection.send_bytes(encode(reply))


async def _reply(id: int, work: Coroutine[Any, Any, messages.Reply]) -> messages.Reply | Failure:
    try:
        return await work
    except CallFailed as error:
        return Failure(id, clipped(str(error)))
