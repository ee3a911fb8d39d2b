"""Events survive storage, whatever they hold."""

import datetime
import json
import math
import zlib
from dataclasses import fields
from typing import get_type_hints

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from rhymeflow.core.events import Evaluated
from rhymeflow.core.types import Ending, FinishReason, TrajectoryId
from rhymeflow.store import codec
from rhymeflow.store.schema import SCHEMA_VERSION

NUMBERS = st.integers(0, 2**53)
BY_TYPE = {
    int: NUMBERS,
    str: st.text(),
    float: st.floats(allow_nan=False, allow_infinity=False),
    int | None: st.none() | NUMBERS,
    float | None: st.none() | st.floats(allow_nan=False, allow_infinity=False),
    dict[str, tuple[float, float]] | None: st.none()
    | st.dictionaries(st.text(), st.tuples(*[st.floats(-1e300, 1e300)] * 2)),
    FinishReason: st.sampled_from(["stop", "length", "finished_early"]),
    TrajectoryId: st.builds(TrajectoryId, NUMBERS, NUMBERS),
    Ending: st.sampled_from(["filtered", "aborted"]),
    tuple[int, ...]: st.lists(NUMBERS).map(tuple),
    tuple[tuple[int, ...], ...]: st.lists(st.lists(NUMBERS).map(tuple)).map(tuple),
    tuple[TrajectoryId, ...]: st.lists(st.builds(TrajectoryId, NUMBERS, NUMBERS)).map(tuple),
}


def events_of(kind: type) -> st.SearchStrategy:
    hints = get_type_hints(kind)
    return st.builds(kind, **{field.name: BY_TYPE[hints[field.name]] for field in fields(kind)})


KINDS = {**codec.KINDS, **codec.COMMANDS}


@pytest.mark.parametrize("kind", KINDS.values(), ids=KINDS.keys())
def test_every_event_and_every_command_comes_back_equal(kind):

    @given(events_of(kind))
    def check(event):
        name, body = codec.encode(event)
        back = codec.decode(name, body)
        assert back == event
        assert type(back) is kind
        assert [type(getattr(back, f.name)) for f in fields(kind)] == [
            type(getattr(event, f.name)) for f in fields(kind)
        ]

    check()


def test_what_events_hold_belongs_to_the_version_of_the_store():
    """A log of other events is to be refused by its version, not by an error in the middle."""
    assert len(KINDS) == len(codec.KINDS) + len(codec.COMMANDS), "each has a name of its own"
    shape = {name: [(f.name, str(f.type)) for f in fields(k)] for name, k in KINDS.items()}
    found = zlib.crc32(repr(sorted(shape.items())).encode())
    assert (SCHEMA_VERSION, found) == (20, 2765560396), (
        "raise SCHEMA_VERSION, and write down the new sum"
    )


@pytest.mark.parametrize("bad", [math.nan, math.inf])
def test_no_event_holds_what_is_no_number(bad):
    with pytest.raises(AssertionError, match="reward"):
        codec.encode(Evaluated("rollout-0", 0, bad))


def test_columns_become_readable_json():
    columns = {
        "answer": np.int64(3),
        "steps": np.array([1, 2]),
        "day": datetime.date(2026, 1, 2),
        "score": math.nan,
        "nested": {"a": [None, "é"]},
    }
    assert json.loads(codec.to_json(columns)) == {
        "answer": 3,
        "steps": [1, 2],
        "day": "2026-01-02",
        "score": None,
        "nested": {"a": [None, "é"]},
    }
