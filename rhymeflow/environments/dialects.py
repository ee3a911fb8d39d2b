"""Reads what an agent program asks of the policy, in the form of four HTTP interfaces.

OpenAI's chat completions and responses, Anthropic's messages, and vLLM's tokens in, tokens out. A
body becomes one `ModelCall`; `dialect_answers` writes what the program gets. A field that would
change what is sampled, and cannot, is refused."""

from __future__ import annotations

import json
from collections.abc import Iterable, Iterator, Mapping
from itertools import groupby
from operator import itemgetter
from typing import Annotated, Any, Literal, NoReturn

import msgspec
from msgspec import Meta

from rhymeflow.data.encode import Schema
from rhymeflow.data.prompts import Message
from rhymeflow.environments.parsing import call_of
from rhymeflow.environments.template import call_id
from rhymeflow.errors import nearest
from rhymeflow.utils.user_values import shown

Dialect = Literal["chat", "responses", "messages", "tokens"]

DIALECTS: dict[str, Dialect] = {
    "/v1/chat/completions": "chat",
    "/v1/responses": "responses",
    "/v1/messages": "messages",
    "/inference/v1/generate": "tokens",
}
"""Paths below an episode's address, for POST."""

_SAMPLING = "model temperature top_p top_k max_tokens n logprobs stop"
_ACCEPTED = {
    "chat": f"{_SAMPLING} max_completion_tokens stream stream_options messages tools",
    "responses": "model temperature top_p top_k max_output_tokens stream stream_options include "
    "input instructions tools",
    "messages": "model temperature top_p top_k max_tokens stop_sequences stream messages system "
    "tools",
    "tokens": f"{_SAMPLING} stop_token_ids token_ids",
}
_RENAMED = {
    "max_completion_tokens": "max_tokens", "max_output_tokens": "max_tokens",
    "stream_options": "include_usage", "logprobs": "wants_logprobs", "include": "wants_logprobs",
    "stop_sequences": "stop",
}  # fmt: skip
"""Fields of bodies that have another name in `ModelCall`."""

HARMLESS = frozenset({
    "user", "metadata", "store", "service_tier", "safety_identifier", "prompt_cache_key",
    "prompt_cache_retention", "prompt_cache_options", "cache_control", "cache_salt", "request_id",
    "skip_special_tokens", "spaces_between_special_tokens", "detokenize",
    # In messages, their parts, and tools:
    "annotations", "caller", "citations", "eager_input_streaming", "is_error", "parsed",
    "parsed_arguments", "phase", "provider_specific_fields", "signature", "status", "strict",
})  # fmt: skip
"""Fields that change nothing of what the policy reads and samples; they are read past."""

USUAL: dict[str, tuple[Any, ...]] = {
    "frequency_penalty": (0,), "presence_penalty": (0,), "repetition_penalty": (1,), "min_p": (0,),
    "min_tokens": (0,), "logit_bias": ({},), "top_logprobs": (0,), "ignore_eos": (False,),
    "tool_choice": ("auto", {"type": "auto"}), "parallel_tool_calls": (True,),
    "response_format": ({"type": "text"},), "text": ({"format": {"type": "text"}}, {}),
    "modalities": (["text"],), "thinking": ({"type": "disabled"},), "truncation": ("disabled",),
    "background": (False,), "priority": (0,), "summary": ([],), "stream": (False,),
    "stop": ([],),
}  # fmt: skip
"""Values that say the same as leaving a field out. Any other is refused."""

_HINTS = {
    "seed": "what is sampled follows from run.seed; leave it out",
    "tool_choice": "the policy chooses; send auto, and only tools that it may call",
    "parallel_tool_calls": "a turn may have several calls; send true, or leave it out",
    "top_logprobs": "only sampled tokens have log-probabilities; send 0",
    "previous_response_id thread": "nothing is kept between calls; send the whole conversation",
    "response_format text": "nothing constrains what is sampled; ask for the form in a message",
    "functions function_call": "send tools",
    "reasoning reasoning_effort thinking output_config chat_template_kwargs":
        "whether the policy reasons is the run's to say (data.chat_template_kwargs); leave it out",
}  # fmt: skip
"""What to do instead of sending these fields."""

_PARTS_OF = {
    "stream_options": ("include_usage", "include_obfuscation"),
    "include": ("message.output_text.logprobs", "reasoning.encrypted_content"),
}
"""What such fields may have in them. Nothing is obfuscated, and there is no encrypted reasoning."""

# What messages, their parts and tools may be, with their fields. The first is the usual type.
_ROLES = {
    "system": "content name", "developer": "content name", "user": "content name",
    "assistant": "content reasoning_content reasoning tool_calls",
    "tool": "content tool_call_id name",
}  # fmt: skip
_CALLS = {"function": "id name arguments index"}
_ITEMS = {
    "message": "role content id", "reasoning": "content id",
    "function_call": "call_id name arguments id", "function_call_output": "call_id output id",
}  # fmt: skip
_BLOCKS = {
    "user": {"tool_result": "tool_use_id content", "text": "text"},
    "assistant": {"thinking": "thinking", "text": "text", "tool_use": "id name input"},
}
_TOOLS = {"custom": "name description input_schema", "function": "name description parameters"}
_PARTS = {"text": "text", "input_text": "text", "output_text": "text logprobs"}
_THOUGHTS = {"reasoning_text": "text"}


class BadRequest(Exception):  # noqa: N818 - HTTP's name of it
    """A request that is refused: what is wrong and what to do, HTTP's status, OpenAI's code, and
    the field. `dialect_answers.refusal` is its body."""

    def __init__(
        self, message: str, *, status: int = 400, code: str | None = None, param: str | None = None
    ) -> None:
        super().__init__(message)
        self.status, self.message, self.code, self.param = status, message, code, param


class ModelCall(msgspec.Struct, frozen=True, kw_only=True):
    """What a program asks for. None stands for the run's own setting."""

    dialect: Dialect
    model: str = ""  # the name that the program gave; any is right
    messages: list[Message] = []
    """Roles are system, user, assistant and tool; `content` is text. An assistant's message has
    `reasoning_content` and `tool_calls` (arguments are mappings) only if it has any. Calls have
    `template.call_id` of their place, whatever the program calls them, so that equal conversations
    are equal lists; a tool's message has `name` and `tool_call_id`."""
    tools: list[Schema] = []
    token_ids: Annotated[list[Annotated[int, Meta(ge=0)]], Meta(min_length=1)] | None = None
    """The prompt, if the program sent tokens; there are no messages then."""
    temperature: Annotated[float, Meta(ge=0)] | None = None
    top_p: Annotated[float, Meta(gt=0, le=1)] | None = None
    top_k: Annotated[int, Meta(ge=0)] | None = None  # 0 is off
    max_tokens: Annotated[int, Meta(ge=1)] | None = None
    n: Annotated[int, Meta(ge=1)] = 1  # number of turns to sample from the same prompt
    stop: tuple[Annotated[str, Meta(min_length=1)], ...] = ()
    """Texts that end a turn, beside the model's own stop tokens."""
    stop_token_ids: frozenset[int] = frozenset()  # tokens that do
    stream: bool = False
    include_usage: bool = False
    """Whether a stream of chat completions ends with the usage; the others always do."""
    wants_logprobs: bool = False


def read(path: str, body: bytes) -> ModelCall:
    """Read the body of a POST to `path`, one of `DIALECTS`. Raises `BadRequest`."""
    if path not in DIALECTS:
        raise BadRequest(f"there is no {path}{nearest(path, DIALECTS)}", status=404)
    dialect = DIALECTS[path]
    try:
        values = _given(msgspec.json.decode(body))
    except (msgspec.DecodeError, RecursionError) as error:
        raise BadRequest(f"the body cannot be read: {error}") from None
    is_object = isinstance(values, dict)
    nested = values.pop("sampling_params", {}) if is_object and dialect == "tokens" else {}
    if not is_object or not isinstance(nested, dict):
        raise BadRequest("the body, and sampling_params, should be JSON objects")
    values |= nested
    fields = {"dialect": dialect, **_fields(dialect, values)}
    if dialect == "tokens":
        if "token_ids" not in fields:
            _refuse("token_ids", "should be the tokens of the prompt")
    else:
        pieces = {"chat": _chat, "responses": _responses, "messages": _messages}[dialect](values)
        fields["messages"] = messages = conversation(pieces)
        if not messages or messages[-1]["role"] == "assistant":
            where = "input" if dialect == "responses" else "messages"
            _refuse(where, "should end with a message that is not the assistant's")
        fields["tools"] = [_tool(at, each) for at, _, each in _each(values, "tools", "", _TOOLS)]
    try:
        return msgspec.convert(fields, ModelCall)
    except msgspec.ValidationError as error:
        what, _, where = str(error).removesuffix("`").partition(" - at `$.")
        theirs = (name for name in values if _RENAMED.get(name) == where.partition("[")[0])
        _refuse(next(theirs, where), what)


Piece = tuple[str, str, str, Any, Any]
"""A part of a conversation: where it is, and what.

    user, system     text, name ("": none), None
    think, say       text, None, None
    call             the program's id, name, arguments (JSON text or mapping)
    answer           the id of the call, text, None"""


def conversation(pieces: Iterable[Piece], turns: int = 0) -> list[Message]:
    """Put pieces together as `ModelCall.messages`, after so many turns of the assistant's. Raises
    `BadRequest`."""
    messages: list[Message] = []
    answers: dict[str, Message] = {}  # without their content
    only_thinks = False
    for where, kind, text, name, arguments in pieces:
        if kind == "think" and not text:
            continue
        last: Message = messages[-1] if messages else {"role": ""}
        if kind in ("think", "say", "call"):
            if last["role"] != "assistant" or (kind != "call" and not only_thinks):
                messages.append(last := {"role": "assistant", "content": ""})
                turns += 1
            only_thinks = kind == "think"
        if kind == "think":
            last["reasoning_content"] = last.get("reasoning_content", "") + text
        elif kind == "say":
            last["content"] = text
        elif kind == "call":
            calls = last.setdefault("tool_calls", [])
            calls.append(_call(where, call_id(turns - 1, len(calls)), name, arguments))
            answers[text] = {"role": "tool", "name": name, "tool_call_id": calls[-1]["id"]}
        elif kind != "answer":
            messages.append({"role": kind, "content": text} | ({"name": name} if name else {}))
        elif text in answers:
            messages.append(answers[text] | {"content": name})
        else:
            _refuse(where, f"answers the call {text!r}, which no earlier message makes")
    return messages


def _call(where: str, id: str, name: Any, arguments: Any) -> dict[str, Any]:
    try:
        call = call_of({"name": name, "arguments": arguments})
    except (ValueError, RecursionError) as error:
        _refuse(where, str(error))
    function = {"name": call.name, "arguments": json.loads(call.arguments)}
    return {"id": id, "type": "function", "function": function}


def _refuse(where: str, what: str) -> NoReturn:
    raise BadRequest(f"{where}: {what}", param=where)


_OPAQUE = "parameters", "input_schema", "input", "arguments"  # where a null means something


def _given(value: Any, name: str = "") -> Any:
    """Return JSON without fields that are null, which client libraries send for absent ones, and
    with what is in OpenAI's `function` of a tool or a call beside its type."""
    if isinstance(value, list):
        return [_given(each) for each in value]
    if not isinstance(value, dict) or name in _OPAQUE:
        return value
    given = {name: _given(each, name) for name, each in value.items() if each is not None}
    function = given.pop("function") if isinstance(given.get("function"), dict) else {}
    return given | function


def _fields(dialect: Dialect, values: dict[str, Any]) -> dict[str, Any]:
    """Return the fields of `ModelCall` that are neither messages nor tools."""
    fields: dict[str, Any] = {}
    accepted = _ACCEPTED[dialect].split()
    for name, value in values.items():
        if name in HARMLESS or value in USUAL.get(name, ()):
            continue
        if name not in accepted:
            hints = (hint for names, hint in _HINTS.items() if name in names.split())
            hint = next(hints, "it is not supported; leave it out")
            # By this code Anthropic's client knows that it has to send the whole conversation.
            code = "thread_unsupported_request" if name == "thread" else None
            raise BadRequest(f"{name} = {shown(value)}: {hint}", code=code, param=name)
        for each in value if name in _PARTS_OF and isinstance(value, dict | list) else ():
            if each not in _PARTS_OF[name]:
                _refuse(name, f"{shown(each)} is not supported; leave it out")
        ours = _RENAMED.get(name, name)
        if name == "top_k" and value == -1:
            value = 0
        elif name == "stream_options" and isinstance(value, dict):
            value = value.get("include_usage", False)
        elif name == "include" and isinstance(value, list):
            value = "message.output_text.logprobs" in value
        elif ours == "stop" and isinstance(value, str):
            value = [value]
        elif name == "logprobs" and dialect == "tokens" and value in (0, 1):
            value = True  # a number of tokens beside the sampled one: at most itself
        if ours in ModelCall.__struct_fields__ and fields.setdefault(ours, value) != value:
            _refuse(name, "another field says otherwise; send one of them")
    return fields


def _each(
    value: Mapping[str, Any], name: str, where: str, kinds: Mapping[str, str], key: str = "type"
) -> Iterator[tuple[str, str, dict[str, Any]]]:
    """Yield the objects of a list: where it is, its type or role, and the object. Refuse what is of
    no kind, and fields that one of its kind does not have."""
    entries, where = value.get(name, []), f"{where}.{name}".lstrip(".")
    if not isinstance(entries, list):
        _refuse(where, f"should be a list, is {shown(entries)}")
    for number, each in enumerate(entries):
        at = f"{where}[{number}]"
        if not isinstance(each, dict):
            _refuse(at, f"should be an object, is {shown(each)}")
        kind = each.get(key, next(iter(kinds)) if key == "type" else None)
        if not isinstance(kind, str) or kind not in kinds:
            _refuse(f"{at}.{key}", f"is {shown(kind)}, should be one of {', '.join(kinds)}")
        known = {key, *kinds[kind].split()} | HARMLESS
        for field, given in each.items():
            if field not in known and given not in USUAL.get(field, ()):
                _refuse(f"{at}.{field}", "is not supported; leave it out")
        yield at, kind, each


def _text(
    value: Mapping[str, Any], name: str, where: str, kinds: Mapping[str, str] = _PARTS
) -> str:
    """Return a text, "" if there is none. Its parts are lines, as in vLLM."""
    text = value.get(name, "")
    if isinstance(text, list):
        parts = _each(value, name, where, kinds)
        text = "\n".join(_text(part, "text", at) for at, _, part in parts)
    if not isinstance(text, str):
        _refuse(f"{where}.{name}".lstrip("."), f"should be text, is {shown(text)}")
    return text


def _tool(where: str, tool: dict[str, Any]) -> Schema:
    name, description = _text(tool, "name", where), _text(tool, "description", where)
    parameters = tool.get("parameters", tool.get("input_schema", {}))
    if not name or not isinstance(parameters, dict):
        _refuse(where, "should have a name, and a JSON schema of its arguments")
    parameters = {"type": "object", "properties": {}} | parameters
    function = {"name": name, "description": description, "parameters": parameters}
    return {"type": "function", "function": function}


def _chat(body: dict[str, Any]) -> Iterator[Piece]:
    for where, role, each in _each(body, "messages", "", _ROLES, "role"):
        text = _text(each, "content", where)
        if role == "tool":
            yield where, "answer", _text(each, "tool_call_id", where), text, None
        elif role != "assistant":
            kind = "user" if role == "user" else "system"
            yield where, kind, text, _text(each, "name", where), None
        else:
            names = "reasoning_content", "reasoning"  # vLLM has had both
            thoughts = {_text(each, name, where) for name in names} - {""}
            if len(thoughts) > 1:
                _refuse(where, f"{' and '.join(names)} differ; send one of them")
            yield where, "think", "".join(thoughts), None, None
            yield where, "say", text, None, None
            for at, _, call in _each(each, "tool_calls", where, _CALLS):
                id = _text(call, "id", at)
                yield at, "call", id, call.get("name"), call.get("arguments")


def _responses(body: dict[str, Any]) -> Iterator[Piece]:
    if instructions := _text(body, "instructions", ""):
        yield "", "system", instructions, None, None
    if isinstance(body.get("input"), str):
        body = {"input": [{"role": "user", "content": body["input"]}]}
    for where, kind, each in _each(body, "input", "", _ITEMS):
        id = _text(each, "call_id", where)
        if kind == "function_call":
            yield where, "call", id, each.get("name"), each.get("arguments")
        elif kind == "function_call_output":
            yield where, "answer", id, _text(each, "output", where), None
        elif kind == "reasoning":
            yield where, "think", _text(each, "content", where, _THOUGHTS), None, None
        else:
            kinds = {"user": "user", "assistant": "say", "system": "system", "developer": "system"}
            if (role := _text(each, "role", where)) not in kinds:
                _refuse(f"{where}.role", f"is {role!r}, should be one of {', '.join(kinds)}")
            yield where, kinds[role], _text(each, "content", where), None, None


def _messages(body: dict[str, Any]) -> Iterator[Piece]:
    if system := _text(body, "system", ""):
        yield "", "system", system, None, None
    roles = dict.fromkeys(_BLOCKS, "content")
    for where, role, each in _each(body, "messages", "", roles, "role"):
        if isinstance(each.get("content"), str):
            each = {"content": [{"type": "text", "text": each["content"]}]}
        blocks = list(_each(each, "content", where, _BLOCKS[role]))
        yield from (_turn if role == "assistant" else _heard)(where, blocks)


Block = tuple[str, str, dict[str, Any]]
"""Of Anthropic's: where it is, its type, and the block."""


def _heard(where: str, blocks: list[Block]) -> Iterator[Piece]:
    for kind, group in groupby(blocks, key=itemgetter(1)):
        found = [(at, block) for at, _, block in group]
        if kind == "text":
            yield (
                where,
                "user",
                "\n".join(_text(each, "text", at) for at, each in found),
                None,
                None,
            )
            continue
        for at, each in found:
            yield at, "answer", _text(each, "tool_use_id", at), _text(each, "content", at), None


def _turn(where: str, blocks: list[Block]) -> Iterator[Piece]:
    found: dict[str, list[tuple[str, dict[str, Any]]]] = {name: [] for name in _BLOCKS["assistant"]}
    kinds = [*found]
    for at, kind, block in blocks:
        if kind == "text" and not _text(block, "text", at):
            continue
        if any(found[later] for later in kinds[kinds.index(kind) + 1 :]):
            _refuse(at, f"a turn is {', '.join(kinds)}, in this order, in which templates write it")
        found[kind].append((at, block))
    for at, block in found["thinking"]:
        yield at, "think", _text(block, "thinking", at), None, None
    texts = [_text(block, "text", at) for at, block in found["text"]]
    yield where, "say", "\n".join(texts), None, None
    for at, block in found["tool_use"]:
        yield at, "call", _text(block, "id", at), block.get("name"), block.get("input")
