"""The side index says what the store says, however it came about."""

from __future__ import annotations

import sqlite3
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from rhymeflow.core.types import TrajectoryId
from rhymeflow.dashboard import side_index
from rhymeflow.dashboard.side_index import FILE, SideIndex
from rhymeflow.errors import UserError
from rhymeflow.store.writer import SqliteTrajectoryStore
from tests.dashboard.conftest import damage
from tests.observe.runs import make_run

# By hand and slowly, from the store alone.
RESPONSES = """SELECT r.group_id, r.member, r.length, r.first_version, r.reason, r.reward,
    r.trained + 1 FROM responses r ORDER BY 1, 2"""
GROUPS = """SELECT g.group_id, g.row, g.epoch, g.prompt, g.ending,
    CASE WHEN g.ending = 'consumed' THEN g.ending_version + 1 END,
    (SELECT COUNT(*) FROM responses r WHERE r.group_id = g.group_id),
    (SELECT AVG(reward) FROM responses r WHERE r.group_id = g.group_id),
    (SELECT MAX(length) FROM responses r WHERE r.group_id = g.group_id),
    (SELECT MAX(trained - first_version) FROM responses r WHERE r.group_id = g.group_id),
    (SELECT SUM(length) FROM spans s WHERE s.group_id = g.group_id),
    (SELECT SUM(steps) FROM spans s WHERE s.group_id = g.group_id),
    (SELECT SUM(drafted) FROM spans s WHERE s.group_id = g.group_id)
    FROM main.groups g ORDER BY 1"""


def assert_right(side: SideIndex) -> None:
    side.refresh()
    with side.attached() as reader:
        found = reader.query(
            "SELECT group_id, member, length, first_version, reason, reward, step"
            " FROM side.responses ORDER BY 1, 2"
        )
        assert found == reader.query(RESPONSES)
        found = reader.query(
            "SELECT group_id, row, epoch, prompt, ending, step, responses, reward_mean, length_max,"
            " staleness_max, sampled, steps, drafted FROM side.groups ORDER BY 1"
        )
        assert found == reader.query(GROUPS)
    assert side.share_done == 1


@pytest.mark.parametrize("part", [1, 3, 2_000])
def test_filled_in_parts(tmp_path: Path, part: int, monkeypatch: Any) -> None:
    monkeypatch.setattr(side_index, "GROUPS_AT_ONCE", part)
    assert_right(SideIndex(make_run(tmp_path)))


def test_filling_goes_on_where_it_was_ended(tmp_path: Path, monkeypatch: Any) -> None:
    monkeypatch.setattr(side_index, "GROUPS_AT_ONCE", 2)
    make_run(tmp_path)
    filled: list[str] = []
    put = SideIndex._put

    def ends_early(self: SideIndex, reader: Any, those: str) -> None:
        if len(filled) == 3:
            raise KeyboardInterrupt
        filled.append(those)
        put(self, reader, those)

    monkeypatch.setattr(SideIndex, "_put", ends_early)
    with pytest.raises(KeyboardInterrupt):
        SideIndex(tmp_path).refresh()
    again: list[str] = []
    monkeypatch.setattr(
        SideIndex, "_put", lambda self, *args: (again.append(args[1]), put(self, *args))
    )
    assert_right(SideIndex(tmp_path))
    assert not set(filled) & set(again), "a part was done again"


@settings(max_examples=25, deadline=None)
@given(st.lists(st.tuples(st.integers(0, 11), st.integers(0, 2), st.integers(0, 4)), max_size=12))
def test_it_follows_what_a_run_does(
    tmp_path_factory: pytest.TempPathFactory, changes: list[tuple[int, int, int]]
) -> None:
    run_dir = make_run(tmp_path_factory.mktemp("run"))
    side = SideIndex(run_dir)
    assert_right(side)
    store = SqliteTrajectoryStore(run_dir / "events.db")
    added: dict[TrajectoryId, int] = {}
    finished: set[TrajectoryId] = set()
    consumed: set[int] = set()
    for group, member, what in changes:
        trajectory = TrajectoryId(20 + group, member)
        if trajectory not in added:
            if not any(each.group == trajectory.group for each in added):
                store.put_group(
                    *trajectory[:1], row=group, epoch=1, prompt="p", prompt_tokens=[1], columns={}
                )
            added[trajectory] = 0
        if what < 2:
            start = added[trajectory]
            store.put_segment(
                trajectory, start=start, version=what, instance="rollout-1", steps=2, drafted=1,
                tokens=[5] * 3, logprobs=[-1.0] * 3,
            )  # fmt: skip
            added[trajectory] += 3
        elif what == 2 and added[trajectory]:
            finished.add(trajectory)
            store.put_finished(trajectory, length=added[trajectory], reason="stop")
            store.put_reward(trajectory, reward=0.5, components={"exact": 0.5})
        elif what == 4 and trajectory in finished and trajectory.group not in consumed:
            consumed.add(trajectory.group)
            store.put_consumed(trajectory.group, version=3, members=(member,))
        elif what == 3:
            store.put_ending(trajectory.group, "aborted", version=1, reason="boom")
        store.commit()
        assert_right(side)
    store.close()
    assert_right(SideIndex(run_dir))


def test_tokens_that_were_deleted(tmp_path: Path) -> None:
    make_run(tmp_path)
    side = SideIndex(tmp_path)
    assert_right(side)
    store = SqliteTrajectoryStore(tmp_path / "events.db")
    for _ in range(3):
        store.prune(before=3, history_tokens=0)
        store.commit()
        assert_right(side)
    store.close()
    with side.attached() as reader:
        ((pruned, length),) = reader.query(
            "SELECT COUNT(*), SUM(r.length) FROM side.responses r"
            " WHERE group_id NOT IN (SELECT group_id FROM segments)"
        )
    assert pruned > 0
    assert length > 50 * pruned
    assert_right(SideIndex(tmp_path))


def test_several_fill_it_at_once(tmp_path: Path, monkeypatch: Any) -> None:
    monkeypatch.setattr(side_index, "GROUPS_AT_ONCE", 1)
    make_run(tmp_path)
    with ThreadPoolExecutor() as pool:
        for _ in range(5):
            sides = [SideIndex(tmp_path) for _ in range(4)]
            for done in [pool.submit(side.refresh) for side in sides]:
                done.result()
            assert_right(sides[0])
            (tmp_path / FILE).unlink()


def test_another_run_in_the_same_place(tmp_path: Path) -> None:
    make_run(tmp_path)
    assert_right(SideIndex(tmp_path))
    (tmp_path / "events.db").unlink()
    make_run(tmp_path, num_steps=2)
    assert_right(SideIndex(tmp_path))


def test_another_layout_is_made_anew(tmp_path: Path) -> None:
    make_run(tmp_path)
    SideIndex(tmp_path).refresh()
    with sqlite3.connect(tmp_path / FILE) as connection:
        connection.execute("UPDATE marks SET value = 0 WHERE name = 'layout'")
        connection.execute("DELETE FROM groups")
    assert_right(SideIndex(tmp_path))


def test_the_store_is_left_as_it_is(tmp_path: Path) -> None:
    make_run(tmp_path)
    before = (tmp_path / "events.db").read_bytes()
    assert_right(SideIndex(tmp_path))
    assert (tmp_path / "events.db").read_bytes() == before


def test_a_damaged_store_is_one_error(tmp_path: Path) -> None:
    make_run(tmp_path)
    damage(tmp_path / "events.db")
    with pytest.raises(UserError, match=r"events\.db"):
        SideIndex(tmp_path).refresh()
