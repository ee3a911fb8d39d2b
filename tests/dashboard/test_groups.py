"""Sums that are kept are those that are made anew; groups are listed as by hand."""

from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from rhymeflow.core.types import TrajectoryId
from rhymeflow.dashboard import groups
from rhymeflow.dashboard.groups import FILTERS, ORDERS, GroupQuery, Summaries
from rhymeflow.dashboard.run import Run
from rhymeflow.observe import query
from rhymeflow.store.writer import SqliteTrajectoryStore
from tests.observe.runs import make_run, stored
from tests.store.stores import finished, group, segment


def sums(run: Run) -> list[list[tuple[Any, ...]]]:
    """What is kept, which is what is summed anew."""
    tables = [f"SELECT * FROM temp.{table} ORDER BY 1, 2" for table in ("summaries", "components")]
    with run.kept(Summaries) as kept, run.reader() as reader:
        Summaries(reader).follow()
        found = [kept.reader.query(table) for table in tables]
        assert found == [reader.query(table) for table in tables]
    return found


@pytest.mark.parametrize("part", [1, 3, 2_000])
@settings(max_examples=20, deadline=None)
@given(st.lists(st.tuples(st.integers(0, 2), st.integers(0, 1), st.integers(0, 4)), max_size=16))
def test_they_follow_what_a_run_does(tmp_path_factory, part, changes):
    run = Run(make_run(tmp_path_factory.mktemp("run")), "a")
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(groups, "GROUPS_AT_ONCE", part)
        sums(run)
        store = SqliteTrajectoryStore(run.store)
        lengths: dict[TrajectoryId, int] = {}
        over: set[TrajectoryId] = set()
        begun: set[int] = set()
        consumed: set[int] = set()
        for number, member, what in changes:
            one = TrajectoryId(20 + number, member)
            if one.group not in begun:
                begun.add(one.group)
                group(store, one.group, row=one.group, epoch=1)
            if what < 2:
                segment(store, one, 3, start=lengths.get(one, 0), version=what, steps=2, drafted=1)
                lengths[one] = lengths.get(one, 0) + 3
            elif what == 2 and one in lengths:
                over.add(one)
                finished(store, one, lengths[one], 0.5, exact=0.5, short=member)
            elif what == 3:
                store.put_ending(one.group, "aborted", version=1, reason="boom")
            elif one in over and one.group not in consumed:
                consumed.add(one.group)
                store.put_consumed(one.group, version=3, members=(member,))
            store.commit()
            sums(run)
        whole = sums(run)
        for _ in range(3):
            store.prune(before=3, history_tokens=0)
            store.commit()
            assert sums(run) == whole
        store.close()


def test_another_run_in_the_same_place(tmp_path):
    run = Run(make_run(tmp_path), "a")
    sums(run)
    run.store.unlink()
    make_run(tmp_path, num_steps=2)
    sums(run)


def test_the_store_is_left_as_it_is(tmp_path):
    run = Run(make_run(tmp_path), "a")
    before = run.store.read_bytes()
    sums(run)
    assert run.store.read_bytes() == before
    assert {path.name for path in tmp_path.iterdir()} <= {
        "events.db", "events.db-wal", "events.db-shm", "writer.lock", "metrics.jsonl",
    }  # fmt: skip


# -- listed ----------------------------------------------------------------------------------------

TEXTS = ("aAbB éx", "ÉABx%_", "ab\\\"' ß", "İx aBa", "", "bb", "a b a b aAb%x")
LETTERS = st.text(st.sampled_from("aAbBéÉ%_\\\"' ßİx"), max_size=8)


@pytest.fixture(scope="module")
def listed_run(tmp_path_factory):
    """60 groups of 7 prompts, with rewards and lengths that are often equal, or not there."""
    run_dir = tmp_path_factory.mktemp("run")
    with stored(run_dir) as store:
        for number in range(60):
            group(store, number, row=number % 7, epoch=number // 7, prompt=TEXTS[number % 7])
            for member in range(number % 3):
                length, reward = 1 + number * 7 % 5, float((number + member) % 3)
                segment(store, (number, member), length, version=number % 4)
                reason = "length" if number % 5 else "stop"
                finished(store, (number, member), length, reward, reason)
            if number % 4 == 1:
                members = tuple(range(number % 3))
                store.put_consumed(number, version=5 + number // 10, members=members)
            elif number % 4 == 2:
                store.put_ending(number, "filtered", version=5, reason="all equal")
    return Run(run_dir, "a")


@pytest.fixture(scope="module")
def known(listed_run):
    with listed_run.reader() as reader:
        return [query.group(reader, number) for number in range(60)]


def fits(group: dict[str, Any], name: str) -> bool:
    rewards = [each["reward"] for each in group["members"] if each["reward"] is not None]
    is_whole = bool(rewards) and len(rewards) == len(group["members"])
    return {
        "right": is_whole and min(rewards) == max(rewards) and rewards[0] >= 1,
        "wrong": is_whole and max(rewards) <= 0,
        "mixed": len(set(rewards)) > 1,
        "cut": any(each["reason"] == "length" for each in group["members"]),
        "errors": group["ending_reason"] is not None,
        "open": group["ending"] is None,
    }.get(name, group["ending"] == name)


def figure(group: dict[str, Any], order: str) -> float | None:
    rewards = [each["reward"] for each in group["members"] if each["reward"] is not None]
    ages = [e["step"] - 1 - e["first_version"] for e in group["members"] if e["step"] is not None]
    return {
        "order": group["group"],
        "spread": max(rewards) - min(rewards) if rewards else None,
        "reward": sum(rewards) / len(rewards) if rewards else None,
        "length": max((each["length"] for each in group["members"]), default=None),
        "staleness": max(ages, default=None),
    }[order]


@settings(max_examples=150, deadline=None)
@given(
    st.none() | st.integers(6, 12),
    st.none() | st.integers(0, 7),
    st.lists(st.sampled_from(list(FILTERS)), max_size=2).map(tuple),
    LETTERS | st.sampled_from(["", "aab", "ABX", "éx"]),
    st.sampled_from(list(ORDERS)),
    st.booleans(),
    st.integers(0, 70),
)
def test_groups_are_listed_as_by_hand(
    listed_run, known, step, row,
    filters, text, sort, descending, offset,
):  # fmt: skip
    asked = GroupQuery(step, row, filters, text, sort=sort, descending=descending, offset=offset)
    found = groups.listed(listed_run, asked)
    lower = str.maketrans({chr(i): chr(i + 32) for i in range(65, 91)})  # as LIKE: ASCII alone
    chosen = [
        each
        for each in known
        if step in (None, each["step"])
        and row in (None, each["row"])
        and all(fits(each, name) for name in filters)
        and text.translate(lower) in each["prompt"].translate(lower)
    ]
    some = [each for each in chosen if figure(each, sort) is not None]
    rest = [each for each in chosen if figure(each, sort) is None]
    for part in (some, rest):
        part.sort(key=lambda e: (figure(e, sort) or 0.0, e["group"]), reverse=descending)
    expected = [each["group"] for each in some + rest]
    assert found["count"] == len(expected)
    assert [each["group"] for each in found["groups"]] == expected[offset : offset + groups.PAGE]
