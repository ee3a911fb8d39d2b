"""One environment, in the process that runs it: user code is called here and nowhere else.

`async def` methods are awaited; all others run in a thread of the environment's own, so that what
waits holds up nobody, and what must stay in one thread does.

Holds true: whatever user code does, `open`, `step` and `judge` return a reply's content, raise
`Failed` with what it did, or are cancelled.
"""

from __future__ import annotations

import asyncio
import copy
import inspect
import threading
import time
from collections.abc import Callable
from functools import partial
from queue import SimpleQueue
from typing import Any

from rhymeflow.config import EnvironmentConfig
from rhymeflow.data.prompts import opened, plain
from rhymeflow.environments.kinds import Kind
from rhymeflow.environments.messages import Answer, Answered, Call, Opening, Said, encodable
from rhymeflow.environments.tools import CallRefused, Schema, arguments_of
from rhymeflow.errors import UserError, nearest
from rhymeflow.utils.described import described
from rhymeflow.utils.reward_number import reward_number, shown


class Failed(Exception):  # noqa: N818 - it is what happened
    """User code did something else than what it is for; the text says what."""

    def __init__(self, text: str, raised: str | None = None) -> None:
        super().__init__(text)
        self.raised = raised or text
        """What a policy reads of it."""


def _raised(error: BaseException) -> Failed:
    text = " ".join(str(error).split())
    name = type(error).__name__
    return Failed(f"raised {described(error)}", f"{name}: {text}" if text else name)


class OwnThread:
    """Runs functions one after the other in one thread, which begins with the first."""

    def __init__(self) -> None:
        self._work: SimpleQueue[Callable[[], None] | None] = SimpleQueue()
        self._thread: threading.Thread | None = None
        self.is_busy = False

    async def run(self, function: Callable[[], Any]) -> Any:
        """Call the function there; returns what it returns, raises what it raises."""
        if self._thread is None:
            self._thread = threading.Thread(target=self._serve, daemon=True)
            self._thread.start()
        loop = asyncio.get_running_loop()
        future: asyncio.Future[Any] = loop.create_future()

        def work() -> None:
            try:
                result, error = function(), None
            except BaseException as what:  # noqa: BLE001 - user code; it is raised where it is awaited
                result, error = None, what
            loop.call_soon_threadsafe(self._done, future, result, error)

        self.is_busy = True
        self._work.put(work)
        return await future

    def end(self) -> None:
        """End the thread when it has done what it was given."""
        self._work.put(None)

    def _done(self, future: asyncio.Future[Any], result: Any, error: BaseException | None) -> None:
        self.is_busy = False
        if future.done():
            return
        if error is None:
            future.set_result(result)
        else:
            future.set_exception(_raised(error))

    def _serve(self) -> None:
        while (work := self._work.get()) is not None:
            work()


class LiveEnvironment:
    """An environment object and the conversation so far; it is called once at a time."""

    def __init__(self, config: EnvironmentConfig, kind: Kind, schemas: dict[str, Schema]) -> None:
        self._config, self._kind, self._schemas = config, kind, schemas
        self._thread = OwnThread()
        self._object: Any = None
        self._messages: list[dict[str, Any]] = []
        self._begun = ""
        """Of the policy's first turn, what the prompt ends in."""
        self.is_cancelled = False
        """Whether the call in progress was told to end."""

    @property
    def is_in_thread(self) -> bool:
        """Whether the call in progress runs in a thread, and so cannot be cancelled."""
        return self._thread.is_busy

    async def open(self, opening: Opening) -> str:
        """Make the object and reset it; return what it opens with."""
        text = ""
        if self._kind.make is not None:
            self._object = await self._call(self._kind.make)
            reset = self._object.reset
            given = {"seed": opening.seed, "prompt": opening.prompt, **opening.columns}
            returned = await self._call(reset, **_named(reset, given, opening.columns))
            if not isinstance(returned, str | None):
                raise Failed(f"returned {shown(returned)}, should be text or None")
            text = _shortened(returned or "", self._config.max_observation_chars)
        try:
            prompt = opened(opening.prompt, text)
        except UserError as error:
            raise Failed(str(error)) from None
        if isinstance(prompt, str):
            self._messages = [{"role": "user", "content": prompt}]
            return text
        self._messages = copy.deepcopy(prompt)
        if prompt and prompt[-1]["role"] == "assistant":
            self._begun = self._messages.pop()["content"]
        return text

    async def step(self, id: int, said: Said) -> Answered:
        """Answer a turn."""
        begin = time.perf_counter()
        turn = {"role": "assistant", "content": self._begun + said.text}
        self._begun = ""
        self._messages.append(turn)
        failed = 0
        if self._kind.methods is None:
            answer = _checked(await self._call(self._object.step, copy.deepcopy(self._messages)))
        elif said.calls:
            answer = []
            for call in said.calls:
                content, is_failed = await self._use(call)
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
        return Answered(id, answer, time.perf_counter() - begin, calls, failed)

    async def judge(self) -> float | None:
        """Return the reward."""
        name = "reward" if self._kind.methods is None else "get_reward"
        method = getattr(self._object, name, None)
        if method is None:
            return None
        try:
            return reward_number(await self._call(method))
        except ValueError as error:
            raise Failed(f"{name} {error}") from None

    async def close(self) -> None:
        """Let the object give back what it has, and end the thread."""
        try:
            if callable(method := getattr(self._object, "close", None)):
                await self._call(method)
        finally:
            self._thread.end()

    async def _use(self, call: Call) -> tuple[str, bool]:
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
        except Failed as error:
            if self._config.on_tool_error == "fail":
                raise Failed(f"tool {call.name} {error}") from None
            return f"Error: {error.raised}", True

    async def _call(self, function: Callable[..., Any], /, *arguments: Any, **named: Any) -> Any:
        """Call user code; raises `Failed` if it raises."""
        bound = partial(function, *arguments, **named)
        try:
            if not inspect.iscoroutinefunction(function):
                result = await self._thread.run(bound)
                return await result if inspect.isawaitable(result) else result
            return await bound()
        except Failed:
            raise
        except BaseException as error:
            if isinstance(error, asyncio.CancelledError) and self.is_cancelled:
                raise
            raise _raised(error) from None


def _named(
    reset: Callable[..., Any], given: dict[str, Any], columns: dict[str, Any]
) -> dict[str, Any]:
    """The arguments that `reset` names, or all columns if it takes all."""
    parameters = inspect.signature(reset).parameters
    for name, parameter in parameters.items():
        is_named = parameter.kind in (parameter.POSITIONAL_OR_KEYWORD, parameter.KEYWORD_ONLY)
        if is_named and parameter.default is parameter.empty and name not in given:
            raise Failed(
                f"reset takes an argument {name!r}, and the data has no such column"
                f"{nearest(name, columns)}"
            )
    named = {name: given[name] for name in parameters if name in given}
    if any(each.kind is each.VAR_KEYWORD for each in parameters.values()):
        named = {**columns, **named}
    return copy.deepcopy(named)


def _checked(answer: Any) -> Answer:
    """Look whether this is what `step` may return."""
    wanted = "should be a list of messages, text, or None"
    if answer is None or isinstance(answer, str):
        return answer
    if not isinstance(answer, list):
        raise Failed(f"step returned {shown(answer)}, {wanted}")
    if not answer:
        raise Failed("step returned an empty list; None ends the episode")
    messages = []
    for each in answer:
        if not isinstance(each, dict) or not isinstance(each.get("role"), str):
            raise Failed(f"step returned a list with {shown(each)}, which is no message")
        if not isinstance(each.get("content"), str):
            raise Failed(f"step returned the message {shown(each)}, whose content is no text")
        if each["role"] == "assistant":
            raise Failed("step returned a message of the assistant, which is the policy's part")
        try:
            messages.append(plain(each, "step returned a message that"))
        except UserError as error:
            raise Failed(str(error)) from None
    return messages


def cut(answer: Answer, limit: int) -> Answer:
    """Return the answer with so many characters of content in all, and notes where it was cut."""
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
