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
from rhymeflow.dashboard import groups, side_groups, side_index
from rhymeflow.dashboard.groups import Asked
from rhymeflow.dashboard.run import Run
from rhymeflow.dashboard.side_groups import FILTERS, FLAGS, ORDERS
from rhymeflow.dashboard.side_index import FILE, SideIndex
from rhymeflow.errors import UserError
from rhymeflow.store.writer import SqliteTrajectoryStore
from tests.dashboard.conftest import damage
from tests.observe.runs import make_run

# By hand and slowly, from the store alone.
RESPONSES = """SELECT r.group_id, r.member, r.length, r.first_version, r.reason, r.reward,
    r.trained + 1 FROM responses r ORDER BY 1, 2"""
ENDINGS = "SELECT COALESCE(ending, 'open'), COUNT(*) FROM main.groups GROUP BY 1"
DRAFTS = """SELECT {0}, SUM(s.length), SUM(s.steps), SUM(s.drafted)
    FROM spans s JOIN main.groups g USING (group_id) WHERE {1} GROUP BY 1 ORDER BY 1"""
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
            "SELECT group_id, g.row, epoch, text, ending, step, responses, reward_mean, length_max,"
            " staleness_max, sampled, steps, drafted"
            " FROM side.groups g JOIN side.prompts p ON p.id = g.prompt ORDER BY 1"
        )
        assert found == reader.query(GROUPS)
        assert side_groups.endings(reader) == dict(reader.query(ENDINGS))
        for name, key, where in (("epoch", "epoch", "1"), ("row", "g.row", "epoch > 0")):
            found = reader.query(
                f"SELECT {name}, sampled, steps, drafted FROM side.drafts_by_{name}"
                f" WHERE steps > 0 ORDER BY 1"
            )
            assert found == reader.query(DRAFTS.format(key, where))
        assert_flags_right(reader)
    assert side.share_done == 1


def assert_flags_right(reader: Any) -> None:
    counts: dict[int, int] = {}
    for flags, *_ in reader.query("SELECT flags FROM side.groups"):
        counts[flags] = counts.get(flags, 0) + 1
    assert side_groups.tallies(reader) == counts
    for name, condition in FILTERS.items():
        wrong = f"SELECT * FROM side.groups WHERE ((flags & ?) > 0) IS NOT COALESCE({condition}, 0)"
        assert not reader.query(wrong, FLAGS[name]), name


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


@pytest.mark.parametrize("part", [2, 100])
def test_it_catches_up_in_parts(tmp_path: Path, part: int, monkeypatch: Any) -> None:
    """A run that went on for long while nobody looked is not read in one transaction."""
    make_run(tmp_path)
    side = SideIndex(tmp_path)
    assert_right(side)
    monkeypatch.setattr(side_index, "GROUPS_AT_ONCE", part)
    monkeypatch.setattr(side_index, "SEGMENTS_AT_ONCE", 3)
    store = SqliteTrajectoryStore(tmp_path / "events.db")
    for group in range(20, 31):
        store.put_group(group, row=3, epoch=2, prompt="p", prompt_tokens=[1], columns={})
        store.put_segment(
            TrajectoryId(group, 0), start=0, version=1, instance="rollout-1", steps=2, drafted=1,
            tokens=[5] * 3, logprobs=[-1.0] * 3,
        )  # fmt: skip
        if group % 2:
            store.put_ending(group, "aborted", version=1, reason="boom")
        store.commit()
    store.close()
    parts: list[str] = []
    put = SideIndex._put
    monkeypatch.setattr(
        SideIndex, "_put", lambda self, *args: (parts.append(args[1]), put(self, *args))
    )
    assert_right(side)
    assert len(parts) == -(-11 // part)


# -- groups are listed as by hand ------------------------------------------------------------------

LETTERS = st.text(st.sampled_from("aAbBéÉ%_\\\"' ßİx\0"), max_size=8)


@pytest.fixture(scope="module")
def listed_run(tmp_path_factory: pytest.TempPathFactory) -> Run:
    """60 groups of 7 prompts, with rewards and lengths that are often equal, or not there."""
    run_dir = tmp_path_factory.mktemp("run")
    texts = ["aAbB éx", "ÉABx%_", "ab\\\"' ß", "İx aBa", "", "bb", "a b a b aAb%x"]
    store = SqliteTrajectoryStore(run_dir / "events.db")
    for group in range(60):
        store.put_group(
            group, row=group % 7, epoch=group // 7, prompt=texts[group % 7], prompt_tokens=[1],
            columns={},
        )  # fmt: skip
        for member in range(group % 3):
            one = TrajectoryId(group, member)
            length = 1 + group * 7 % 5
            store.put_segment(
                one, start=0, version=group % 4, instance="rollout-0", steps=1, drafted=0,
                tokens=[1] * length, logprobs=[-1.0] * length,
            )  # fmt: skip
            store.put_finished(one, length=length, reason="length" if group % 5 else "stop")
            store.put_reward(one, reward=float((group + member) % 3), components={})
        if group % 4 == 1:
            store.put_consumed(group, version=5 + group // 10, members=tuple(range(group % 3)))
        elif group % 4 == 2:
            store.put_ending(group, "filtered", version=5, reason="all equal")
    store.commit()
    store.close()
    run = Run(run_dir, "a")
    run.side.refresh()
    return run


@settings(max_examples=300, deadline=None)
@given(
    st.none() | st.integers(6, 12),
    st.none() | st.integers(0, 7),
    st.lists(st.sampled_from(list(FILTERS)), max_size=2).map(tuple),
    LETTERS | st.sampled_from(["", "aab", "ABX", "éx"]),
    st.sampled_from(list(ORDERS)),
    st.booleans(),
    st.integers(0, 70),
    st.sampled_from([0, 1000]),
)
def test_groups_are_listed_as_by_hand(
    listed_run: Run, step: int | None, row: int | None, filters: tuple[str, ...], text: str,
    sort: str, descending: bool, offset: int, few: int,
) -> None:  # fmt: skip
    """With the words of prompts and indexes, the same as by going through all of them."""
    asked = Asked(step, row, filters, text, sort=sort, descending=descending, offset=offset)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(groups, "PAGE", 20)
        patch.setattr(groups, "FEW_PROMPTS", few)
        found = groups.listed(listed_run, asked)
    where = ["1", *(f"COALESCE({FILTERS[name]}, 0)" for name in filters)]
    values: list[Any] = []
    for name, value in (("step", step), ("g.row", row)):
        if value is not None:
            where.append(f"{name} = ?")
            values.append(value)
    if text:
        where.append("text LIKE ? ESCAPE '\\'")
        values.append(side_groups.like(text))
    direction = "DESC" if descending else "ASC"
    with listed_run.reader() as reader:
        rows = reader.query(
            "SELECT group_id FROM side.groups g JOIN side.prompts p ON +p.id = g.prompt"
            f" WHERE {' AND '.join(where)}"
            f" ORDER BY +{ORDERS[sort]} {direction} NULLS LAST, +group_id {direction}",
            *values,
        )
    expected = [group for (group,) in rows]
    assert found["count"] == len(expected)
    assert [each["group"] for each in found["groups"]] == expected[offset : offset + 20]


@given(LETTERS, LETTERS)
def test_every_prompt_with_a_text_is_a_candidate(prompt: str, text: str) -> None:
    connection = sqlite3.connect(":memory:")
    connection.execute("ATTACH ':memory:' AS side")
    connection.execute(side_groups.WORDS)
    connection.execute("INSERT INTO side.prompt_words (rowid, text) VALUES (1, ?)", (prompt,))
    like = "SELECT ? LIKE ? ESCAPE '\\'"
    ((fits,),) = connection.execute(like, (prompt, side_groups.like(text))).fetchall()
    if fits and (words := side_groups.candidates(text)):
        match = "SELECT rowid FROM side.prompt_words WHERE prompt_words MATCH ?"
        assert connection.execute(match, (words,)).fetchall() == [(1,)]
    connection.close()


def test_without_words_prompts_are_gone_through(tmp_path: Path, monkeypatch: Any) -> None:
    """An SQLite that cannot index words answers the same; with another one the index is anew."""
    run = Run(make_run(tmp_path), "a")
    for can in (False, True):
        monkeypatch.setattr(side_groups, "can_have_words", lambda can=can: can)
        assert_right(run.side)
        with run.side.attached() as reader:
            assert side_groups.has_words(reader) == can
        assert [each["group"] for each in groups.listed(run, Asked(text="IS 4"))["groups"]] == [4]


def test_what_another_process_fills_is_shown(tmp_path: Path) -> None:
    """Who comes second does not wait until it is full."""
    make_run(tmp_path)
    SideIndex(tmp_path).refresh()
    second = SideIndex(tmp_path)
    with ThreadPoolExecutor() as pool:
        with side_index._alone(second.path.with_suffix(".lock")):
            refreshed = pool.submit(second.refresh)
            assert second.prepared.wait(10)
            assert not refreshed.done()
            with second.attached() as reader:
                assert reader.query("SELECT COUNT(*) FROM side.groups") == [(10,)]
        refreshed.result(10)


# -- tokens, processes, files ----------------------------------------------------------------------


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
