"""A server with OpenAI's interface that answers as it is told, or fails so many times first."""

from __future__ import annotations

import json
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any

import pytest

from rhymeflow.utils import openai_api

KEY = "sk-not-to-be-seen"


class Handler(BaseHTTPRequestHandler):
    def do_POST(self):
        server = self.server
        body = json.loads(self.rfile.read(int(self.headers["Content-Length"])))
        with server.lock:
            server.asked.append((self.path, self.headers.get("Authorization"), body))
            server.at_once += 1
            server.most_at_once = max(server.most_at_once, server.at_once)
            code = server.errors.pop() if server.errors else 200
        time.sleep(server.seconds)
        with server.lock:
            server.at_once -= 1
        answer = {"choices": [server.choice(server, body)]} if code == 200 else {"error": "not now"}
        text = json.dumps(answer).encode()
        self.send_response(code)
        self.send_header("Content-Length", str(len(text)))
        self.end_headers()
        self.wfile.write(text)

    def log_message(self, *args):
        pass


class Server(ThreadingHTTPServer):
    """`choice` makes the answer's one choice from the server and the request's body."""

    def __init__(self, choice: Callable[[Server, dict[str, Any]], Any]) -> None:
        super().__init__(("127.0.0.1", 0), Handler)
        self.choice = choice
        self.asked: list[tuple] = []
        self.errors: list[int] = []
        self.seconds, self.says = 0.0, ""
        self.spoil: Callable[[Any], Any] = lambda said: None
        self.at_once = self.most_at_once = 0
        self.lock = threading.Lock()
        self.url = f"http://127.0.0.1:{self.server_address[1]}/v1"

    def handle_error(self, *_):
        """Who asked has gone, as a test wants it."""


@contextmanager
def serving(
    monkeypatch: pytest.MonkeyPatch, choice: Callable[[Server, dict[str, Any]], Any]
) -> Iterator[Server]:
    """Serve in a thread; clients have the key, and wait hardly between tries."""
    monkeypatch.setenv("OPENAI_API_KEY", KEY)
    monkeypatch.setattr(openai_api, "WAIT_SECONDS", 0.01)
    made = Server(choice)
    threading.Thread(target=made.serve_forever, args=(0.01,), daemon=True).start()
    yield made
    made.shutdown()
    made.server_close()
