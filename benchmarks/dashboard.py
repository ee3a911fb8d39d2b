"""The dashboard over a very large run: how soon it opens, how fast each question is answered.

Part `pages`: a synthetic run (`logs/large.py`) of a million responses and a hundred million tokens,
served by `rhymeflow dashboard` in a process of its own and asked over HTTP as the pages ask. Times
are from the question to the whole answer, one question at a time; the store is in the page cache.
It opens when the overview is answered, counted from the start of the command. Percentiles are of
each kind of question, never of the mix. `filling`: the same questions while the index is made, and
with those answers from as much as there is by then. The index itself is timed while nothing but the
overview is asked, once a second. `follow` is the time from a commit of the run's writer until the
overview tells of the new step, asked ten times a second.

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
from benchmarks.durability import FIRST
from benchmarks.logs.large import Size, build
from benchmarks.training.train import IN_TURNS, published
from rhymeflow.core.events import VersionPublished
from rhymeflow.core.types import TrajectoryId
from rhymeflow.dashboard.side_index import FILE
from rhymeflow.observe import metrics
from rhymeflow.store.schema import EVENTS
from rhymeflow.store.writer import SqliteTrajectoryStore

OPENS, ANSWERS, FOLLOWS, WATCHED = 1.0, 200.0, 2.0, 0.99
"""Seconds, milliseconds, seconds, a ratio."""
POLL_SECONDS = 1.0
NEW_STEPS = 20
PARTS = ("pages", "live")


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Add this benchmark's options."""
    parser.add_argument("--parts", choices=PARTS, default="pages", help="which (default: pages)")
    harness.add_number(parser, "--trajectories", Size().trajectories, "of the synthetic run")
    harness.add_number(parser, "--tokens", Size().tokens, "of each, on average")
    harness.add_number(parser, "--questions", 50, "of each kind")
    harness.add_number(parser, "--starts", 5, "of the command, without an index and with one")
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
    without = [_opened(folder, forget=True) for _ in range(args.starts)]
    index = _index(folder)
    with_one = [_opened(folder) for _ in range(args.starts)]
    draw = random.Random(0)
    with dashboard(folder) as board:
        _wait_for_index(board)
        known = look(board, draw)
        board.ask("/trajectories/0/0")  # the tokenizer is loaded
        asked = {
            kind: [question() for _ in range(args.questions)]
            for kind, question in kinds(known, draw).items()
        }
        full = {kind: _times(board, kind, questions) for kind, questions in asked.items()}
        follows = [_follow(board, folder) for _ in range(NEW_STEPS)]
    filling = _while_filling(folder, asked)
    rows: list[dict[str, Any]] = [
        {"what": "opens without an index, s", **harness.spread("median", without)},
        {"what": "opens with an index, s", **harness.spread("median", with_one)},
        {"what": "follows a new step, s", **harness.spread("median", follows)},
        *({"what": name, "median": round(value, 2)} for name, value in index.items()),
    ]
    for kind, times in full.items():
        part = filling.get(kind, [])
        rows.append({"what": kind, **_percentiles(times), **_percentiles(part, "filling ")})
    worst = max(full, key=lambda kind: _percentile(full[kind], 0.95))
    slowest = _percentile(full[worst], 0.95)
    targets = [
        harness.Target("dashboard/opens, seconds", max(without + with_one), OPENS, at_most=True),
        harness.Target(f"dashboard/p95 of {worst!r}, ms", slowest, ANSWERS, at_most=True),
        harness.Target("dashboard/follows, seconds", max(follows), FOLLOWS, at_most=True),
    ]
    return rows, targets


def _opened(folder: Path, *, forget: bool = False) -> float:
    """Seconds from the start of the command to the first overview."""
    if forget:
        _forget(folder)
    began = time.perf_counter()
    with dashboard(folder) as board:
        board.ask()
        return time.perf_counter() - began


def _forget(folder: Path) -> None:
    for path in folder.glob(f"{FILE}*"):
        path.unlink()


def _index(folder: Path) -> dict[str, float]:
    """How long the index takes, and what it is."""
    _forget(folder)
    began = time.perf_counter()
    with dashboard(folder) as board:
        _wait_for_index(board, every=1.0)
        took = time.perf_counter() - began
    index = sum(path.stat().st_size for path in folder.glob(f"{FILE}*"))
    return {
        "index: until it is full, s": took,
        "index: its size, MB": index / 1e6,
        "events.db: its size, MB": (folder / EVENTS).stat().st_size / 1e6,
    }


def _wait_for_index(board: Dashboard, every: float = 0.1) -> None:
    while board.ask()["share_indexed"] < 1:
        time.sleep(every)


def _times(board: Dashboard, kind: str, questions: list[Question]) -> list[float]:
    """Milliseconds of each."""
    found = [1000 * board.timed(question) for question in questions]
    shown = " ".join(f"{name} {value:.1f}" for name, value in _percentiles(found).items())
    print(f"{kind}: {shown}", file=sys.stderr, flush=True)
    return found


def _while_filling(folder: Path, asked: dict[str, list[Question]]) -> dict[str, list[float]]:
    """Milliseconds by kind, as many as could be asked; kinds in turn."""
    _forget(folder)
    found: dict[str, list[float]] = {}
    with dashboard(folder) as board:
        board.ask("/trajectories/0/0")
        for place in range(min(map(len, asked.values()))):
            for kind, questions in asked.items():
                path, query = questions[place]
                if kind.startswith("log:") and ("kind" in query or "instance" in query):
                    log = board.ask("/log")
                    met = {None, *log["kinds"], *log["instances"]}
                    if not {query.get("kind"), query.get("instance")} <= met:
                        continue  # the index has not met it yet, and the answer would be an error
                if kind == "group" and int(path.rpartition("/")[2]) >= board.ask()["groups"]:
                    continue
                found.setdefault(kind, []).append(1000 * board.timed((path, query)))
            if board.ask()["share_indexed"] == 1:
                return found
    return found


def _follow(board: Dashboard, folder: Path) -> float:
    """Seconds from the commit of one more step until the overview has it."""
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
        began = time.perf_counter()
        row = {"step": step + 1, "time": now["seconds"] + 1, "step_time": 1.0}
        with (folder / metrics.FILE).open("a", encoding="utf-8") as file:
            file.write(json.dumps(row) + "\n")
        while board.ask()["steps"] == step:
            time.sleep(0.1)
        return time.perf_counter() - began


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
