"""The dashboard over a very large run: how soon it opens, how fast each question is answered.

Part `pages`: a synthetic run (`logs/large.py`) of 200,000 responses and twenty million tokens,
served by `rhymeflow dashboard` in a process of its own and asked over HTTP as the pages ask. Times
are from the question to the whole answer, one question at a time; the store is in the page cache.
It opens when the overview is answered, counted from the start of the command. `first of all` is
the first question that needs all groups, and `log read` the time until all of the log is, for the
view of time. Percentiles are of each kind of question, never of the mix; `first` is of questions
each of which is asked after a new step has been committed. `follow` is the time from that commit
until the overview tells of the step, asked ten times a second.

Part `live`: steps per second of the demo while its view is polled every second, as the page
does, over those of the demo alone; pairs of runs, in turn.
"""

from __future__ import annotations

import argparse
import json
import math
import random
import statistics
import sys
import tempfile
import threading
import time
from contextlib import closing
from pathlib import Path
from typing import Any

from benchmarks import harness
from benchmarks.asking.questions import CURVES, kinds, look
from benchmarks.asking.server import Dashboard, Question, dashboard
from benchmarks.logs.large import Size, build
from benchmarks.training.train import IN_TURNS, published
from rhymeflow.core.events import VersionPublished
from rhymeflow.core.types import TrajectoryId
from rhymeflow.observe import metrics
from rhymeflow.store.schema import EVENTS
from rhymeflow.store.writer import SqliteTrajectoryStore

OPENS, FOLLOWS, WATCHED = 1.0, 2.0, 0.99
"""Seconds, seconds, a ratio."""
ANSWERS, FIRST_ANSWERS = 200.0, 400.0
"""Milliseconds: of a question, and of one that is the first for a version."""
LOG_READ, LOG_READ_LARGE, FIRST_OF_ALL = 2.5, 12.0, 3.0
"""Seconds: of a run of up to `SIZE` responses, of a larger one, of any."""
SIZE = 200_000
POLL_SECONDS = 1.0
NEW_STEPS = 20
FIRST = 4
"""The step that is counted first: what comes before waits for code to be compiled or loaded."""
PARTS = ("pages", "live")


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Add this benchmark's options."""
    parser.add_argument("--parts", choices=PARTS, default="pages", help="which (default: pages)")
    harness.add_number(parser, "--trajectories", SIZE, "of the synthetic run")
    harness.add_number(parser, "--tokens", Size().tokens, "of each, on average")
    harness.add_number(parser, "--questions", 50, "of each kind")
    harness.add_number(parser, "--firsts", 10, "questions of each kind after a new step")
    harness.add_number(parser, "--starts", 5, "of the command")
    parser.add_argument(
        "--run", metavar="DIR", type=Path, help="where the run is kept, or is to be had"
    )
    harness.add_number(parser, "--pairs", 5, "of runs of the demo, of part live")
    harness.add_number(parser, "--steps", 24, "of each of these runs")


def run(args: argparse.Namespace) -> dict[str, Any]:
    """Measure one part and report."""
    if args.parts == "live":
        rows, targets = live(args)
        return harness.report("dashboard-live", rows, targets, args, __doc__ or "")
    with tempfile.TemporaryDirectory(prefix="rhymeflow-dashboard-") as temporary:
        folder = args.run or Path(temporary) / "run"
        if not (folder / EVENTS).exists():
            folder.mkdir(parents=True, exist_ok=True)
            build(folder, Size(trajectories=args.trajectories, tokens=args.tokens))
        rows, targets = pages(folder, args)
        return harness.report("dashboard", rows, targets, args, __doc__ or "")


# -- pages -----------------------------------------------------------------------------------------


def pages(folder: Path, args: argparse.Namespace) -> harness.Found:
    """Everything about one large run."""
    opens, first_of_all, log_read = zip(
        *(_started(folder) for _ in range(args.starts)), strict=True
    )
    draw = random.Random(0)
    with dashboard(folder) as board:
        known = look(board, draw)
        board.ask("/trajectories/0/0")
        _read_log(board)
        drawn = kinds(known, draw)
        full = {
            kind: _times(board, kind, [question() for _ in range(args.questions)])
            for kind, question in drawn.items()
        }
        follows = [_follow(board, folder) for _ in range(NEW_STEPS)]
        firsts = {
            kind: [_first(board, folder, question()) for _ in range(args.firsts)]
            for kind, question in drawn.items()
        }
    rows: list[dict[str, Any]] = [
        {"what": "opens, s", **harness.spread("median", opens)},
        {"what": "first of all, s", **harness.spread("median", first_of_all)},
        {"what": "log read, s", **harness.spread("median", log_read)},
        {"what": "follows a new step, s", **harness.spread("median", follows)},
        {"what": "events.db, MB", "median": round((folder / EVENTS).stat().st_size / 1e6, 1)},
    ]
    for kind, times in full.items():
        first = _percentiles(firsts[kind], "first ")
        rows.append({"what": kind, **_percentiles(times), **first})
    limit = LOG_READ if args.trajectories <= SIZE else LOG_READ_LARGE
    targets = [
        harness.Target("dashboard/opens, seconds", max(opens), OPENS, at_most=True),
        harness.Target("dashboard/log read, seconds", max(log_read), limit, at_most=True),
        harness.Target(
            "dashboard/first of all, seconds", max(first_of_all), FIRST_OF_ALL, at_most=True
        ),
        _slowest("p95", full, ANSWERS),
        _slowest("first p95", firsts, FIRST_ANSWERS),
        harness.Target("dashboard/follows, seconds", max(follows), FOLLOWS, at_most=True),
    ]
    return rows, targets


def _slowest(name: str, times: dict[str, list[float]], limit: float) -> harness.Target:
    """The kind of question whose percentile is the greatest."""
    worst = max(times, key=lambda kind: _percentile(times[kind], 0.95))
    value = _percentile(times[worst], 0.95)
    return harness.Target(f"dashboard/{name} of {worst!r}, ms", value, limit, at_most=True)


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


def _first(board: Dashboard, folder: Path, question: Question) -> float:
    """Milliseconds of a question after a new step."""
    _add_step(board, folder)
    return 1000 * board.timed(question)


def _times(board: Dashboard, kind: str, questions: list[Question]) -> list[float]:
    """Milliseconds of each."""
    found = [1000 * board.timed(question) for question in questions]
    shown = " ".join(f"{name} {value:.1f}" for name, value in _percentiles(found).items())
    print(f"{kind}: {shown}", file=sys.stderr, flush=True)
    return found


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
        one = TrajectoryId(group, 0)
        store.put_group(group, row=0, epoch=99, prompt="new", prompt_tokens=[1], columns={})
        store.put_segment(
            one, start=0, version=step, instance="rollout-0", steps=1, drafted=0, tokens=[1],
            logprobs=[-0.5],
        )  # fmt: skip
        store.put_finished(one, length=1, reason="stop")
        store.put_text(one, "1")
        store.put_reward(one, reward=1.0, components={})
        store.put_consumed(group, version=step, members=(0,))
        store.record(now["seconds"] + 1, [VersionPublished(step + 1)])
        store.commit()
        committed = time.perf_counter()
        row = {"step": step + 1, "time": now["seconds"] + 1, "step_time": 1.0}
        with (folder / metrics.FILE).open("a", encoding="utf-8") as file:
            file.write(json.dumps(row) + "\n")
    return step + 1, committed


def _percentiles(times: list[float], prefix: str = "") -> dict[str, float]:
    if not times:
        return {}
    return {
        f"{prefix}p50, ms": round(statistics.median(times), 1),
        f"{prefix}p95, ms": round(_percentile(times, 0.95), 1),
    }


def _percentile(values: list[float], share: float) -> float:
    """The least of the values that so great a share of them does not exceed."""
    return sorted(values)[math.ceil(share * len(values)) - 1]


# -- live ------------------------------------------------------------------------------------------


def live(args: argparse.Namespace) -> harness.Found:
    """The demo, watched and not."""
    cpu: list[float] = []
    sides = {
        "watched": lambda: _steps_per_second(args.steps, cpu),
        "alone": lambda: _steps_per_second(args.steps, None),
    }
    values = harness.interleave(sides, args.pairs, "steps/s")
    rows = [harness.side_row(side, values[side], "steps/s") for side in sides]
    rows.append(harness.side_row("dashboard", cpu, "CPU seconds per second"))
    ratio = harness.median_ratio(values["watched"], values["alone"])
    return rows, [harness.Target("dashboard/watched, steps", ratio, WATCHED)]


def _steps_per_second(steps: int, cpu: list[float] | None) -> float:
    """Of one run of the demo; `cpu`: it is watched, and this is what that took."""
    with tempfile.TemporaryDirectory(prefix="rhymeflow-bench-") as temporary:
        folder = Path(temporary) / "run"
        is_over = threading.Event()
        watchers = [threading.Thread(target=_watch, args=(folder, is_over, cpu))]
        if cpu is None:
            watchers = []
        for each in watchers:
            each.start()
        try:
            times = published({**IN_TURNS, "learner.max_steps": steps, "run.output_dir": folder})
        finally:
            is_over.set()
            for each in watchers:
                each.join()
    return (steps - FIRST) / (times[-1] - times[FIRST - 1])


def _watch(folder: Path, is_over: threading.Event, cpu: list[float]) -> None:
    """Poll the view of the run until it is over, from when it has begun."""
    while not (folder / "metrics.jsonl").exists():
        if is_over.wait(0.2):
            return
    with dashboard(folder) as board:
        began, before = time.perf_counter(), board.cpu_seconds()
        while not is_over.wait(POLL_SECONDS):
            names = set(board.ask()["metrics"])
            board.ask("/metrics", name=[name for name in CURVES if name in names])
        cpu.append((board.cpu_seconds() - before) / (time.perf_counter() - began))
