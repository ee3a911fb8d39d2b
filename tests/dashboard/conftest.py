"""Dashboards over small runs, asked over HTTP."""

import http.client
import json
import threading
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any
from urllib.parse import urlencode

import pytest
import uvicorn

from rhymeflow.config import ModelConfig
from rhymeflow.dashboard.run import Run
from rhymeflow.dashboard.serve import listening
from rhymeflow.dashboard.server import COOKIE, make_app
from rhymeflow.observe.query import Texts, TokenTexts, load_texts
from tests.observe.runs import make_run

TOKEN = "the-token"
FIELDS = {
    "learner.groups_per_batch": "4",
    "rollout.num_instances": "2",
    "schedule.max_staleness": "2",
    "simulation.skip_steps": "1",
}
"""Of simulated runs."""


class Client:
    """Asks a dashboard; `port` is where it listens."""

    def __init__(self, port: int) -> None:
        self.port = port

    def raw(
        self, path: str, method: str = "GET", **headers: str
    ) -> tuple[int, dict[str, str], bytes]:
        """Status, headers and body. The cookie is sent, if it is not among the headers."""
        sent = {"cookie": f"{COOKIE}={TOKEN}"}
        sent |= {name.replace("_", "-"): value for name, value in headers.items()}
        connection = http.client.HTTPConnection("127.0.0.1", self.port, timeout=10)
        connection.request(method, path, headers=sent)
        response = connection.getresponse()
        body = response.read()
        connection.close()
        return response.status, {k.lower(): v for k, v in response.getheaders()}, body

    def ask(self, path: str, *, status: int = 200, **query: Any) -> Any:
        """The answer's JSON."""
        found, _, body = self.raw(f"/api/{path}?{urlencode(query, doseq=True)}")
        assert found == status, body
        return json.loads(body)

    def problem(self, path: str, **query: Any) -> str:
        """What is said to be wrong."""
        found: str = self.ask(path, status=400, **query)["error"]
        return found


@pytest.fixture
def run_dir(tmp_path):
    """See `make_run`: 4 steps of two groups of two, then an aborted group and one that is open."""
    (tmp_path / "a-run").mkdir()
    return make_run(tmp_path / "a-run")


@contextmanager
def serving(runs: Sequence[Run]) -> Iterator[Client]:
    """A dashboard over these runs."""
    listener = listening("127.0.0.1", None)
    app = make_app(runs, TokenTexts(load_characters), token=TOKEN)
    server = uvicorn.Server(uvicorn.Config(app, log_level="critical", lifespan="off"))
    thread = threading.Thread(target=server.run, kwargs={"sockets": [listener]}, daemon=True)
    thread.start()
    yield Client(listener.getsockname()[1])
    server.should_exit = True
    thread.join(10)
    listener.close()


def load_characters(model: ModelConfig) -> Texts:
    """Stands for a tokenizer, unless the run's is there."""
    return load_texts(model) if Path(model.name).is_dir() else lambda tokens: [*map(str, tokens)]


@pytest.fixture
def client(run_dir):
    with serving([Run(run_dir, "a-run")]) as found:
        yield found
