"""Renders a tokenizer's chat template, and turns text into token ids.

Any error in a template is a `TemplateError`. Text is `Unwritable` if the tokenizer has no token for
a character other than a blank, or the model no embedding for a token (`num_embeddings`)."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from functools import cached_property
from typing import Any

_RARE_CHARACTERS = "\U0010fffd\U0010fffc"
_MARKER = "rhymeflow-said-this"
NO_CHARACTER = "\ufffd"
"""What the beginning of a character is decoded as."""
NOTHING: Mapping[str, Any] = {}
_QUESTION = [{"role": "user", "content": "a question"}]


class TemplateError(ValueError):
    """The chat template fails on the conversation; the message says why, in one line."""


class NotJinja(TemplateError):  # noqa: N818 - it is what is wrong with the template
    """The chat template is no Jinja."""


def rendered(
    tokenizer: Any,
    messages: list[dict[str, Any]],
    tools: list[dict[str, Any]] | None = None,
    *,
    opens: bool = True,
    continues: bool = False,
    variables: Mapping[str, Any] = NOTHING,
) -> str:
    """Render the conversation with the template and its `variables`. With `opens`, the text ends
    where a response begins; with `continues`, the response continues the last message. Raises
    `TemplateError`."""
    import jinja2  # the tokenizer's template engine, for its error below

    try:
        text = tokenizer.apply_chat_template(
            messages,
            tools=tools or None,
            tokenize=False,
            add_generation_prompt=opens and not continues,
            continue_final_message=continues,
            **variables,
        )
    except jinja2.TemplateSyntaxError as error:
        raise NotJinja(f"line {error.lineno} is no Jinja: {_line(error)}") from None
    except jinja2.TemplateError as error:
        raise TemplateError(_line(error)) from None
    except (TypeError, ValueError, LookupError, AttributeError, ArithmeticError) as error:
        raise TemplateError(_why(error, tokenizer.chat_template, continues)) from None
    assert isinstance(text, str)
    if continues and not text.endswith(begun := messages[-1]["content"]):
        trimmed = begun.rstrip()  # some templates remove the blanks before the response
        text += begun[len(trimmed) :] if text.endswith(trimmed) else ""
    return text


def _why(error: Exception, template: Any, continues: bool) -> str:
    if isinstance(template, dict) and "default" not in template and isinstance(error, ValueError):
        names = ", ".join(template)
        return (
            f"there are several ({names}), and none is the default; data.chat_template_kwargs = "
            "{chat_template: NAME} chooses one"
        )
    if continues and "continue_final_message" in str(error):
        return "it leaves out the assistant's message that the response continues"
    return f"{type(error).__name__}: {_line(error)}"


def _line(error: Exception) -> str:
    return " ".join(str(error).split())


def marks(tokenizer: Any, variables: Mapping[str, Any]) -> list[str]:
    """Return strings that are in every text from the template: the special tokens after a user's
    message or, if there are none, all that follows it."""
    try:
        asked = rendered(tokenizer, [{"role": "user", "content": _MARKER}], variables=variables)
    except TemplateError:
        return []  # the first prompt raises it again
    after = asked.rpartition(_MARKER)[2].strip()
    special = [each for each in special_tokens(tokenizer) if each in after]
    return special or ([after] if after else [])


def left_to_begin(tokenizer: Any, variables: Mapping[str, Any]) -> str:
    """Return what the template writes before an assistant's message but not at the end of a prompt,
    so that the policy would have to write it; "" if there is nothing."""
    said = [*_QUESTION, {"role": "assistant", "content": _MARKER}]
    try:
        asked = rendered(tokenizer, _QUESTION, variables=variables)
        whole = rendered(tokenizer, said, opens=False, variables=variables)
        if asked != rendered(tokenizer, _QUESTION, opens=False, variables=variables):
            return ""
    except TemplateError:
        return ""
    before, marker, _ = whole.partition(_MARKER)
    begin = before.removeprefix(asked) if marker and before.startswith(asked) else ""
    return begin if begin.strip() else ""


class Unwritable(ValueError):  # noqa: N818 - it is what is wrong with the text
    """The tokenizer lacks a token for a character, or the model an embedding for a token."""


class TokenIds:
    """Turns text into token ids, and detects characters that the tokenizer would drop, or write as
    its unknown token. Byte-level tokenizers do neither, so offsets are checked only if a rare
    character has no token."""

    def __init__(self, tokenizer: Any) -> None:
        self._tokenizer = tokenizer

    def __call__(self, text: str) -> list[int]:
        """Return the ids, without special tokens that the tokenizer adds. Raises `Unwritable`."""
        ids, lost = self._encoded(text, checks=self._loses)
        if lost is not None:
            raise Unwritable(f"the model's tokenizer has no token for the character {lost!r}")
        return self._known(ids)

    def begun(self, text: str) -> list[int]:
        """Return the ids, with the tokenizer's beginning of sequence unless the text has it."""
        ids, begin = self(text), self._begin
        return ids if not begin or ids[: len(begin)] == begin else self._known([*begin, *ids])

    def _known(self, ids: list[int]) -> list[int]:
        """Return the ids if the model has an embedding for each. Raises `Unwritable`."""
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
        """The ids that the tokenizer puts before a text, not those that it puts after it."""
        bare, _ = self._encoded("a", checks=False)  # which may have no token
        whole = self._tokenizer("a", add_special_tokens=True)["input_ids"]
        start = next((n for n in range(len(whole)) if whole[n : n + len(bare)] == bare), 0)
        return [int(token) for token in whole[:start]]

    @cached_property
    def _loses(self) -> bool:
        if not getattr(self._tokenizer, "is_fast", False):
            return False  # it has no offsets
        try:
            return self._encoded(_RARE_CHARACTERS[0], checks=True)[1] is not None
        except Unwritable:
            return False  # the tokenizer raises instead

    @cached_property
    def _unknown(self) -> int | None:
        """The token that two rare characters have in common: the one for what has none."""
        last = {tuple(self._encoded(each, checks=False)[0][-1:]) for each in _RARE_CHARACTERS}
        return next(iter(*last), None) if len(last) == 1 else None

    def _encoded(self, text: str, *, checks: bool) -> tuple[list[int], str | None]:
        """Return the ids and, with `checks`, the first character that has no token; a blank may be
        dropped."""
        options = {"return_offsets_mapping": True} if checks else {}
        try:
            encoded = self._tokenizer(text, add_special_tokens=False, **options)
        except Exception as error:
            if type(error) is not Exception:  # `tokenizers` raises nothing narrower
                raise
            raise Unwritable(f"the model's tokenizer cannot write it: {error}") from None
        ids = [int(token) for token in encoded["input_ids"]]
        if not checks:
            return ids, None
        covered = bytearray(len(text))
        for token, (begin, end) in zip(ids, encoded["offset_mapping"], strict=True):
            if token == self._unknown and text[begin:end] != self._tokenizer.decode([token]):
                return ids, text[begin]
            covered[begin:end] = b"\1" * (end - begin)
        lost = (each for each, is_covered in zip(text, covered, strict=True) if not is_covered)
        return ids, next((each for each in lost if not each.isspace()), None)


class GrowingText:
    """The text of tokens that come one after the other, without special tokens."""

    def __init__(self, decode: Callable[..., str]) -> None:
        self._decode = decode
        self._before: Sequence[int] = ()
        """Those that are decoded with the last ones, whose text may depend on them."""
        self._last: list[int] = []
        self.known = ""  # it stays as it is, whatever follows
        self.rest = ""
        """What the last tokens add to it: a character at its end is there in part only."""

    def add(self, tokens: Iterable[int]) -> None:
        """Take the next tokens."""
        self._last += tokens
        before = self._decode(self._before, skip_special_tokens=True)
        text = self._decode([*self._before, *self._last], skip_special_tokens=True)
        self.rest = text[len(before) :]
        if self.rest and not self.rest.endswith(NO_CHARACTER):
            self.known += self.rest
            self._before, self._last, self.rest = self._last, [], ""


class StopTexts:
    """Finds the token by which the text of a turn's tokens has one of `texts` in it."""

    def __init__(self, decode: Callable[..., str], texts: Sequence[str]) -> None:
        self._text, self._texts = GrowingText(decode), texts
        self._longest = max(map(len, texts))
        self.is_met = False

    def add(self, token: int) -> bool:
        """Take the next token; return whether it is the one."""
        start = max(0, len(self._text.known) - self._longest + 1)
        self._text.add([token])
        end = self._text.known[start:] + self._text.rest
        self.is_met = any(each in end for each in self._texts)
        return self.is_met


def before_stop(text: str, stops: Sequence[str]) -> tuple[str, str | None]:
    """Return what is before the first of `stops` in the text, and this; None: there is none. The
    first is the one that ends first."""
    found = [(at + len(each), at, each) for each in stops if (at := text.find(each)) >= 0]
    if not found:
        return text, None
    _, at, stop = min(found)
    return text[:at], stop


def held_back(text: str, begins: Iterable[str]) -> str:
    """Return the text without an end that may be the beginning of one of `begins`."""
    for each in begins:
        parts = (each[:length] for length in range(len(each) - 1, 0, -1))
        text = text.removesuffix(next(filter(text.endswith, parts), ""))
    return text


def special_tokens(tokenizer: Any) -> list[str]:
    """Return every special token as text, including those that the configuration does not name."""
    added = [str(each) for each in tokenizer.added_tokens_decoder.values() if each.special]
    return list(dict.fromkeys([*tokenizer.all_special_tokens, *added]))
