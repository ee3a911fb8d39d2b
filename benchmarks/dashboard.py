"""The dashboard over a very large run: how soon it opens, how fast each question is answered.

A synthetic run of 200,000 responses, served in a process of its own and asked as the pages ask, one
question at a time. `first of all` needs all groups; `log read` is until all of the log is. `first`
is of questions asked after a new step; `follow` the time until the overview tells of one.
"""

from __future__ import annotations

import argparse
import contextlib
import http.client
import json
import random
import signal
import statistics
import subprocess
import sys
import time
from collections import defaultdict
from collections.abc import Callable, Iterator, Mapping
from contextlib import closing
from functools import partial
from pathlib import Path
from typing import Any
from urllib.parse import quote, urlencode, urlsplit

from benchmarks import harness
from benchmarks.logs.made_up import METRICS, Size, add_run_argument, kept
from benchmarks.training.train import ROOT
from rhymeflow.core.events import VersionPublished
from rhymeflow.dashboard.groups import FILTERS, ORDERS
from rhymeflow.dashboard.server import COOKIE
from rhymeflow.errors import UserError
from rhymeflow.observe import metrics
from rhymeflow.store.schema import EVENTS
from rhymeflow.store.writer import SqliteTrajectoryStore
from tests.store import stores

OPENS, FOLLOWS = 1.0, 2.0
"""Seconds."""
ANSWERS, FIRST_ANSWERS = 200.0, 400.0
"""Milliseconds: of a question, and of one that is the first for a version."""
LOG_READ, LOG_READ_LARGE, FIRST_OF_ALL = 2.5, 12.0, 3.0
"""Seconds: of a run of up to `SIZE` responses, of a larger one, of any."""
SIZE, TOKENS, EPOCHS, MEMBERS = 200_000, 100, 8, 8
STARTS, NEW_STEPS, FIRSTS = 5, 20, 10
"""Of the command; that are followed; questions of each kind that come right after another."""


def add_arguments(parser: argparse.ArgumentParser) -> None:
    harness.add_number(parser, "--trajectories", SIZE, "of the synthetic run")
    harness.add_number(parser, "--questions", 50, "of each kind")
    add_run_argument(parser)


def run(args: argparse.Namespace) -> dict[str, Any]:
    rows = -(-args.trajectories // (MEMBERS * EPOCHS))
    size = Size(num_responses=args.trajectories, tokens=TOKENS, rows=rows)
    with kept(args.run, size) as folder:
        found, targets = pages(folder, args)
    return harness.report("dashboard", found, targets, args, __doc__ or "")


def pages(folder: Path, args: argparse.Namespace) -> harness.Found:
    opens, first_of_all, log_read = zip(*(_started(folder) for _ in range(STARTS)), strict=True)
    draw = random.Random(0)
    with dashboard(folder) as board:
        drawn = kinds(board, draw)
        board.ask("/trajectories/0/0")
        _read_log(board)
        times: dict[str, list[float]] = {}
        for kind, question in drawn.items():
            times[kind] = [1000 * board.timed(question()) for _ in range(args.questions)]
            print(f"{kind}: {_percentiles(times[kind])}", file=sys.stderr, flush=True)
        follows = [_follow(board, folder) for _ in range(NEW_STEPS)]
        firsts: dict[str, list[float]] = defaultdict(list)
        for kind, question in [each for each in drawn.items() for _ in range(FIRSTS)]:
            _add_step(board, folder)
            firsts[kind].append(1000 * board.timed(question()))
    seconds = {
        "opens": (opens, OPENS),
        "first of all": (first_of_all, FIRST_OF_ALL),
        "log read": (log_read, LOG_READ if args.trajectories <= SIZE else LOG_READ_LARGE),
        "follows": (follows, FOLLOWS),
    }
    rows: list[dict[str, Any]] = [
        {"what": f"{name}, s", **harness.spread("median", found)}
        for name, (found, _) in seconds.items()
    ]
    megabytes = round((folder / EVENTS).stat().st_size / 1e6, 1)
    rows.append({"what": "events.db, MB", "median": megabytes})
    for kind in drawn:
        first = _percentiles(firsts[kind], "first ")
        rows.append({"what": kind, **_percentiles(times[kind]), **first})
    targets = [
        harness.at_most(f"dashboard/{name}, seconds", max(found), limit)
        for name, (found, limit) in seconds.items()
    ]
    targets += [_slowest("p95", times, ANSWERS), _slowest("first p95", firsts, FIRST_ANSWERS)]
    return rows, targets


def _slowest(name: str, times: dict[str, list[float]], limit: float) -> harness.Target:
    """The kind of question whose percentile is the greatest."""
    found = {kind: harness.percentile(each, 0.95) for kind, each in times.items()}
    worst = max(found, key=lambda kind: found[kind])
    return harness.at_most(f"dashboard/{name} of {worst!r}, ms", found[worst], limit)


def _started(folder: Path) -> tuple[float, float, float]:
    """Seconds from the start of the command to the first overview, of the first question to all
    groups, and until the log is read."""
    began = time.perf_counter()
    with dashboard(folder) as board:
        board.ask()
        opened = time.perf_counter() - began
        board.ask("/trajectories/0/0")  # the tokenizer is loaded, which else happens meanwhile
        first = board.timed(("/groups", {"sort": "spread"}))
        return opened, first, _read_log(board)


def _read_log(board: Dashboard) -> float:
    """Seconds until the view of time is of all of the log."""
    began = time.perf_counter()
    while board.ask("/time")["read"] < 1:
        pass
    return time.perf_counter() - began


def _follow(board: Dashboard, folder: Path) -> float:
    """Seconds from the commit of one more step until the overview has it."""
    step, began = _add_step(board, folder)
    while board.ask()["steps"] < step:
        time.sleep(0.1)
    return time.perf_counter() - began


def _add_step(board: Dashboard, folder: Path) -> tuple[int, float]:
    """Commit one more step; return its number, and when it was committed."""
    now = board.ask()
    step, group = now["steps"], now["groups"]
    with closing(SqliteTrajectoryStore(folder / EVENTS)) as store:
        stores.group(store, group, row=0, epoch=99, prompt="new")
        stores.segment(store, (group, 0), 1, version=step)
        stores.finished(store, (group, 0), 1, 1.0, text="1")
        store.put_consumed(group, version=step, members=(0,))
        store.record(now["seconds"] + 1, [VersionPublished(step + 1)])
        store.commit()
        committed = time.perf_counter()
        row = {"step": step + 1, "time": now["seconds"] + 1, "step_time": 1.0}
        with (folder / metrics.FILE).open("a", encoding="utf-8") as file:
            file.write(json.dumps(row) + "\n")
    return step + 1, committed


def _percentiles(times: list[float], prefix: str = "") -> dict[str, float]:
    return {
        f"{prefix}p50, ms": round(statistics.median(times), 1),
        f"{prefix}p95, ms": round(harness.percentile(times, 0.95), 1),
    }


# -- the dashboard in a process of its own ---------------------------------------------------------

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


# -- what people ask, as the pages do --------------------------------------------------------------

SAMPLE = 20
"""Pages of groups that words are taken from."""


def kinds(board: Dashboard, draw: random.Random) -> Mapping[str, Callable[[], Question]]:
    """By name, what draws a question of that kind, of many that differ: none is wrong, and the same
    `draw` gives the same ones."""
    overview = board.ask()
    groups: list[dict[str, Any]] = []
    for _ in range(SAMPLE):
        offset = draw.randrange(max(overview["groups"] - 50, 1))
        groups += board.ask("/groups", offset=offset)["groups"]
    longest = board.ask("/groups", sort="length", descending="true")["groups"]
    log = board.ask("/log")
    outputs = [each["name"] for each in board.ask("/outputs")]
    seconds, pick = overview["seconds"], draw.choice
    group, step = partial(draw.randrange, overview["groups"]), draw.randrange

    def words(count: int) -> str:
        found = pick(groups)["prompt"].split()
        place = draw.randrange(max(len(found) - count + 1, 1))
        return " ".join(found[place : place + count])

    def after() -> str:
        event = draw.randrange(log["events"]) + 1
        return f"{event},0,{event}"

    def text() -> str:
        member = f"[{pick(groups)['group']},{draw.randrange(8)}]"
        return pick((member, "its process", "Boom", '"stop"'))

    def window() -> Question:
        width = seconds * 10 ** draw.uniform(-6, 0)
        start = draw.uniform(0, seconds - width)
        return "/time", {"from": start, "to": start + width}

    def response(among: list[dict[str, Any]]) -> Question:
        found = pick(among)
        member = max(found["members"], key=lambda each: each["length"])["member"]
        return f"/trajectories/{found['group']}/{member}", {}

    # Of both, values that can be called are drawn anew for each question.
    by = {"descending": lambda: pick(("true", "false"))}
    of_groups: dict[str, dict[str, Any]] = {
        "of a step, by spread": {"step": lambda: step(overview["steps"]) + 1, "sort": "spread"},
        "of a row": {"row": lambda: pick(groups)["row"]},
        "text, a word": {"text": lambda: words(1)},
        "text, two words": {"text": lambda: words(2)},
        "text, two letters": {"text": lambda: words(1)[:2]},
        "text of all": {"text": lambda: "question: "[step(6) :]},
        "text of none": {"text": lambda: f"no{draw.random()}"},
        "text, three filters, by length": {
            "text": lambda: words(1), "filter": lambda: draw.sample(list(FILTERS), 3),
            "sort": "length", **by,
        },
        **{f"by {name}, any page": {"sort": name, "offset": group, **by} for name in ORDERS},
        **{name: {"filter": name, "offset": lambda: group() % 500, **by} for name in FILTERS},
    }  # fmt: skip
    kind, instance = (lambda: pick(log["kinds"])), (lambda: pick(log["instances"]))
    of_log: dict[str, dict[str, Any]] = {
        "whole": {},
        "any page": {"after": after},
        "from a time": {"time": lambda: draw.uniform(0, seconds)},
        "of a group": {"group": group},
        "text": {"text": text, "after": after},
        "kind and instance": {"kind": kind, "instance": instance, "after": after},
        "all at once": {
            "kind": kind, "instance": instance, "text": text,
            "time": lambda: draw.uniform(0, seconds),
        },
    }  # fmt: skip
    return {
        "run: overview": lambda: ("", {}),
        "run: its curves": lambda: ("/metrics", {"name": METRICS}),
        "run: all metrics": lambda: ("/metrics", {"name": overview["metrics"]}),
        "time: whole": lambda: ("/time", {}),
        "time: zoomed": window,
        "group": lambda: (f"/groups/{group()}", {}),
        "response": partial(response, groups),
        "response: longest": partial(response, longest),
        "drafts": lambda: ("/drafts", {}),
        "setup": lambda: ("/about", {}),
        "outputs": lambda: ("/outputs", {}),
        "outputs: the end of one": lambda: (f"/outputs/{pick(outputs)}", {}),
        **{f"groups: {name}": partial(_asked, "/groups", q) for name, q in of_groups.items()},
        **{f"log: {name}": partial(_asked, "/log", q) for name, q in of_log.items()},
    }


def _asked(path: str, query: Mapping[str, Any]) -> Question:
    return path, {name: v() if callable(v) else v for name, v in query.items()}
