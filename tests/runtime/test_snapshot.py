"""The coordinator's state, written and read back, goes on as it would have."""

from __future__ import annotations

import pickle
import random

import pytest

from rhymeflow import build
from rhymeflow.core.coordinator import Coordinator
from rhymeflow.core.protocol.group import MemberState
from rhymeflow.runtime import event_log, replay, snapshot
from rhymeflow.runtime.snapshot import Snapshot
from tests.core.test_replay import LOGS, recorded
from tests.runtime.logs import check_replay, train
from tests.runtime.test_resume import (
    SYNCHRONOUS,
    at,
    audit,
    learned,
    resume,
    small,
    tokens,
    train_until,
)


@pytest.mark.parametrize("path", LOGS, ids=lambda path: path.name.split(".")[0])
def test_it_gives_the_same_commands_from_any_cut_on(path):
    config, events = recorded(path)
    plan, schedule = build.plan(config), build.schedule(config)
    straight = Coordinator(plan, schedule)
    expected = [straight.handle(event) for event in events]
    for cut in sorted(random.Random(0).sample(range(1, len(events)), 3)):
        coordinator = Coordinator(plan, schedule)
        for event in events[:cut]:
            coordinator.handle(event)
        blob = snapshot.write(Snapshot(coordinator.state, 5, None))
        coordinator.state, num_drawn, _ = snapshot.read(blob)
        coordinator.state.restore(plan, build.schedule(config))
        assert num_drawn == 5
        assert [coordinator.handle(event) for event in events[cut:]] == expected[cut:]


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
    config, _ = recorded(LOGS[0])
    state = Coordinator(build.plan(config), build.schedule(config)).state
    blob = snapshot.write(Snapshot(state, 5, None))
    assert snapshot.read(blob) is not None
    for index in random.Random(0).sample(range(len(blob)), 20):
        changed = bytearray(blob)
        changed[index] ^= 1
        assert snapshot.read(bytes(changed)) is None


@pytest.mark.slow
def test_a_run_is_resumed_from_its_last_snapshot(tmp_path, monkeypatch):
    monkeypatch.setattr(event_log, "SNAPSHOT_EVENTS", 20)
    (tmp_path / "straight").mkdir()
    train(small(tmp_path / "straight", **SYNCHRONOUS))
    config = small(tmp_path, **SYNCHRONOUS)
    train_until(monkeypatch, config, at(3, is_training=True))
    begun = []
    start = replay._start
    monkeypatch.setattr(replay, "_start", lambda *given: begun.append(start(*given)) or begun[-1])
    resume(tmp_path / "run")
    assert begun[0][0] > 20, "the log was replayed from its beginning"
    assert tokens(tmp_path / "run") == tokens(tmp_path / "straight" / "run")
    assert learned(tmp_path / "run") == learned(tmp_path / "straight" / "run")
    check_replay(config)
    audit(tmp_path / "run")
