"""Writes a timeline in Chrome's trace event format, which Perfetto and chrome://tracing show.

One track for the learner and one for each instance, with what it did and under which version; for
each instance the trajectories that run and the tokens in its cache, as counters. Virtual seconds
become the format's microseconds. Knows nothing of how the timeline came about.
"""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from rhymeflow.sim.timeline import Row, Timeline

_LEARNER, _INSTANCES, _LOADS = 1, 2, 3
_COUNTER_POINTS = 500
"""Of each instance; more cannot be distinguished and make the file large."""


def write(path: Path, timeline: Timeline, num_rows: int) -> None:
    """Write the trace of the learner and of `num_rows` instances, evenly chosen."""
    with path.open("w", encoding="utf-8") as file:
        file.write('{"displayTimeUnit": "ms", "traceEvents": [\n')
        file.write(",\n".join(json.dumps(event) for event in _events(timeline, num_rows)))
        file.write("\n]}\n")


def _events(timeline: Timeline, num_rows: int) -> Iterator[dict[str, Any]]:
    end, rows = timeline.end, timeline.sample(num_rows)
    shown = "" if len(rows) == len(timeline.instances) else f" ({len(rows)} of all)"
    for pid, name in ((_LEARNER, "learner"), (_INSTANCES, f"instances{shown}"), (_LOADS, "load")):
        yield _named("process_name", pid, 0, name)
        yield {"ph": "M", "name": "process_sort_index", "pid": pid, "args": {"sort_index": pid}}
    yield from _track(timeline.learner, _LEARNER, 0, end)
    for index, row in enumerate(rows):
        yield from _track(row, _INSTANCES, index, end)
        yield from _counters(row, end)


def _track(row: Row, pid: int, tid: int, end: float) -> Iterator[dict[str, Any]]:
    yield _named("thread_name", pid, tid, row.name)
    for span in row.with_idle(end):
        event = {
            "ph": "X",
            "name": span.kind if span.kind == "idle" else f"{span.kind} v{span.version}",
            "cat": span.kind,
            "pid": pid,
            "tid": tid,
            "ts": round(span.start * 1e6, 3),
            "dur": round((span.end - span.start) * 1e6, 3),
            "args": {"version": span.version},
        }
        if span.kind == "idle":
            event["cname"] = "grey"
        yield event


def _counters(row: Row, end: float) -> Iterator[dict[str, Any]]:
    shortest, shown = end / _COUNTER_POINTS, -end
    for i, (time, running, kv_tokens) in enumerate(row.loads):
        is_last = i == len(row.loads) - 1
        if time - shown < shortest and not is_last:
            continue
        shown = time
        for name, value in (("running", running), ("KV tokens", kv_tokens)):
            yield {
                "ph": "C",
                "name": f"{row.name} {name}",
                "pid": _LOADS,
                "ts": round(time * 1e6, 3),
                "args": {name: value},
            }


def _named(kind: str, pid: int, tid: int, name: str) -> dict[str, Any]:
    return {"ph": "M", "name": kind, "pid": pid, "tid": tid, "args": {"name": name}}
