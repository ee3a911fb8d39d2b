"""Plays `environment.classes` as an agent's program, for templates that change earlier turns.

Each turn is asked for with the whole conversation: what such a template makes of it is a sequence
of its own.
"""

from __future__ import annotations

import asyncio
import json
import urllib.error
import urllib.request
from collections.abc import Awaitable, Callable
from typing import Any

from rhymeflow.config import EnvironmentConfig
from rhymeflow.data.encode import Schema
from rhymeflow.data.prompts import Message, kind_of, opened
from rhymeflow.environments.kinds import load_kinds
from rhymeflow.environments.live import LiveEnvironment
from rhymeflow.environments.messages import Call, Opening, Said
from rhymeflow.environments.parsing import parse_calls

_DIRECTLY = urllib.request.build_opener(urllib.request.ProxyHandler({}))


def player(section_json: str) -> Callable[[str, dict[str, Any], int], Awaitable[float | None]]:
    """Return a program that plays the classes and tools of a section `environment`. Raises
    `UserError` if one cannot be used."""
    section = EnvironmentConfig.model_validate_json(section_json)
    kinds = load_kinds(section)
    schemas, names = [kind.schemas() for kind in kinds], [kind.name for kind in kinds]

    async def play(base_url: str, row: dict[str, Any], seed: int) -> float | None:
        columns = {**row}
        prompt = columns.pop("prompt")
        index = kind_of(names, columns, "the row")
        live = LiveEnvironment(0, section, kinds[index], schemas[index])
        try:
            begun = await live.open(Opening(index, seed, prompt, columns))
            prompt = opened(prompt, begun.text)
            messages = [{"role": "user", "content": prompt}] if isinstance(prompt, str) else prompt
            for _ in range(section.max_turns):
                turn = await asyncio.to_thread(_asked, base_url, messages, schemas[index])
                if turn is None:
                    break
                said = _said(turn, has_tools=bool(schemas[index]))
                answer = (await live.step(said)).answer
                if answer is None:
                    break
                messages = [*messages, turn, *_answers(turn, said, answer)]
            return (await live.judge()).value
        finally:
            await live.close()

    return play


def _asked(base_url: str, messages: list[Message], tools: list[Schema]) -> Message | None:
    """Return the policy's turn, with its reasoning if that is apart; None: there is no room."""
    body: dict[str, Any] = {"model": "policy", "messages": messages}
    if tools:
        names = "name", "description", "parameters"  # transformers' schemas have more
        functions = [{name: each["function"][name] for name in names} for each in tools]
        body["tools"] = [{"type": "function", "function": each} for each in functions]
    request = urllib.request.Request(f"{base_url}/chat/completions", json.dumps(body).encode())
    try:
        with _DIRECTLY.open(request) as answer:
            turn = json.load(answer)["choices"][0]["message"]
            return {name: each for name, each in turn.items() if each is not None}
    except urllib.error.HTTPError as error:
        said = json.load(error)["error"]
        if said.get("code") == "context_length_exceeded":
            return None
        raise RuntimeError(said["message"]) from None


def _said(turn: Message, *, has_tools: bool) -> Said:
    """Return a turn with its calls; if there are none, with those that cannot be read."""
    functions = [each["function"] for each in turn.get("tool_calls", ())]
    calls = [Call(each["name"], each["arguments"]) for each in functions]
    if has_tools and not calls:
        calls = [each for each in parse_calls(turn["content"]) if each.error]
    return Said(turn["content"], calls)


def _answers(turn: Message, said: Said, answer: list[Message] | str) -> list[Message]:
    """Return what the environment answered as messages. A call that cannot be read is none of the
    turn's, so its answer is the user's."""
    if isinstance(answer, str):
        return [{"role": "user", "content": answer}]
    if "tool_calls" in turn:
        ids = [each["id"] for each in turn["tool_calls"]]
        return [{**each, "tool_call_id": id} for id, each in zip(ids, answer, strict=True)]
    return (
        [{"role": "user", "content": each["content"]} for each in answer] if said.calls else answer
    )
