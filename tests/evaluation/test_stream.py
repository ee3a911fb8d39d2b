"""Text that is handed out as tokens come, with a tokenizer whose tokens are bytes."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from rhymeflow.evaluation.generate import TextStream


def decode(tokens: list[int]) -> str:
    return bytes(tokens).decode("utf-8", "replace")


@given(st.binary(max_size=40) | st.text(max_size=20).map(str.encode))
def test_the_pieces_are_the_text(content: bytes) -> None:
    tokens, stream, pieces = list(content), TextStream(decode), ""
    for end in range(1, len(tokens) + 1):
        pieces += stream.more(tokens[:end])
        assert decode(tokens[:end]).startswith(pieces)
    assert pieces + stream.rest(tokens) == decode(tokens)


def test_a_character_comes_when_it_is_complete() -> None:
    stream = TextStream(decode)
    tokens = list("aé!".encode())
    pieces = [stream.more(tokens[:end]) for end in range(1, len(tokens) + 1)]
    assert pieces == ["a", "", "é", "!"]
