"""What a chat template must do for episodes, and which template a run uses.

A template is used if it appends: the text of a longer conversation begins with that of a shorter
one, up to what the policy said last. One that drops earlier reasoning only when a user speaks
again serves tools, not turns of users."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import Any

from rhymeflow import recipes
from rhymeflow.config import Config, DataConfig
from rhymeflow.data.encode import Schema, Tokenizer
from rhymeflow.data.prompts import Message
from rhymeflow.data.text import NotJinja, TemplateError, rendered
from rhymeflow.environments.families import family_of
from rhymeflow.errors import UserError
from rhymeflow.suites.suite import uses_environments

SAID, ANSWERED = "rhymeflow-said-this", "rhymeflow-answered-this"
QUESTION: Message = {"role": "user", "content": "a question"}
_REASON = "it is so"
_GIVES = "data.chat_template = FILE gives one for training, which only appends"
_PLAYS = (
    "; or environment.agent = 'classes' has a class with `step` read the template's own turns "
    "(docs/agents.md)"
)
_KEEPS = ("preserve_thinking", "truncate_history_thinking", "clear_thinking")
"""Variables of templates that keep earlier reasoning: the first true, the others false."""
ADD: Schema = {
    "type": "function",
    "function": {
        "name": "add",
        "description": "Add.",
        "parameters": {
            "type": "object",
            "properties": {"a": {"type": "integer", "description": "A number."}},
            "required": ["a"],
        },
    },
}

Write = Callable[..., str]  # `data.text.rendered` of one tokenizer, with tools and variables


@dataclass(frozen=True)
class Thought:
    """Reasoning before what a turn says: a part of its text, or fields of its message."""

    text: str = ""
    fields: Mapping[str, str] = field(default_factory=dict)


NO_THOUGHT = Thought()
_IN_TEXT = Thought(f"<think>\n{_REASON}\n</think>\n\n")
_IN_FIELDS = Thought("", {"reasoning_content": _REASON, "thinking": _REASON})


def said(thought: Thought, mark: str = SAID) -> Message:
    """Return a turn of the assistant that says `mark`."""
    return {"role": "assistant", "content": f"{thought.text}{mark}", **thought.fields}


def called(
    thought: Thought, name: str, turn: int = 0, *, writes_calls: bool, mark: str = SAID
) -> Message:
    """Return a turn that calls a tool; `mark` is in the call if the template writes calls, else in
    the text. It has one call, because some templates allow no more."""
    arguments = {"text": mark} if writes_calls else {}
    message = said(thought, "" if writes_calls else mark)
    function = {"name": name, "arguments": arguments}
    return message | {
        "tool_calls": [{"id": call_id(turn), "type": "function", "function": function}]
    }


def call_id(turn: int, place: int = 0) -> str:
    """Return the id of a call: nine characters, as Mistral's templates require."""
    return f"call{turn:02d}{place:03d}"


def with_ids(answer: Sequence[Message], turn: int = 0) -> list[Message]:
    """Return the answer, with the ids of the calls that its messages of tools answer."""
    return [
        {"tool_call_id": call_id(turn, place)} | each if each["role"] == "tool" else each
        for place, each in enumerate(answer)
    ]


def writes_calls(write: Write) -> bool:
    """Whether the template writes a call of a message, with its arguments."""
    try:
        return SAID in write([QUESTION, called(NO_THOUGHT, "add", writes_calls=True)], opens=False)
    except TemplateError:
        return False


def takes_tools(write: Write) -> bool:
    """Whether the template writes what a tool answers."""
    turn = called(NO_THOUGHT, "add", writes_calls=writes_calls(write))
    answer = with_ids([{"role": "tool", "name": "add", "content": ANSWERED}])
    try:
        return ANSWERED in write([QUESTION, turn, *answer])
    except TemplateError:
        return False


def thoughts_of(write: Write, template: str) -> tuple[Thought, ...]:
    """Return what may begin a turn of the policy: nothing, or reasoning in each form that the
    template writes. Some templates begin the turn inside the reasoning, or after it."""
    if "think" not in template and "reasoning" not in template:
        return (NO_THOUGHT,)
    try:
        begun = write([QUESTION]).rstrip()
    except TemplateError as error:
        raise UserError(f"the chat template refuses a question: {error}") from None
    if begun.endswith("</think>"):
        return (NO_THOUGHT,)
    thoughts: tuple[Thought, ...] = () if begun.endswith("<think>") else (NO_THOUGHT,)
    if "think>" in template:
        thoughts += (_IN_TEXT,)
    turns = said(_IN_FIELDS), called(_IN_FIELDS, "add", writes_calls=True)
    if any(_writes_reason(write, turn) for turn in turns):
        thoughts += (_IN_FIELDS,)
    return thoughts


def _writes_reason(write: Write, turn: Message) -> bool:
    try:
        return _REASON in write([QUESTION, turn], opens=False)
    except TemplateError:
        return False


def check_appends(
    write: Write, template: str, thoughts: Sequence[Thought], *, tools: bool, users: bool
) -> None:
    """Check that the template appends messages of tools or of users. Raises `UserError`."""
    for description, messages in _conversations(write, thoughts, tools, users):
        where = f"the chat template, in a conversation with {description}"
        try:
            wrong = _wrong_with(write, messages)
        except TemplateError as error:
            raise UserError(f"{where}: refuses it: {error}; {_GIVES}") from None
        if wrong is not None:
            plays = _PLAYS if users and not tools else ""
            raise UserError(
                f"{where}: {wrong}; the policy would read its earlier turns differently than it "
                f"wrote them; {_variable_of(template)}{_GIVES}{plays}"
            )


def _variable_of(template: str) -> str:
    name = next((each for each in _KEEPS if each in template), None)
    if name is None:
        return ""
    value = str(name == _KEEPS[0]).lower()
    return f"data.chat_template_kwargs = {{{name}: {value}}} may keep them, or "


def _wrong_with(write: Write, messages: list[Message]) -> str | None:
    """Return what is wrong with one conversation, or None. What follows a turn's text, such as its
    end, may depend on the next message: the renderer takes it from there."""
    kept: list[str] = []
    turns = [place for place, each in enumerate(messages) if each["role"] == "assistant"]
    for place in [*turns, len(messages)]:
        if messages[place - 1]["role"] == "assistant":
            return None  # nothing follows the last turn
        asked = write(messages[:place])
        for earlier in kept:
            if (other := _difference(asked, earlier)) is not None:
                return f"changes a turn of the assistant when others follow ({other})"
        if place == len(messages):
            return None
        whole = write(messages[: place + 1], opens=False)
        if (other := _difference(whole, asked)) is not None:
            return f"begins the assistant's turn differently when it is complete ({other})"
        before, mark, _ = whole.rpartition(_mark(place))
        if not mark:
            return "leaves out what the assistant says as text"
        if _REASON not in before[len(asked) :] and _has_reason(messages[place]):
            return "leaves out the reasoning of a turn"
        kept.append(before + mark)
    return None


def _difference(text: str, begin: str) -> str | None:
    """Return where the text does not begin as it should, or None."""
    if text.startswith(begin):
        return None
    pairs = zip(text, begin, strict=False)
    place = next((n for n, (a, b) in enumerate(pairs) if a != b), min(len(text), len(begin)))
    seen, was = text[place : place + 30], begin[place : place + 30]
    return f"{seen!r} where it was {was!r}"


def _has_reason(turn: Message) -> bool:
    return "reasoning_content" in turn or _REASON in turn["content"]


def _mark(place: int) -> str:
    return f"{SAID}-{place:02d}"


def _conversations(
    write: Write, thoughts: Sequence[Thought], tools: bool, users: bool
) -> Iterator[tuple[str, list[Message]]]:
    has_calls = tools and writes_calls(write)
    for thought in thoughts:
        reasoning = "" if thought is NO_THOUGHT else "reasoning and "
        messages: list[Message] = []
        if users:
            for letter in "abc":
                messages.append({"role": "user", "content": f"question {letter}"})
                messages.append(said(thought, _mark(len(messages))))
            yield f"{reasoning}turns of the user", messages
        if tools:
            messages = [QUESTION]
            for turn in range(3):
                answer = [{"role": "tool", "name": "add", "content": "3"}] * (turn % 2 + 1)
                mark = _mark(len(messages))
                messages.append(called(thought, "add", turn, writes_calls=has_calls, mark=mark))
                messages += with_ids(answer, turn)
            yield f"{reasoning}calls of tools", messages


# -- the template of a run -------------------------------------------------------------------------


def load_settled(config: Config) -> tuple[Tokenizer, str | None]:
    """Load the tokenizer of a run, with the chat template that the run uses; see `settle`."""
    from rhymeflow.models.tokenizer import load_tokenizer  # loads transformers

    tokenizer = load_tokenizer(config.model)
    return tokenizer, settle(tokenizer, config.data, has_turns=uses_environments(config))


def settle(tokenizer: Tokenizer, data: DataConfig, *, has_turns: bool) -> str | None:
    """Give the tokenizer the chat template of a run: the file of `data.chat_template` or, if
    responses have turns, a known family's template for training where its own does less.

    Every process of a run calls this, and decides the same. Returns a line for the user if a
    template was replaced that nothing asked to replace. Raises `UserError` if there is no template
    in the file."""
    given = data.chat_template
    if isinstance(given, str):
        tokenizer.chat_template = template_in(given)
        try:
            rendered(tokenizer, [QUESTION], variables=data.chat_template_kwargs)
        except NotJinja as error:
            raise UserError(f"data.chat_template = {given!r}: {error}") from None
        except TemplateError:
            pass  # it may want another conversation; prompts will say
        return None
    own, variables = tokenizer.chat_template, data.chat_template_kwargs
    family = family_of(own) if has_turns and "chat_template" not in variables else None
    if family is None or family.training is None:
        return None
    better = family.training
    can, could = _abilities(tokenizer, own, variables), _abilities(tokenizer, better, variables)
    if not can < could:
        return None
    tokenizer.chat_template = better
    return (
        f"the chat template of {family.name} changes earlier turns, so TRL's variant for "
        "training replaces it, which only appends; data.chat_template = FILE gives another"
    )


def template_in(path: str) -> str:
    """Read a template. Raises `UserError` if there is none."""
    where = f"data.chat_template = {path!r}"
    file = recipes.file_of(path, "chat_template.jinja") or Path(path).expanduser()
    try:
        text = file.read_text(encoding="utf-8")
    except OSError as error:
        raise UserError(f"{where}: {error.strerror}") from None
    except UnicodeDecodeError as error:
        raise UserError(f"{where}: is not UTF-8: {error.reason}") from None
    if not text.strip():
        raise UserError(f"{where}: the file is empty")
    return text


def _abilities(tokenizer: Tokenizer, template: Any, variables: Mapping[str, Any]) -> frozenset[str]:
    """Return what the template appends: `tools`, `users`, both or neither."""
    text = template["default"] if isinstance(template, dict) else template
    write = partial(
        rendered, tokenizer, tools=[ADD], variables={**variables, "chat_template": text}
    )
    found = set()
    for name in ("tools", "users"):
        try:
            if name == "users" or takes_tools(write):
                thoughts = thoughts_of(write, text)
                tools = name == "tools"
                check_appends(write, text, thoughts, tools=tools, users=not tools)
                found.add(name)
        except UserError:
            continue  # it is what was asked
    return frozenset(found)
