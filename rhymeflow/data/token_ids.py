"""From text to token ids: every character that is no blank has part in a token, and no id is beyond
the model's embeddings (`num_embeddings` of the tokenizer, if it says), or there is an `Unwritable`.
"""

from __future__ import annotations

from functools import cached_property
from typing import Any

_RARE = "\U0010fffd"


class Unwritable(ValueError):  # noqa: N818 - it is what is wrong with the text
    """The tokenizer has no token for a character, or the model none for a token; says which."""


class TokenIds:
    """Token ids of texts.

    Only a tokenizer that loses a rare character is asked what it made of each: those of bytes, and
    those with a token for what is unknown, lose nothing.
    """

    def __init__(self, tokenizer: Any) -> None:
        self._tokenizer = tokenizer

    def __call__(self, text: str) -> list[int]:
        """Return the ids, without any that the tokenizer adds."""
        ids, lost = self._encoded(text, looks=self._loses)
        if lost is not None:
            raise Unwritable(f"the model's tokenizer has no token for the character {lost!r}")
        return self._known(ids)

    def begun(self, text: str) -> list[int]:
        """The same after the tokenizer's beginning of sequence, where the text has none."""
        ids, begin = self(text), self._begin
        return ids if not begin or ids[: len(begin)] == begin else self._known([*begin, *ids])

    def _known(self, ids: list[int]) -> list[int]:
        count, largest = getattr(self._tokenizer, "num_embeddings", None), max(ids, default=0)
        if count is not None and largest >= count:
            token = self._tokenizer.decode([largest])
            raise Unwritable(
                f"{token!r} is token {largest} of the tokenizer, and the model has embeddings for "
                f"{count} tokens, from 0"
            )
        return ids

    @cached_property
    def _begin(self) -> list[int]:
        """What the tokenizer puts before a text; after it some put the end of sequence."""
        bare, whole = self("a"), self._tokenizer("a", add_special_tokens=True)["input_ids"]
        place = next((n for n in range(len(whole)) if whole[n : n + len(bare)] == bare), 0)
        return [int(token) for token in whole[:place]]

    @cached_property
    def _loses(self) -> bool:
        if not getattr(self._tokenizer, "is_fast", False):
            return False  # it does not say which characters a token is of
        try:
            return self._encoded(_RARE, looks=True)[1] is not None
        except Unwritable:
            return False  # it says so by itself

    def _encoded(self, text: str, *, looks: bool) -> tuple[list[int], str | None]:
        more = {"return_offsets_mapping": True} if looks else {}
        try:
            encoded = self._tokenizer(text, add_special_tokens=False, **more)
        except Exception as error:
            if type(error) is not Exception:  # the library of tokenizers raises nothing narrower
                raise
            raise Unwritable(f"the model's tokenizer cannot write it: {error}") from None
        ids = [int(token) for token in encoded["input_ids"]]
        if not looks:
            return ids, None
        written = bytearray(len(text))
        for begin, end in encoded["offset_mapping"]:
            written[begin:end] = b"\1" * (end - begin)
        lost = (each for each, is_in in zip(text, written, strict=True) if not is_in)
        return ids, next((each for each in lost if not each.isspace()), None)


def special_tokens(tokenizer: Any) -> list[str]:
    """Every special token as text, those too that the tokenizer's configuration does not name."""
    added = [str(each) for each in tokenizer.added_tokens_decoder.values() if each.special]
    return list(dict.fromkeys([*tokenizer.all_special_tokens, *added]))
