"""The order of prompts, of one kind and of several, and whether rows are those of before."""

from collections import Counter

import pytest
from hypothesis import given
from hypothesis import strategies as st

from rhymeflow.config import DataConfig
from rhymeflow.data.load import check_same, check_same_template, digest
from rhymeflow.data.prompts import Prompt, Row, checked
from rhymeflow.data.stream import BLOCK, MixedStream, PromptStream, counts
from tests.refused import refusal

sizes = st.integers(min_value=1, max_value=60)
seeds = st.integers(min_value=0, max_value=2**70)


def source(size: int) -> list[Prompt]:
    return [Prompt(row, f"p{row}", {}) for row in range(size)]


def epoch_rows(stream: PromptStream, size: int, epoch: int) -> list[int]:
    requested = [stream.at(i) for i in range(epoch * size, (epoch + 1) * size)]
    assert {number for number, _ in requested} == {epoch}
    return [prompt.row for _, prompt in requested]


@given(size=sizes, seed=seeds, epoch=st.integers(min_value=0, max_value=5), shuffle=st.booleans())
def test_each_epoch_draws_every_row_once(size, seed, epoch, shuffle):
    rows = epoch_rows(PromptStream(source(size), seed, shuffle), size, epoch)
    assert sorted(rows) == list(range(size))
    if not shuffle:
        assert rows == list(range(size))


def test_the_order_is_the_same_in_every_release_and_another_by_seed_and_epoch():
    """A run must be resumable by a later version: these numbers never change."""
    stream = PromptStream(source(8), 0, True)
    assert epoch_rows(stream, 8, 0) == [3, 5, 2, 1, 6, 7, 4, 0]
    assert epoch_rows(stream, 8, 0) != epoch_rows(stream, 8, 1)
    assert epoch_rows(stream, 8, 0) != epoch_rows(PromptStream(source(8), 1, True), 8, 0)


SHARES = st.lists(st.floats(0.01, 100.0), min_size=1, max_size=6)


def mixed(sizes: list[int], shares: list[float], seed: int, shuffle: bool = True) -> MixedStream:
    ends = [sum(sizes[: kind + 1]) for kind in range(len(sizes))]
    every = source(sum(sizes))
    kinds = [every[end - size : end] for size, end in zip(sizes, ends, strict=True)]
    return MixedStream(kinds, shares, seed, shuffle)


@given(SHARES)
def test_whole_numbers_near_the_shares(shares):
    found = counts(shares)
    assert sum(found) == BLOCK
    assert min(found) >= 1
    if min(shares) * BLOCK >= sum(shares):  # nobody was given one for nothing
        exact = [share / sum(shares) * BLOCK for share in shares]
        assert all(abs(a - b) < 1 for a, b in zip(found, exact, strict=True))


@given(st.data(), SHARES, st.integers(0, 2**40))
def test_every_block_has_the_shares_and_every_kind_its_epochs(data, shares, seed):
    sizes = [data.draw(st.integers(1, 30)) for _ in shares]
    stream, due = mixed(sizes, shares, seed), counts(shares)
    ends = [sum(sizes[: kind + 1]) for kind in range(len(sizes))]
    drawn: dict[int, list[tuple[int, int]]] = {kind: [] for kind in range(len(sizes))}
    for block in range(3):
        of_block: Counter[int] = Counter()
        for number in range(block * BLOCK, (block + 1) * BLOCK):
            epoch, prompt = stream.at(number)
            kind = next(k for k, end in enumerate(ends) if prompt.row < end)
            of_block[kind] += 1
            drawn[kind].append((epoch, prompt.row))
        assert [of_block[kind] for kind in range(len(sizes))] == due
    for kind, size in enumerate(sizes):
        assert [epoch for epoch, _ in drawn[kind]] == [n // size for n in range(len(drawn[kind]))]
        whole = len(drawn[kind]) // size
        for epoch in range(whole):
            rows = [row for e, row in drawn[kind] if e == epoch]
            assert sorted(rows) == list(range(ends[kind] - size, ends[kind]))


@given(st.lists(st.integers(0, 400), min_size=1, max_size=20), seeds)
def test_at_depends_on_the_number_only(numbers, seed):
    for make in (
        lambda: PromptStream(source(7), seed, True),
        lambda: mixed([3, 5], [1.0, 2.0], seed),
    ):
        used = make()
        assert all(used.at(number) == make().at(number) for number in numbers)
    others = [[mixed([9, 9], [1, 1], each).at(n)[1].row for n in range(40)] for each in (0, 1)]
    assert others[0] != others[1]


ROWS = [{"prompt": "a", "answer": 1}, {"prompt": [{"role": "user", "content": "b"}], "answer": 2}]


def digest_of(rows: list[dict], where: str = "a.jsonl") -> str:
    return digest(checked([Row(f"{where}:{i}", row) for i, row in enumerate(rows)], "prompt"))


@pytest.mark.parametrize(
    ("rows", "said"),
    [
        (ROWS[:1], "1 rows instead of 2"),
        ([*ROWS, {"prompt": "c", "answer": 3}], "3 rows instead of 2"),
        (ROWS[::-1], "other content in its 2 rows"),
        ([{"prompt": "a", "answer": 9}, ROWS[1]], "other content in its 2 rows"),
        ([{"prompt": "a!", "answer": 1}, ROWS[1]], "other content in its 2 rows"),
        ([{"prompt": "a", "answer": 1, "more": None}, ROWS[1]], "other content in its 2 rows"),
    ],
)
def test_other_rows_are_refused_in_a_line(rows, said):
    message = refusal(check_same, "data.source", "a.jsonl", digest_of(ROWS), digest_of(rows))
    assert message.startswith(f"data.source: a.jsonl has {said} since the run began")


def test_the_same_rows_from_elsewhere_are_the_same():
    moved = [dict(reversed(row.items())) for row in ROWS]
    check_same("data.source", "b.parquet", digest_of(ROWS), digest_of(moved, "b.parquet"))


def test_another_chat_template_than_before_is_refused():
    digests: dict[str, str] = {}
    for template in ("{{ a }}", "{{ a }}"):
        check_same_template(DataConfig(), template, digests)
    message = refusal(check_same_template, DataConfig(), "{{ b }}", digests)
    assert message.startswith("the chat template has changed since the run began")
    message = refusal(check_same_template, DataConfig(chat_template="x.jinja"), None, digests)
    assert message.startswith("data.chat_template: x.jinja has changed")
