"""`rhymeflow dashboard` in a process of its own, and what people ask it, as its pages do.

Of each kind of question there are many that differ, drawn from what the run has: none is wrong, and
the same `draw` gives the same ones.
"""

from __future__ import annotations

import contextlib
import http.client
import json
import random
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator, Mapping
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple
from urllib.parse import quote, urlencode, urlsplit

from benchmarks.training.train import ROOT
from rhymeflow.dashboard.groups import FILTERS, ORDERS
from rhymeflow.dashboard.server import COOKIE
from rhymeflow.errors import UserError

Question = tuple[str, dict[str, Any]]
"""The path below the run, and what is asked for."""


class Dashboard:
    """One that answers; `run` is how its addresses call the run."""

    def __init__(self, address: str, run: str) -> None:
        parts = urlsplit(address)
        self._connection = http.client.HTTPConnection(parts.hostname or "", parts.port, timeout=120)
        self._headers = {"cookie": f"{COOKIE}={parts.query.partition('=')[2]}"}
        self._path = f"/api/runs/{quote(run)}"

    def ask(self, path: str = "", **query: Any) -> Any:
        search = urlencode({k: v for k, v in query.items() if v is not None}, doseq=True)
        self._connection.request("GET", f"{self._path}{path}?{search}", headers=self._headers)
        response = self._connection.getresponse()
        body = response.read()
        if response.status != 200:
            raise UserError(f"{path}?{search}: answered {response.status}: {body[:200]!r}")
        return json.loads(body)

    def timed(self, question: Question) -> float:
        path, query = question
        began = time.perf_counter()
        self.ask(path, **query)
        return time.perf_counter() - began


@contextlib.contextmanager
def dashboard(run_dir: Path) -> Iterator[Dashboard]:
    """Start one over a run.

    Raises:
        UserError: it ended instead.
    """
    command = [sys.executable, "-m", "rhymeflow", "dashboard", str(run_dir)]
    process = subprocess.Popen(command, cwd=ROOT, stdout=subprocess.PIPE, text=True)
    assert process.stdout is not None
    try:
        address = process.stdout.readline().strip()
        if not address:
            raise UserError(f"{' '.join(command)}: ended with code {process.wait()}")
        yield Dashboard(address, run_dir.resolve().name)
    finally:
        process.send_signal(signal.SIGINT)
        try:
            process.wait(10)
        except subprocess.TimeoutExpired:
            process.kill()
            process.wait()
        process.stdout.close()


CURVES = (
    *("reward", "eval/reward", "completions/mean_length", "staleness/mean", "staleness/max"),
    *("idle/rollout", "idle/learner", "draft/mean_acceptance_length", "entropy"),
    *("off_policy/mismatch_kl", "clip_ratio", "grad_norm", "step_time"),
)
"""Of the view of a run."""
SAMPLE = 20
"""Pages of groups that words are taken from."""


class Known(NamedTuple):
    overview: dict[str, Any]
    groups: list[dict[str, Any]]
    """Some of them, from all over the run."""
    long: list[dict[str, Any]]
    """Those with the longest responses."""
    words: list[str]
    """Of prompts."""
    log: dict[str, Any]


def look(board: Dashboard, draw: random.Random) -> Known:
    """Ask for what questions are made of."""
    overview = board.ask()
    groups: list[dict[str, Any]] = []
    for _ in range(SAMPLE):
        offset = draw.randrange(max(overview["groups"] - 50, 1))
        groups += board.ask("/groups", offset=offset)["groups"]
    long = board.ask("/groups", sort="length", descending="true")["groups"]
    words = sorted({word for group in groups for word in group["prompt"].split()})
    return Known(overview, groups, long, words, board.ask("/log"))


def asked(path: str, **query: Any) -> Callable[[], Question]:
    """A kind of question; values that can be called are drawn anew for each."""
    return lambda: (path, {n: v() if callable(v) else v for n, v in query.items()})


class Drawn:
    def __init__(self, known: Known, draw: random.Random) -> None:
        self.known, self.random = known, draw
        overview, log, groups = known.overview, known.log, known.groups
        self.seconds = overview["seconds"]
        self.word = partial(draw.choice, known.words)
        self.group = partial(draw.randrange, overview["groups"])
        self.row = lambda: int(draw.choice(groups)["row"])
        self.step = partial(draw.randrange, 1, overview["steps"] + 1)
        self.filter = partial(draw.choice, list(FILTERS))
        self.direction = partial(draw.choice, ("true", "false"))
        self.kind = partial(draw.choice, log["kinds"])
        self.instance = partial(draw.choice, log["instances"])
        self.time = partial(draw.uniform, 0, self.seconds)

    def words(self) -> str:
        found = self.random.choice(self.known.groups)["prompt"].split()
        place = self.random.randrange(max(len(found) - 1, 1))
        return " ".join(found[place : place + 2])

    def after(self) -> str:
        event = self.random.randrange(self.known.log["events"]) + 1
        return f"{event},0,{event}"

    def text(self) -> str:
        group = self.random.choice(self.known.groups)["group"]
        member = f"[{group},{self.random.randrange(8)}]"
        return self.random.choice((member, "its process", "Boom", '"stop"'))

    def window(self) -> Question:
        width = self.seconds * 10 ** self.random.uniform(-6, 0)
        start = self.random.uniform(0, self.seconds - width)
        return "/time", {"from": start, "to": start + width}

    def response(self) -> Question:
        found = self.random.choice(self.known.groups)
        member = self.random.choice(found["members"])["member"]
        return f"/trajectories/{found['group']}/{member}", {}

    def longest(self) -> Question:
        found = self.random.choice(self.known.long)
        member = max(found["members"], key=lambda each: each["length"])["member"]
        return f"/trajectories/{found['group']}/{member}", {}


def kinds(known: Known, draw: random.Random) -> Mapping[str, Callable[[], Question]]:
    """By name, what draws a question of that kind."""
    drawn = Drawn(known, draw)
    return {
        "run: overview": asked(""),
        "run: its curves": asked("/metrics", name=CURVES),
        "run: all metrics": asked("/metrics", name=known.overview["metrics"]),
        "time: whole": asked("/time"),
        "time: zoomed": drawn.window,
        **{f"groups: {name}": question for name, question in _of_groups(drawn).items()},
        "group": lambda: (f"/groups/{drawn.group()}", {}),
        "response": drawn.response,
        "response: longest": drawn.longest,
        "drafts": asked("/drafts"),
        **{f"log: {name}": question for name, question in _of_log(drawn).items()},
    }


def _of_groups(drawn: Drawn) -> dict[str, Callable[[], Question]]:
    some, by = partial(asked, "/groups"), {"descending": drawn.direction}
    found = {
        "of a step": some(step=drawn.step),
        "of a step, by spread": some(step=drawn.step, sort="spread"),
        "of a row": some(row=drawn.row),
        "text, a word": some(text=drawn.word),
        "text, two words": some(text=drawn.words),
        "text, two letters": some(text=lambda: drawn.word()[:2]),
        "text of all": some(text=lambda: "question: "[drawn.random.randrange(6) :]),
        "text of none": some(text=lambda: f"no{drawn.random.random()}"),
        "text, filter, by length": some(text=drawn.word, filter=drawn.filter, sort="length", **by),
        "three filters, by reward": some(
            filter=lambda: drawn.random.sample(list(FILTERS), 3), sort="reward", **by
        ),
    }
    for name in ORDERS:
        found[f"by {name}, any page"] = some(sort=name, offset=drawn.group, **by)
    for name in FILTERS:
        found[name] = some(filter=name, offset=lambda: drawn.group() % 500, **by)
    return found


def _of_log(drawn: Drawn) -> dict[str, Callable[[], Question]]:
    some, page = partial(asked, "/log"), {"after": drawn.after}
    return {
        "whole": some(),
        "any page": some(**page),
        "from a time": some(time=drawn.time),
        "of a kind": some(kind=drawn.kind, **page),
        "of an instance": some(instance=drawn.instance, **page),
        "of a group": some(group=drawn.group),
        "text": some(text=drawn.text, **page),
        "kind and instance": some(kind=drawn.kind, instance=drawn.instance, **page),
        "kind and text": some(kind=drawn.kind, text=drawn.text, **page),
        "all at once": some(
            kind=drawn.kind, instance=drawn.instance, time=drawn.time, text=drawn.text
        ),
    }
