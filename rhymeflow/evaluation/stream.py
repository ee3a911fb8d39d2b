"""Text of a response as its tokens come.

Holds true: what was handed out, one after the other, is the text of all tokens, if the text of more
tokens begins with that of fewer but for characters whose bytes are not complete: those are kept
back until they are, or the response is. Knows nothing of models.
"""

from __future__ import annotations

from collections.abc import Callable

INCOMPLETE = "\N{REPLACEMENT CHARACTER}"
"""What a tokenizer makes of bytes that are no character yet."""


class TextStream:
    """Makes text of tokens; `decode` makes text of all of them at once."""

    def __init__(self, decode: Callable[[list[int]], str]) -> None:
        self._decode = decode
        self._handed_out = ""

    def more(self, tokens: list[int]) -> str:
        """Return what is new in the text of `tokens`, which are all that there are by now."""
        text = self._decode(tokens).rstrip(INCOMPLETE)
        # Where it does not begin so, the next token may say more of it.
        return self._new(text) if text.startswith(self._handed_out) else ""

    def rest(self, tokens: list[int]) -> str:
        """The same where no more tokens come."""
        return self._new(self._decode(tokens))

    def _new(self, text: str) -> str:
        new = text[len(self._handed_out) :]
        self._handed_out = text
        return new
