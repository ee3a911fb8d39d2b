"""The coordinator's state, written and read back, goes on as it would have."""

from __future__ import annotations

import pickle
import random

import pytest

from rhymeflow.core import events
from rhymeflow.core.coordinator import Coordinator
from rhymeflow.core.protocol.group import Member, MemberState
from rhymeflow.runtime import snapshot
from rhymeflow.runtime.snapshot import Snapshot
from tests.core.test_streams import STREAMS, Stream, plan, schedule


def attempt(path):
    """What a stream's first attempt is made of, and its events."""
    (first, *rest), stream = Stream(path).lines, Stream(path)
    rows = []
    for line in rest:
        if isinstance(line, dict):
            break
        rows.append(line[0])
    rules = plan(first["plan"]), schedule(first["schedule"])
    return rules, [stream.item("events", events, row) for row in rows]


RECORDED = [path for path in STREAMS if "simulated" not in path.name and len(attempt(path)[1]) > 50]


@pytest.mark.parametrize("path", RECORDED, ids=lambda path: path.name.split(".")[0])
def test_it_gives_the_same_commands_from_any_cut_on(path):
    rules, happened = attempt(path)
    straight = Coordinator(*rules)
    expected = [straight.handle(event) for event in happened]
    for cut in sorted(random.Random(0).sample(range(1, len(happened)), 3)):
        coordinator = Coordinator(*rules)
        for event in happened[:cut]:
            coordinator.handle(event)
        blob = snapshot.write(Snapshot(coordinator.state, 5, None))
        coordinator.state, num_drawn, _ = snapshot.read(blob)
        coordinator.state.restore(*attempt(path)[0])
        assert num_drawn == 5
        assert [coordinator.handle(event) for event in happened[cut:]] == expected[cut:]


def test_states_of_members_are_written_by_value_in_every_python():
    """3.11.2 would write `getattr`, which is not read; no run could be resumed under it."""
    for state in MemberState:
        assert state.__reduce_ex__(5) == (MemberState, (state.value,))
        assert pickle.loads(pickle.dumps(state, protocol=5)) is state
    assert "__reduce_ex__" in vars(MemberState)


def test_bytes_of_another_run_no_code():
    class Evil:
        def __reduce__(self):
            return print, ("code",)

    evil = pickle.dumps(Evil())
    blob = snapshot.digest_of_classes() + snapshot._digest(evil) + evil
    with pytest.raises(pickle.UnpicklingError, match=r"builtins.print is no part"):
        snapshot.read(blob)


def test_a_changed_byte_is_noticed():
    """Pickle would read many of them without a word."""
    rules, _ = attempt(RECORDED[0])
    blob = snapshot.write(Snapshot(Coordinator(*rules).state, 5, None))
    assert snapshot.read(blob) is not None
    for index in random.Random(0).sample(range(len(blob)), 20):
        changed = bytearray(blob)
        changed[index] ^= 1
        assert snapshot.read(bytes(changed)) is None


def test_the_digest_tells_of_a_field_more(monkeypatch):
    before = snapshot.digest_of_classes.__wrapped__()
    assert snapshot.digest_of_classes.__wrapped__() == before
    monkeypatch.setitem(Member.__annotations__, "one_more", "int")
    assert snapshot.digest_of_classes.__wrapped__() != before
