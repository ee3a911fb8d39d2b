"""Serves HTTP on one address for an agent's programs, in a thread of its own.

The thread only carries: requests come out of `arrived`, and `answer` sends what they get.
"""

from __future__ import annotations

import asyncio
import socket
import threading
from collections import deque
from itertools import count
from multiprocessing import Pipe
from typing import NamedTuple

import uvicorn
from starlette.types import Receive, Scope, Send


class HttpRequest(NamedTuple):
    """A request with its body, or with None that its client is gone."""

    number: int
    method: str
    path: str
    is_retry: bool
    """Whether an OpenAI client sends it again."""
    body: bytes | None


class HttpAnswer(NamedTuple):
    """What a request gets, or the next part of it; only of the first, status and type count."""

    status: int
    body: bytes
    type: str = "application/json"
    is_last: bool = True


class AgentServer:
    """`woken` is readable once something has arrived. `host` is where it listens."""

    def __init__(self, host: str) -> None:
        self.arrived: deque[HttpRequest] = deque()
        self.woken, self._wakes = Pipe(duplex=False)
        self._socket = socket.create_server((host, 0))
        # Connections inherit it. asyncio sets it only where a socket names its protocol, and else
        # an answer's body waits for the client's delayed acknowledgement of its headers: 40 ms.
        self._socket.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        self.address = f"http://{host}:{self._socket.getsockname()[1]}"
        settings = uvicorn.Config(
            self._serve, log_level="critical", lifespan="off", access_log=False,
            interface="asgi3", ws="none", proxy_headers=False, server_header=False,
            date_header=False,
        )  # fmt: skip
        self._server = uvicorn.Server(settings)
        self._numbers = count()
        self._waiting: dict[int, asyncio.Queue[HttpAnswer | None]] = {}
        """By request, what is not sent yet; None: its client is gone."""
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
        """Send a request's answer, or the next part of it, unless its client is gone."""
        assert self._loop is not None, "nothing has arrived"
        self._loop.call_soon_threadsafe(self._pass_on, number, answer)

    def _run(self) -> None:
        self._server.run(sockets=[self._socket])

    def _pass_on(self, number: int, answer: HttpAnswer) -> None:
        if number in self._waiting:
            self._waiting[number].put_nowait(answer)

    def _arrive(self, request: HttpRequest) -> None:
        self.arrived.append(request)
        self._wakes.send_bytes(b"")

    async def _serve(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Be the application of the server (ASGI)."""
        body, has_more = b"", True
        while has_more:
            event = await receive()
            if event["type"] == "http.disconnect":
                return
            body, has_more = body + event.get("body", b""), event.get("more_body", False)
        self._loop = asyncio.get_running_loop()
        number, parts = next(self._numbers), asyncio.Queue[HttpAnswer | None]()
        self._waiting[number] = parts
        is_retry = dict(scope["headers"]).get(b"x-stainless-retry-count", b"0") != b"0"
        arrived = HttpRequest(number, scope["method"], scope["path"], is_retry, body)
        self._arrive(arrived)
        gone = asyncio.create_task(_until_gone(receive, parts))
        try:
            is_first, is_last = True, False
            while not is_last:
                part = await parts.get()
                if part is None:
                    self._arrive(arrived._replace(body=None))
                    return
                if is_first:
                    headers = [(b"content-type", part.type.encode())]
                    if part.is_last:  # else it would be sent, and read, in chunks
                        headers.append((b"content-length", b"%d" % len(part.body)))
                    start = {"type": "http.response.start", "status": part.status}
                    await send(start | {"headers": headers})
                is_first, is_last = False, part.is_last
                end = {"type": "http.response.body", "body": part.body, "more_body": not is_last}
                await send(end)
        finally:
            gone.cancel()
            del self._waiting[number]


async def _until_gone(receive: Receive, parts: asyncio.Queue[HttpAnswer | None]) -> None:
    while (await receive())["type"] != "http.disconnect":
        pass
    parts.put_nowait(None)
