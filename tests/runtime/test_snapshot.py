"""The coordinator's state as bytes; that it goes on as it would have is looked at by fake runs."""

import pickle
import random

import pytest

from rhymeflow.config import Config
from rhymeflow.core.protocol.group import Member, MemberState
from rhymeflow.runtime import snapshot
from rhymeflow.runtime.replay import beginning
from rhymeflow.runtime.snapshot import StateSnapshot


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
    blob = snapshot.write(StateSnapshot(beginning(Config()).coordinator.state, 5, None))
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
