"""Rows are those that a run began with, or it does not go on."""

from __future__ import annotations

import pytest

from rhymeflow.data.prompts import Row, checked
from rhymeflow.data.run_prompts import check_same, digest
from rhymeflow.errors import UserError

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
def test_other_rows_are_refused_in_a_line(rows: list[dict], said: str) -> None:
    with pytest.raises(UserError, match=f"data.source: a.jsonl has {said} since the run began"):
        check_same("data.source", "a.jsonl", digest_of(ROWS), digest_of(rows))


def test_the_same_rows_from_elsewhere_are_the_same() -> None:
    moved = [dict(reversed(row.items())) for row in ROWS]
    check_same("data.source", "b.parquet", digest_of(ROWS), digest_of(moved, "b.parquet"))
