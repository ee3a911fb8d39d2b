"""A process of the executor's: runs many environments at once in one event loop.

Holds true: each question is answered as `messages.py` says; it ends with its parent, and all it
started with it (`utils/child.py`). A call that blocks the loop holds up all others: then the
parent, which times calls, kills it. Exceptions of `close` go to the log and nowhere else.
"""

from __future__ import annotations

import asyncio
import json
import os
import sys
import threading
from collections.abc import Coroutine
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

from rhymeflow.config import EnvironmentConfig
from rhymeflow.environments.kinds import Kind, load_kinds
from rhymeflow.environments.live import Failed, LiveEnvironment
from rhymeflow.environments.messages import (
    GRACE_SECONDS,
    Answered,
    Begun,
    Cancel,
    Close,
    Failure,
    Judge,
    Open,
    Opened,
    Question,
    Ready,
    Reply,
    Rewarded,
    Step,
    Stuck,
    Unusable,
    clipped,
    decode_question,
    encode,
)
from rhymeflow.environments.tools import Schema
from rhymeflow.errors import UserError
from rhymeflow.utils import output
from rhymeflow.utils.child import detach


def main(
    connection: Connection, parent: int, sections_json: str, schemas_json: str, log: str | None
) -> None:
    """Serve until the parent closes the pipe or dies; what environments print goes to `log`.

    `sections_json`: whose kinds they are, and the first says how. `schemas_json`: of each kind's
    tools.
    """
    detach(parent)
    if log is not None:
        output.redirect(Path(log))
    sections = [EnvironmentConfig.model_validate(each) for each in json.loads(sections_json)]
    try:
        try:
            kinds = [kind for section in sections for kind in load_kinds(section)]
        except UserError as error:
            connection.send_bytes(encode(Unusable(clipped(str(error)))))
            return
        connection.send_bytes(encode(Ready()))
        asyncio.run(_Server(connection, sections[0], kinds, json.loads(schemas_json)).serve())
    except (EOFError, BrokenPipeError, ConnectionResetError):
        return  # the parent is gone, or wants no more


class _Server:
    """Answers questions about the environments of this process."""

    def __init__(
        self,
        connection: Connection,
        config: EnvironmentConfig,
        kinds: list[Kind],
        schemas: list[list[Schema]],
    ) -> None:
        self._connection, self._config, self._kinds = connection, config, kinds
        self._schemas = [{each["function"]["name"]: each for each in tools} for tools in schemas]
        self._live: dict[int, LiveEnvironment] = {}
        self._calls: dict[int, asyncio.Task[None]] = {}
        self._others: set[asyncio.Task[None]] = set()
        """Closing, and looking whether what was cancelled ends."""

    async def serve(self) -> None:
        """Answer for as long as there is somebody to ask."""
        loop = asyncio.get_running_loop()

        def read() -> None:
            try:
                while True:
                    question = decode_question(self._connection.recv_bytes())
                    loop.call_soon_threadsafe(self._take, question)
            except (EOFError, OSError):
                os._exit(0)  # the parent wants no more, and threads may hang

        threading.Thread(target=read, daemon=True, name="questions").start()
        await loop.create_future()

    def _take(self, question: Question) -> None:
        id = question.id
        match question:
            case Open(opening=opening):
                kind = self._kinds[opening.kind]
                live = LiveEnvironment(self._config, kind, self._schemas[opening.kind])
                self._live[id] = live
                self._begin(id, self._opened(id, live.open(opening)))
            case Step(said=said):
                self._begin(id, self._live[id].step(id, said))
            case Judge():
                self._begin(id, self._judged(id))
            case Cancel():
                self._later(self._cancelled(id))
            case Close():
                self._later(self._closed(id))

    async def _opened(self, id: int, opening: Coroutine[Any, Any, str]) -> Opened:
        return Opened(id, await opening)

    async def _judged(self, id: int) -> Rewarded:
        return Rewarded(id, await self._live[id].judge())

    def _begin(self, id: int, work: Coroutine[Any, Any, Opened | Answered | Rewarded]) -> None:
        self._calls[id] = asyncio.create_task(self._run(id, work))

    async def _run(self, id: int, work: Coroutine[Any, Any, Reply]) -> None:
        self._send(Begun(id))
        try:
            reply = await work
        except Failed as error:
            reply = Failure(id, clipped(str(error)))
        except asyncio.CancelledError:
            reply = Failure(id, "was cancelled")
        finally:
            self._calls.pop(id, None)
        self._send(reply)

    async def _cancelled(self, id: int) -> None:
        """Cancel the call, or say that it does not let itself be."""
        call = self._calls.get(id)
        if call is None:
            return  # it has just ended
        live = self._live[id]
        if not live.is_in_thread:
            live.is_cancelled = True
            call.cancel()
            await asyncio.wait([call], timeout=GRACE_SECONDS / 2)
        if not call.done():
            self._send(Stuck(id))
        elif call.cancelled():  # before it began
            self._calls.pop(id, None)
            self._send(Failure(id, "was cancelled"))

    async def _closed(self, id: int) -> None:
        """Close the environment, after the call in progress, which is not waited for for ever."""
        live = self._live.pop(id)
        call = self._calls.get(id)
        live.is_cancelled = True
        if call is not None and not live.is_in_thread:
            call.cancel()
        try:
            async with asyncio.timeout(self._config.timeout):
                if call is not None:
                    await asyncio.wait([call])
                    self._calls.pop(id, None)  # it may not have begun
                await live.close()
        except (Failed, TimeoutError, asyncio.CancelledError) as error:
            what = str(error) or "took too long"
            print(f"closing an environment {what}", file=sys.stderr)

    def _later(self, work: Coroutine[Any, Any, None]) -> None:
        task = asyncio.create_task(work)
        self._others.add(task)
        task.add_done_callback(self._others.discard)

    def _send(self, reply: Reply) -> None:
        self._connection.send_bytes(encode(reply))
