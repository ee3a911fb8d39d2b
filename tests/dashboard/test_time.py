"""Spans of the log, shares of parts, and what limits a run: against slow direct counting."""

import itertools
import json
from collections.abc import Iterable, Mapping
from typing import Any, NamedTuple

import msgspec
import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from rhymeflow.config.load import read_config
from rhymeflow.core.commands import Accumulate, Route, Train
from rhymeflow.core.events import (
    Accumulated,
    InstanceJoined,
    LearnerReady,
    Tick,
    TrajectoryFinished,
    VersionPublished,
)
from rhymeflow.core.types import TrajectoryId
from rhymeflow.dashboard import time_view
from rhymeflow.dashboard.run import Run
from rhymeflow.dashboard.time_view import ENVIRONMENTS, LEARNER, Body, Fold, Lane, RunTimeline
from rhymeflow.observe.inspect import Question, as_json
from rhymeflow.sim.simulate import simulate
from tests.dashboard.conftest import FIELDS
from tests.observe.runs import begun, stored

A, B = "rollout-0", "rollout-1"


class Span(NamedTuple):
    lane: str
    kind: str
    start: float
    end: float
    version: int = -1  # -1: of none


def spans_in(lanes: Mapping[tuple[str, str], Lane]) -> set[Span]:
    return {
        Span(*key, *each)
        for key, lane in lanes.items()
        for each in zip(lane.starts, lane.ends, lane.versions, strict=True)
    }


def ended(fold: Fold, *kinds: str) -> list[tuple[str, float, float]]:
    """Lane, start and end of spans of these kinds, by their ends."""
    found = [each for each in spans_in(fold.lanes) if each.kind in kinds]
    return [(s.lane, s.start, s.end) for s in sorted(found, key=lambda s: (s.end, s.start))]


def line(time: float, kind: str, **body: Any) -> tuple[float, str, Body]:
    return time, kind, msgspec.convert(body, Body)


LOG = [
    line(0, "InstanceJoined", instance=A, version=0),
    line(1, "Route", instance=A, trajectory=[0, 0], version=0),
    line(2, "Route", instance=A, trajectory=[0, 1], version=0),
    line(3, "TrajectoryFinished", instance=A, trajectory=[0, 0]),
    line(4, "Evaluate", instance=A, version=0),
    line(5, "TurnEnded", instance=A, trajectory=[0, 1]),
    line(6, "Train", version=0),
    line(7, "Evaluated", instance=A, version=0),
    line(7.5, "Observed", trajectory=[0, 1]),
    line(8, "Route", instance=A, trajectory=[0, 1], version=0),
    line(9, "Abort", instance=A, trajectories=[[0, 1], [0, 5]]),
    line(10, "VersionPublished", version=1),
    line(10, "Pull", instance=A, version=1),
    line(11, "Pulled", instance=A, version=1),
    line(12, "Route", instance=A, trajectory=[1, 0], version=1),
    line(13, "InstanceLeft", instance=A, reason="died"),
    line(14, "InstanceJoined", instance=f"{A}.1", version=1),
    line(14, "Accumulate", version=1),
    line(15, "Accumulated", version=1),
    line(16, "Accumulate", version=1),
    line(17, "Train", version=1),
    line(18, "Accumulated", version=1),
    line(19, "VersionPublished", version=2),
    line(20, "Train", version=2),
    line(21, "Accumulated", version=3),
    line(22, "Accumulate", version=3),
    line(23, "VersionPublished", version=3),
    line(24, "Accumulated", version=3),
]
SPANS = {
    Span(A, "generating", 1, 5, 0),
    Span(A, "evaluation", 4, 7, 0),
    Span(LEARNER, "training", 6, 10, 1),
    Span(A, "waiting", 5, 7.5),
    Span(ENVIRONMENTS, "answering", 5, 7.5),
    Span(A, "generating", 8, 9, 0),
    Span(A, "pull", 10, 11, 1),
    Span(A, "generating", 12, 13, 1),
    Span(A, "there", 0, 13, 0),
    Span(LEARNER, "training", 14, 15, 2),
    Span(LEARNER, "training", 16, 17, 2),
    Span(LEARNER, "training", 17, 19, 2),
    Span(LEARNER, "training", 20, 22, 3),
    Span(LEARNER, "training", 22, 24, 4),
}


def folded(lines: Iterable[tuple[float, str, Body]]) -> Fold:
    fold = Fold()
    for each in lines:
        fold.take(*each)
    return fold


def test_what_went_on_when():
    fold = folded(LOG)
    assert spans_in(fold.lanes) == SPANS
    assert spans_in(fold.within(0, 99)) - SPANS == {Span(f"{A}.1", "there", 14, 24, 1)}


def test_an_instance_waits_only_while_it_has_nothing_else():
    fold = folded(
        [
            line(0, "InstanceJoined", instance=A, version=0),
            line(0, "InstanceJoined", instance=B, version=0),
            *(line(1, "Route", instance=A, trajectory=[0, m], version=0) for m in range(3)),
            line(2, "TurnEnded", instance=A, trajectory=[0, 0]),
            *[line(3, "TurnEnded", instance=A, trajectory=[0, 1])] * 2,
            line(4, "TrajectoryFinished", instance=A, trajectory=[0, 2]),
            line(5, "EpisodeEnded", trajectory=[0, 0]),
            line(6, "Route", instance=A, trajectory=[1, 0], version=0),
            line(7, "TrajectoryFinished", instance=A, trajectory=[1, 0]),
            line(8, "CloseEnvironments", trajectories=[[0, 1]]),
            line(9, "Observed", trajectory=[0, 1]),  # closed, and hears of it late
            line(10, "Route", instance=B, trajectory=[2, 0], version=0),
            line(11, "TurnEnded", instance=B, trajectory=[2, 0]),
            line(12, "InstanceLeft", instance=B, reason="died"),
            line(13, "EnvironmentFailed", trajectory=[2, 0]),
        ]
    )
    assert ended(fold, "waiting", "answering") == [
        *((A, 4, 6), (ENVIRONMENTS, 2, 8), (A, 7, 8)),
        *((B, 11, 12), (ENVIRONMENTS, 11, 13)),
    ]
    assert set(fold.within(13, 13)) == {(A, "there"), (ENVIRONMENTS, "answering")}


def test_how_long_an_instance_prefilled_is_known_between_two_reports():
    fold = folded(
        [
            line(1, "InstanceJoined", instance=A, version=0),
            line(2, "Snapshot", instance=A, prefill_seconds=0.25),
            line(3, "Snapshot", instance=A, prefill_seconds=0.25),
            line(4, "Snapshot", instance=A, prefill_seconds=0.75),
            line(4.5, "Snapshot", instance=A, prefill_seconds=3.0),  # by another clock
            line(5, "Snapshot", instance=B),  # of a log of before there was this
        ]
    )
    assert ended(fold, "prefill") == [(A, 1, 1.25), (A, 3, 3.5), (A, 4, 4.5)]


SPAN = st.tuples(st.integers(0, 40), st.integers(0, 8))


def spans_of(drawn: list[tuple[int, int]], lane: str, kind: str) -> list[Span]:
    """Spans that do not overlap: gaps and lengths, one after the other."""
    found, time = [], 0
    for gap, length in drawn:
        found.append(Span(lane, kind, time + gap, time + gap + length))
        time += gap + length
    return found


def window(spans: Iterable[Span]) -> dict[tuple[str, str], Lane]:
    found: dict[tuple[str, str], Lane] = {}
    for span in spans:
        found.setdefault((span.lane, span.kind), Lane()).put(*span[2:])
    return found


def covered(spans: list[Span], start: float, end: float) -> float:
    return sum(max(min(each.end, end) - max(each.start, start), 0) for each in spans)


@given(
    st.lists(SPAN, min_size=1, max_size=12),
    st.integers(0, 60),
    st.integers(1, 60),
    st.integers(1, 9),
)
def test_shares_of_parts(drawn, start, width, parts):
    spans = spans_of(drawn, A, "pull")
    edges = np.linspace(start, start + width, parts + 1)
    expected = [covered(spans, low, high) / (high - low) for low, high in itertools.pairwise(edges)]
    lane = window(spans)[A, "pull"]
    assert time_view.shares(lane, edges) == pytest.approx(expected)
    inside = [s for s in spans if s.end >= start and s.start <= start + width]
    part = lane.between(start, start + width)
    assert list(zip(part.starts, part.ends, strict=True)) == [(s.start, s.end) for s in inside]
    if inside:
        assert time_view.shares(part, edges) == pytest.approx(expected)


def test_a_lane_of_many_spans_is_given_by_shares():
    spans = [Span(A, "pull", i, i + 0.5, i) for i in range(time_view.PARTS + 1)]
    spans += [Span(f"rollout-{n}", "pull", 0, 1, 1) for n in (10, 2)]
    found = time_view.lanes(
        window([*spans, Span(LEARNER, "training", 0, 100, 1)]), 0, time_view.PARTS + 1
    )
    assert [each["name"] for each in found] == [LEARNER, A, "rollout-2", "rollout-10"]
    assert found[0]["spans"] == [["training", 0, 100, 1]]
    assert len(found[1]["shares"]["pull"]) == time_view.PARTS
    assert sum(found[1]["shares"]["pull"]) / time_view.PARTS == pytest.approx(0.5, abs=0.01)


@given(
    st.lists(SPAN, max_size=6), st.lists(SPAN, max_size=6), st.lists(SPAN, max_size=6),
    st.lists(SPAN, max_size=6), st.integers(0, 30), st.integers(1, 60),
)  # fmt: skip
def test_what_limits_a_run(training, first, second, waiting, start, width):
    """Second by second; spans begin and end on whole ones."""
    spans = [
        *spans_of(training, LEARNER, "training"),
        *spans_of(first, A, "generating"),
        *spans_of(second, B, "generating"),
        *spans_of(waiting, A, "waiting"),
        Span(A, "there", 0, 1000, 0),
        Span(B, "there", 10, 1000, 0),
        Span(B, "pull", 0, 1000, 0),
    ]

    def works(lane: str, second: int, kinds: Any = ("training", "generating")) -> bool:
        return any(
            each.lane == lane and each.kind in kinds and each.start <= second < each.end
            for each in spans
        )

    counts = dict.fromkeys(("both", "learner", "instances", "environments", "neither"), 0)
    for lane in (A, B):
        for second in range(start if lane == A else max(start, 10), start + width):
            learner, instance = works(LEARNER, second), works(lane, second)
            name = {(1, 1): "both", (1, 0): "learner", (0, 1): "instances", (0, 0): "neither"}
            is_asked = works(lane, second, ("waiting",)) and not (learner or instance)
            counts["environments" if is_asked else name[learner, instance]] += 1
    found = time_view.limits(window(spans), start, start + width)
    assert sum(found.values()) == pytest.approx(1)
    assert found == pytest.approx({k: v / sum(counts.values()) for k, v in counts.items()})


def test_what_limits_a_run_is_what_the_terminal_says(tmp_path):
    """Three steps of ten seconds: the learner computes in pieces of one second, eight of them, and
    the instance generates for the first five."""
    begun(tmp_path, schedule={"name": "one_step"})
    rows = []
    with stored(tmp_path) as store:
        store.record(0.0, [LearnerReady(0), InstanceJoined(A, 0, 8, 100)])
        for version, start in enumerate((0.0, 10.0, 20.0)):
            one = TrajectoryId(version, 0)
            store.record_command(store.record(start, [Tick()]), Route(A, 1, one, 0))
            for second in range(7):
                tick = store.record(start + second, [Tick()])
                store.record_command(tick, Accumulate(version, (second,), ((0,),)))
                store.record(start + second + 1, [Accumulated(version, second + 1)])
                if second == 4:
                    store.record(start + 5, [TrajectoryFinished(one, A, 7, "stop")])
            store.record_command(store.record(start + 9, [Tick()]), Train(version, (0,), ((0,),)))
            store.record(start + 10, [VersionPublished(version + 1)])
            row = {"step": version + 1, "time": start + 10, "step_time": 10.0}
            rows.append(row | {"idle/rollout": 0.5, "idle/learner": 0.2, "staleness/max": 1.0})
    (tmp_path / "metrics.jsonl").write_text("".join(f"{json.dumps(row)}\n" for row in rows))
    limit = time_view.found(Run(tmp_path, "one"))["limits"]
    terminal = json.loads(as_json(tmp_path, Question()))["limit"]
    assert (limit["line"], limit["steps"]) == (terminal["line"], terminal["steps"])
    assert limit["line"] == "limited by the learner: instances idle 50%, learner 20%"
    shares = [limit[name] for name in ("both", "learner", "instances", "neither")]
    assert shares == pytest.approx([0.5, 0.3, 0.0, 0.2]), "of two steps, not of so many pieces"


# -- how batches filled ----------------------------------------------------------------------------

# Of each group: when it was first routed, when its eighth reward came, when it was trained on.
DIRECT = """
SELECT g.ending_version,
    (SELECT time FROM first_routes r WHERE r.group_id = g.group_id ORDER BY seq LIMIT 1),
    (SELECT time FROM events WHERE kind = 'TrajectoryRewarded'
        AND json_extract(body, '$.trajectory[0]') = g.group_id ORDER BY seq LIMIT 1 OFFSET 7),
    (SELECT e.time FROM commands c JOIN events e ON e.seq = c.event
        WHERE c.kind = 'Train' AND json_extract(c.body, '$.version') = g.ending_version)
FROM groups g WHERE ending = 'consumed' ORDER BY 1, 2, 3"""


def test_how_batches_filled(tmp_path, monkeypatch):
    """The log is read in many small parts, of which each answer reads one more."""
    monkeypatch.setattr(time_view, "EVENTS_AT_ONCE", 7)
    monkeypatch.setattr(time_view, "READING_SECONDS", 0.0)
    extra = {"schedule.extra_groups": "1", "schedule.extra_generations": "2"}
    config = read_config("demo", {**FIELDS, **extra, "learner.max_steps": "12"})
    simulate(config, output=tmp_path / "run")
    run = Run(tmp_path / "run", "run")
    reads = [time_view.found(run)["read"]]
    while reads[-1] < 1:
        reads.append(time_view.found(run)["read"])
    assert reads == sorted(reads)
    assert len(reads) > 10
    with run.kept(RunTimeline) as whole:
        expected = whole.reader.query(DIRECT)
        batches = whole.filling.batches
        assert whole.filling.open() == [], "every group has ended"
    filled = [(b.version, *group, b.trained) for b in batches for group in b.groups]
    assert sorted(filled) == expected
    assert [each["version"] for each in time_view.found(run)["batches"]] == list(range(4, 12)), (
        "the newest"
    )
    second = batches[1]
    start, end = min(second.groups)[0], second.trained + 0.01
    shown = {each["version"]: each for each in time_view.found(run, start, end)["batches"]}
    assert 11 not in shown
    batch = shown[1]
    assert (batch["size"], batch["trained"]) == (4, second.trained)
    assert batch["begun"][-1] == 4
    for place in (len(batch["begun"]) // 2, len(batch["begun"]) - 1):
        time = start + (end - start) * place / (time_view.POINTS - 1)
        assert batch["complete"][place] == sum(complete <= time for _, complete in second.groups)
