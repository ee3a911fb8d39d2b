"""Spans and shares from the side index: the same as by going through all spans."""

from __future__ import annotations

import itertools
import sqlite3
from typing import Any

import numpy as np
import pytest
from hypothesis import example, given
from hypothesis import strategies as st

from rhymeflow.dashboard import side_spans
from rhymeflow.dashboard.spans import LEARNER, Span
from rhymeflow.dashboard.time_view import lanes
from tests.dashboard.test_time import SPAN, A, B, covered, spans_of


class Memory:
    """A side index that has nothing else."""

    def __init__(self) -> None:
        self._connection = sqlite3.connect(":memory:", isolation_level=None)
        self._connection.execute("ATTACH ':memory:' AS side")
        self._connection.executescript(side_spans.TABLES)

    def query(self, statement: str, *values: Any) -> list[tuple[Any, ...]]:
        return self._connection.execute(statement, values).fetchall()


LANES = st.lists(SPAN, max_size=12)


@example([(0, 3), (0, 3), (0, 0)], [(0, 3), (0, 3)], [], 3, 2, 1, 1)
@given(LANES, LANES, LANES, st.integers(0, 60), st.integers(1, 60), st.integers(1, 9),
       st.integers(0, 12))  # fmt: skip
def test_the_same_as_all_spans(
    learner: Any, first: Any, second: Any, start: int, width: int, most: int, cut: int
) -> None:
    groups = [
        spans_of(learner, LEARNER, "training"),
        spans_of(first, A, "pull"),
        spans_of(second, A, "generating"),
        spans_of(first, B, "pull"),
    ]
    memory: Any = Memory()
    for part in (slice(0, cut), slice(cut, None)):
        side_spans.put(memory, [span for group in groups for span in group[part]])
    stop = start + width
    inside = [
        span for group in groups for span in group if span.end >= start and span.start <= stop
    ]
    assert sorted(side_spans.within(memory, start, stop)) == sorted(inside)
    spans, shares = side_spans.bounded(memory, start, stop, most)
    edges = np.linspace(start, stop, most + 1)
    for lane in (LEARNER, A, B):
        here = [span for span in inside if span.lane == lane]
        assert (lane in shares) == (len(here) > most), "zero lengths included"
        if lane not in shares:
            assert {span for span in spans if span.lane == lane} == set(here)
            continue
        assert set(shares[lane]) == {span.kind for span in here}
        for kind, found in shares[lane].items():
            these = [span for span in here if span.kind == kind]
            expected = [
                covered(these, low, high) / (high - low) for low, high in itertools.pairwise(edges)
            ]
            assert found == pytest.approx(expected)


def test_what_goes_on_adds_to_the_shares() -> None:
    known = {A: {"pull": np.array([0.5] * 400)}}
    going_on = [Span(A, "pull", 300, 400, 1), Span(A, "there", 0, 400, None)]
    found = lanes(going_on, 0, 400, known)
    assert [each["name"] for each in found] == [A]
    assert found[0]["shares"]["pull"] == [0.5] * 300 + [1.5] * 100
    assert found[0]["shares"]["there"] == [1.0] * 400
