"""Writes a policy's finished turns as the answer that a program's client library reads, one JSON
body in the dialect of the call; `dialect_streams` writes it as events."""

from __future__ import annotations

import json
from collections.abc import Iterator, Sequence
from typing import Any, Literal

import msgspec

from rhymeflow.data.prompts import Message
from rhymeflow.environments.dialects import BadRequest, ModelCall, Piece, conversation
from rhymeflow.environments.messages import Call

Body = dict[str, Any]


class ModelTurn(msgspec.Struct, frozen=True, kw_only=True):
    """A finished turn of the policy."""

    id: str
    """Letters, digits, `-` and `_`; no other turn of the episode has it. Ids of answers and of tool
    calls are made of it."""
    prompt_ids: list[int]
    tokens: list[int]  # all sampled tokens, the stop token included
    logprobs: list[float]
    pieces: list[str] = []  # the tokens' texts; needed if the call wants log-probabilities
    content: str  # what the program reads: without calls and stop token
    reasoning: str = ""  # reasoning that is no part of `content`
    calls: list[Call] = []
    """The calls that could be read, with arguments of the schema's types; text of others stays in
    `content`."""
    finish: Literal["stop", "length"]
    stop: str | None = None  # the stop text that ended it, which is not in `content`


def message_of(call: ModelCall, turn: ModelTurn) -> Message:
    """Return the turn as the message that a later call has at this place, if the program sends the
    conversation back unchanged."""
    before = sum(each["role"] == "assistant" for each in call.messages)
    pieces: list[Piece] = [("", "think", turn.reasoning, None, None)]
    pieces += [("", "say", turn.content, None, None)]
    pieces += [("", "call", "", each.name, each.arguments) for each in turn.calls]
    return conversation(pieces, before)[0]


def answer(call: ModelCall, turns: Sequence[ModelTurn], *, created: int) -> Body:
    """Return the body for `call.n` turns; `created` is the time in Unix seconds."""
    writers = {"chat": _chat, "responses": _response, "messages": _message, "tokens": _tokens}
    return writers[call.dialect](call, turns, created)


def refusal(path: str, error: BadRequest) -> Body:
    """Return the body that goes with `error.status`, for a request to `path`."""
    kinds = {400: "invalid_request_error", 404: "not_found_error"}
    kind = kinds.get(error.status, "api_error")
    if path.startswith("/v1/messages"):
        details = {"error_code": error.code}
        what: Body = {"type": kind, "message": error.message, "details": details}
        return {"type": "error", "error": what}
    what = {"message": error.message, "type": kind, "param": error.param, "code": error.code}
    return {"error": what}


def too_long(path: str, length: int, limit: int) -> BadRequest:
    """Return the error for a prompt of `length` tokens in a context of `limit`, in the words by
    which clients of the dialect know it."""
    message = f"This model's maximum context length is {limit} tokens; the prompt has {length}"
    if path == "/v1/messages":
        message = f"prompt is too long: {length} tokens > {limit} maximum"
    return BadRequest(message, code="context_length_exceeded")


def models(name: str, max_length: int) -> Body:
    """Return the body of GET /v1/models, as the clients of OpenAI and of Anthropic read it."""
    model = {
        "id": name, "object": "model", "created": 0, "owned_by": "rhymeflow",
        "max_model_len": max_length,
        "type": "model", "display_name": name, "created_at": "1970-01-01T00:00:00Z",
    }  # fmt: skip
    return {"object": "list", "data": [model], "has_more": False, "first_id": name, "last_id": name}


def _call_ids(turn: ModelTurn, lead: str) -> Iterator[tuple[str, Call]]:
    for number, each in enumerate(turn.calls):
        yield f"{lead}_{turn.id}_{number}", each


def logprobs_of(turn: ModelTurn, start: int = 0) -> list[Body]:
    """Return all sampled tokens from `start` on with their log-probabilities; bytes are null in a
    part of a character."""
    return [
        {
            "token": piece,
            "logprob": logprob,
            "bytes": None if "\ufffd" in piece else list(piece.encode()),
            "top_logprobs": [],
        }
        for piece, logprob in zip(turn.pieces[start:], turn.logprobs[start:], strict=True)
    ]


def _chat(call: ModelCall, turns: Sequence[ModelTurn], created: int) -> Body:
    choices = []
    for index, turn in enumerate(turns):
        message: Body = {"role": "assistant", "content": turn.content, "refusal": None}
        if turn.reasoning:
            message["reasoning_content"] = turn.reasoning
        if turn.calls:
            message["tool_calls"] = [
                {
                    "id": id,
                    "type": "function",
                    "function": {"name": c.name, "arguments": c.arguments},
                }
                for id, c in _call_ids(turn, "call")
            ]
        reason = "tool_calls" if turn.calls and turn.finish == "stop" else turn.finish
        logprobs = {"content": logprobs_of(turn), "refusal": None} if call.wants_logprobs else None
        choices.append({
            "index": index, "message": message, "finish_reason": reason,
            "logprobs": logprobs,
        })  # fmt: skip
    prompt, said = len(turns[0].prompt_ids), sum(len(turn.tokens) for turn in turns)
    return {
        "id": f"chatcmpl-{turns[0].id}", "object": "chat.completion", "created": created,
        "model": call.model, "choices": choices,
        "usage": {
            "prompt_tokens": prompt, "completion_tokens": said, "total_tokens": prompt + said
        },
    }  # fmt: skip


def _response(call: ModelCall, turns: Sequence[ModelTurn], created: int) -> Body:
    turn = turns[0]
    status = "completed" if turn.finish == "stop" else "incomplete"
    output: list[Body] = []
    if turn.reasoning:
        thought = {"type": "reasoning_text", "text": turn.reasoning}
        output.append({"type": "reasoning", "id": f"rs_{turn.id}", "content": [thought]})
        output[0] |= {"summary": [], "status": status}
    if turn.content or not turn.calls:
        logprobs = logprobs_of(turn) if call.wants_logprobs else []
        logprobs = [each | {"bytes": each["bytes"] or []} for each in logprobs]  # null is none
        text = {"type": "output_text", "text": turn.content, "annotations": []}
        output.append({
            "type": "message", "id": f"msg_{turn.id}", "role": "assistant", "status": status,
            "content": [text | {"logprobs": logprobs}],
        })  # fmt: skip
    for id, each in _call_ids(turn, "call"):
        output.append({
            "type": "function_call", "id": f"fc_{id}", "call_id": id, "name": each.name,
            "arguments": each.arguments, "status": status,
        })  # fmt: skip
    prompt, said = len(turn.prompt_ids), len(turn.tokens)
    cut = {"reason": "max_output_tokens"}
    return {
        "id": f"resp_{turn.id}", "object": "response", "created_at": created, "model": call.model,
        "status": status, "incomplete_details": cut if turn.finish == "length" else None,
        "error": None, "output": output, "instructions": None, "metadata": {},
        "temperature": call.temperature, "top_p": call.top_p, "max_output_tokens": call.max_tokens,
        "tools": [{"type": "function", "strict": False} | each["function"] for each in call.tools],
        "tool_choice": "auto", "parallel_tool_calls": True, "previous_response_id": None,
        "truncation": "disabled",
        "usage": {
            "input_tokens": prompt, "output_tokens": said, "total_tokens": prompt + said,
            "input_tokens_details": {"cached_tokens": 0, "cache_write_tokens": 0},
            "output_tokens_details": {"reasoning_tokens": 0},
        },
    }  # fmt: skip


def _message(call: ModelCall, turns: Sequence[ModelTurn], created: int) -> Body:
    turn = turns[0]
    content: list[Body] = []
    if turn.reasoning:
        content.append({"type": "thinking", "thinking": turn.reasoning, "signature": ""})
    if turn.content:
        content.append({"type": "text", "text": turn.content, "citations": None})
    for id, each in _call_ids(turn, "toolu"):
        arguments = json.loads(each.arguments)
        content.append({"type": "tool_use", "id": id, "name": each.name, "input": arguments})
    stop = None if turn.calls or turn.finish == "length" else turn.stop
    reason = "tool_use" if turn.calls else "end_turn" if stop is None else "stop_sequence"
    return {
        "id": f"msg_{turn.id}", "type": "message", "role": "assistant", "model": call.model,
        "content": content, "stop_reason": "max_tokens" if turn.finish == "length" else reason,
        "stop_sequence": stop,
        "usage": {
            "input_tokens": len(turn.prompt_ids), "output_tokens": len(turn.tokens),
            "cache_creation_input_tokens": 0, "cache_read_input_tokens": 0,
        },
    }  # fmt: skip


def _tokens(call: ModelCall, turns: Sequence[ModelTurn], created: int) -> Body:
    choices = []
    for index, turn in enumerate(turns):
        logprobs = None
        if call.wants_logprobs:
            pieces = [f"token_id:{token}" for token in turn.tokens]
            logprobs = {"content": logprobs_of(msgspec.structs.replace(turn, pieces=pieces))}
        choices.append({
            "index": index, "token_ids": turn.tokens, "finish_reason": turn.finish,
            "logprobs": logprobs,
        })  # fmt: skip
    return {"request_id": turns[0].id, "choices": choices}
