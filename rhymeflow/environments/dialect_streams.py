"""Writes a policy's turns as server-sent events while they are generated, as a program's client
library reads them, in the dialect of the call.

A turn's text goes out as it grows. Its calls, and why it ended, are the end of the stream."""

from __future__ import annotations

import json
from collections.abc import Iterable, Iterator, Sequence
from itertools import count
from typing import Any

from rhymeflow.environments.dialect_answers import Body, ModelTurn, answer, logprobs_of
from rhymeflow.environments.dialects import Dialect, ModelCall


class Stream:
    """The events of the answer to one call; `turns` are those that it begins with, all empty."""

    def __init__(self, call: ModelCall, turns: Sequence[ModelTurn], *, created: int) -> None:
        self._call, self._created = call, created
        self._head = answer(call, turns, created=created)
        self._has_begun = False
        self._sent: dict[int, tuple[int, int]] = {}
        """Of each turn, how many characters of its content, and how many tokens."""
        self._numbers = count()

    def more(self, index: int, turn: ModelTurn) -> bytes:
        """Return the events by which the content of a turn goes on; it is all that there is so far,
        and remains as it is."""
        num_sent, _ = self._sent.get(index, (0, 0))
        return self._written(self._delta(index, turn)) if len(turn.content) > num_sent else b""

    def end(self, turns: Sequence[ModelTurn]) -> bytes:
        """Return the other events of the answer, which are all if nothing was sent."""
        body = answer(self._call, turns, created=self._created)
        return self._written(self._end(turns, body))

    def _written(self, events: Iterable[Body]) -> bytes:
        if not self._has_begun:
            events = [*self._begin(), *events]
        self._has_begun = True
        lines = []
        for event in events:
            if self._call.dialect == "responses":
                event["sequence_number"] = next(self._numbers)
            name = f"event: {event['type']}\n" if "type" in event else ""
            lines.append(f"{name}data: {json.dumps(event)}\n\n")
        return "".join(lines).encode()

    def _new(self, index: int, turn: ModelTurn) -> tuple[str, list[Body], bool]:
        """Return the text and the log-probabilities of a turn that were not sent, which now are,
        and whether nothing was."""
        is_first = index not in self._sent
        num_chars, num_tokens = self._sent.get(index, (0, 0))
        self._sent[index] = len(turn.content), len(turn.tokens)
        logged = logprobs_of(turn, num_tokens) if self._call.wants_logprobs else []
        return turn.content[num_chars:], logged, is_first

    def _begin(self) -> Iterable[Body]:
        """Return the events before all others."""
        return ()

    def _delta(self, index: int, turn: ModelTurn) -> Iterator[Body]:
        """Yield the events by which the content of a turn goes on, or begins."""
        raise NotImplementedError

    def _end(self, turns: Sequence[ModelTurn], body: Body) -> Iterator[Body]:
        """Yield what was not sent of an answer's `body`."""
        raise NotImplementedError


class _Chat(Stream):
    def _chunk(self, choices: list[Body], **more: Any) -> Body:
        kept = {name: self._head[name] for name in ("id", "created", "model")}
        return kept | {"object": "chat.completion.chunk", "choices": choices} | more

    def _choice(self, index: int, delta: Body, **more: Any) -> Body:
        choice = {"index": index, "delta": delta, "finish_reason": None, "logprobs": None}
        return self._chunk([choice | more])

    def _delta(self, index: int, turn: ModelTurn) -> Iterator[Body]:
        text, logged, is_first = self._new(index, turn)
        delta: Body = {"content": text}
        if is_first:
            delta |= {"role": "assistant", "refusal": None}
        if turn.reasoning:
            delta["reasoning_content"] = turn.reasoning
        if text or logged or is_first:
            logprobs = {"content": logged, "refusal": None} if self._call.wants_logprobs else None
            yield self._choice(index, delta, logprobs=logprobs)

    def _end(self, turns: Sequence[ModelTurn], body: Body) -> Iterator[Body]:
        for choice, turn in zip(body["choices"], turns, strict=True):
            index, calls = choice["index"], choice["message"].get("tool_calls")
            yield from self._delta(index, turn)
            if calls:
                numbered = [{"index": number} | each for number, each in enumerate(calls)]
                yield self._choice(index, {"tool_calls": numbered})
            yield self._choice(index, {}, finish_reason=choice["finish_reason"])
        if self._call.include_usage:
            yield self._chunk([], usage=body["usage"])

    def end(self, turns: Sequence[ModelTurn]) -> bytes:
        return super().end(turns) + b"data: [DONE]\n\n"


class _Responses(Stream):
    def _begin(self) -> Iterable[Body]:
        begun = self._head | {"status": "in_progress", "output": [], "usage": None}
        kinds = "response.created", "response.in_progress"
        return [{"type": kind, "response": begun} for kind in kinds]

    def _delta(self, index: int, turn: ModelTurn) -> Iterator[Body]:
        text, logged, is_first = self._new(0, turn)
        item = self._head["output"][0]
        at = {"item_id": item["id"], "output_index": index, "content_index": 0}
        if is_first:
            yield _added(index, item, content=[])
            yield {"type": "response.content_part.added", "part": item["content"][0]} | at
        if text or logged or is_first:
            logged = [each | {"bytes": each["bytes"] or []} for each in logged]  # null is none
            yield {"type": "response.output_text.delta", "delta": text, "logprobs": logged} | at

    def _end(self, turns: Sequence[ModelTurn], body: Body) -> Iterator[Body]:
        for index, item in enumerate(body["output"]):
            at: Body = {"item_id": item["id"], "output_index": index}
            if item["type"] == "function_call":
                name, text = "response.function_call_arguments", item["arguments"]
                yield _added(index, item, arguments="")
                yield {"type": f"{name}.delta", "delta": text} | at
                yield {"type": f"{name}.done", "arguments": text, "name": item["name"]} | at
            else:
                part = item["content"][0]
                at["content_index"] = 0
                name, text = f"response.{part['type']}", part["text"]
                more = {"logprobs": part["logprobs"]} if "logprobs" in part else {}
                if item["type"] == "message":
                    yield from self._delta(index, turns[0])
                else:
                    empty = part | {"text": ""}
                    yield _added(index, item, content=[])
                    yield {"type": "response.content_part.added", "part": empty} | at
                    yield {"type": f"{name}.delta", "delta": text} | at
                yield {"type": f"{name}.done", "text": text} | more | at
                yield {"type": "response.content_part.done", "part": part} | at
            yield {"type": "response.output_item.done", "output_index": index, "item": item}
        yield {"type": f"response.{body['status']}", "response": body}


def _added(index: int, item: Body, **empty: Any) -> Body:
    added = item | {"status": "in_progress"} | empty
    return {"type": "response.output_item.added", "output_index": index, "item": added}


_DELTAS = {
    "thinking": ("thinking", "thinking_delta", "thinking"),
    "tool_use": ("input", "input_json_delta", "partial_json"),
}
"""By type of a block: its field, and the type and field of what adds to it."""


class _Messages(Stream):
    def _begin(self) -> Iterable[Body]:
        return [{"type": "message_start", "message": self._head | {"stop_reason": None}}]

    def _delta(self, index: int, turn: ModelTurn) -> Iterator[Body]:
        text, _, is_first = self._new(0, turn)
        if is_first:
            yield _block(index, {"type": "text", "text": "", "citations": None})
        if text:
            yield _added_to(index, "text_delta", "text", text)

    def _end(self, turns: Sequence[ModelTurn], body: Body) -> Iterator[Body]:
        for index, block in enumerate(body["content"]):
            if block["type"] == "text":
                yield from self._delta(index, turns[0])
            else:
                field, kind, name = _DELTAS[block["type"]]
                is_text = isinstance(block[field], str)
                yield _block(index, block | {field: "" if is_text else {}})
                text = block[field] if is_text else json.dumps(block[field])
                yield _added_to(index, kind, name, text)
            yield {"type": "content_block_stop", "index": index}
        why = {name: body[name] for name in ("stop_reason", "stop_sequence")}
        yield {"type": "message_delta", "delta": why, "usage": body["usage"]}
        yield {"type": "message_stop"}


def _block(index: int, block: Body) -> Body:
    return {"type": "content_block_start", "index": index, "content_block": block}


def _added_to(index: int, kind: str, name: str, text: str) -> Body:
    delta = {"type": kind, name: text}
    return {"type": "content_block_delta", "index": index, "delta": delta}


STREAMS: dict[Dialect, type[Stream]] = {
    "chat": _Chat,
    "responses": _Responses,
    "messages": _Messages,
}
