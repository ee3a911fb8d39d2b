"""Serves HTTP on one address for an agent's programs, in a thread of its own.

The thread only carries: requests come out of `arrived`, and `answer` sends what they get.
"""

from __future__ import annotations

import asyncio
import socket
import threading
from collections import deque
from contextlib import suppress
from itertools import count
from multiprocessing import Pipe
from typing import NamedTuple

import uvicorn
from starlette.applications import Starlette
from starlette.requests import ClientDisconnect, Request
from starlette.responses import Response
from starlette.routing import Route

CLOSED = 499
"""Status of an answer that nobody waits for, as nginx has it."""


class HttpRequest(NamedTuple):
    """A request with its body, or with None that its client is gone."""

    number: int
    method: str
    path: str
    is_retry: bool
    """Whether an OpenAI client sends it again."""
    body: bytes | None


class HttpAnswer(NamedTuple):
    """What a request gets."""

    status: int
    body: bytes
    type: str = "application/json"


class AgentServer:
    """`woken` is readable once something has arrived. `host` is where it listens."""

    def __init__(self, host: str) -> None:
        self.arrived: deque[HttpRequest] = deque()
        self.woken, self._wakes = Pipe(duplex=False)
        self._socket = socket.create_server((host, 0))
        self.address = f"http://{host}:{self._socket.getsockname()[1]}"
        methods = ["GET", "POST"]
        app = Starlette(routes=[Route("/{path:path}", self._serve, methods=methods)])
        settings = uvicorn.Config(app, log_level="critical", lifespan="off", access_log=False)
        self._server = uvicorn.Server(settings)
        self._numbers = count()
        self._waiting: dict[int, asyncio.Future[HttpAnswer]] = {}
        self._loop: asyncio.AbstractEventLoop | None = None
        self._thread = threading.Thread(target=self._run, daemon=True, name="agents")

    def start(self) -> None:
        """Begin to serve."""
        self._thread.start()

    def close(self) -> None:
        """Stop serving; what waits is answered by a closed connection."""
        self._server.should_exit = self._server.force_exit = True
        if self._thread.is_alive():
            self._thread.join(5.0)
        self._socket.close()

    def answer(self, number: int, answer: HttpAnswer) -> None:
        """Answer a request, unless its client is gone."""
        assert self._loop is not None, "nothing has arrived"
        self._loop.call_soon_threadsafe(self._resolve, number, answer)

    def _run(self) -> None:
        self._server.run(sockets=[self._socket])

    def _resolve(self, number: int, answer: HttpAnswer) -> None:
        waiting = self._waiting.get(number)
        if waiting is not None and not waiting.done():
            waiting.set_result(answer)

    def _arrive(self, request: HttpRequest) -> None:
        self.arrived.append(request)
        self._wakes.send_bytes(b"")

    async def _serve(self, request: Request) -> Response:
        try:
            body = await request.body()
        except ClientDisconnect:
            return Response(status_code=CLOSED)
        self._loop = asyncio.get_running_loop()
        number = next(self._numbers)
        waiting = self._waiting[number] = self._loop.create_future()
        is_retry = request.headers.get("x-stainless-retry-count", "0") != "0"
        arrived = HttpRequest(number, request.method, request.url.path, is_retry, body)
        self._arrive(arrived)
        gone = asyncio.create_task(_until_gone(request))
        try:
            await asyncio.wait([waiting, gone], return_when=asyncio.FIRST_COMPLETED)
        finally:
            gone.cancel()
            del self._waiting[number]
        if not waiting.done():
            self._arrive(arrived._replace(body=None))
            return Response(status_code=CLOSED)
        answer = waiting.result()
        return Response(answer.body, answer.status, media_type=answer.type)


async def _until_gone(request: Request) -> None:
    with suppress(ClientDisconnect):
        while (await request.receive())["type"] != "http.disconnect":
            pass
