"""An answer by turns."""

from __future__ import annotations

from rhymeflow.evaluation.answer import Answer


def test_turns_begin_and_end_with_the_policy() -> None:
    assert Answer("a", 0, 0, [[1, 2]]).parts == [[1, 2]]
    assert Answer("a", 0, 0, [[1], [4]], [[2, 3]]).parts == [[1], [2, 3], [4]]
    ended = Answer("a", 0, 0, [[1], [4]], [[2, 3], [5]])
    assert ended.parts == [[1], [2, 3], [4], [5], []]
    assert ended.tokens == [1, 2, 3, 4, 5]
