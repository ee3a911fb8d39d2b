"""Plays a class with `step` as an agent's program, for templates that change earlier turns.

Each turn is asked for with the whole conversation: what such a template makes of it is a sequence
of its own. The launcher imports this file by its path, so it imports the standard library alone.
"""

from __future__ import annotations

import copy
import inspect
import json
import urllib.error
import urllib.request
from collections.abc import Callable
from typing import Any

Messages = list[dict[str, Any]]

_DIRECTLY = urllib.request.build_opener(urllib.request.ProxyHandler({}))


def player(made: Callable[[], Any], most_turns: int, most_chars: int) -> Callable[..., Any]:
    """Return a program that plays objects of this class, up to `most_turns`; answers are cut to
    `most_chars`. See `environments.Environment` for the methods."""

    async def played(world: Any, base_url: str, row: dict[str, Any], seed: int) -> Any:
        messages = await _opened(world, row, seed)
        for _ in range(most_turns):
            turn = _asked(base_url, messages)
            if turn is None:
                break
            messages.append(turn)
            answer = await _value(world.step(copy.deepcopy(messages)))
            if answer is None:
                break
            messages += _answers(answer, most_chars)
        return await _value(world.reward()) if hasattr(world, "reward") else None

    async def play(base_url: str, row: dict[str, Any], seed: int) -> Any:
        world = made()
        try:
            return await played(world, base_url, row, seed)
        finally:
            if hasattr(world, "close"):
                await _value(world.close())

    return play


async def _opened(world: Any, row: dict[str, Any], seed: int) -> Messages:
    """Reset the environment; return the prompt, with the text that it opens with."""
    columns, prompt = {**row}, copy.deepcopy(row["prompt"])
    del columns["prompt"]
    parameters = inspect.signature(world.reset).parameters
    takes_all = any(each.kind is each.VAR_KEYWORD for each in parameters.values())
    values = {"seed": seed, "prompt": row["prompt"], **columns}
    given = columns if takes_all else {}
    given |= {name: each for name, each in values.items() if name in parameters}
    text = await _value(world.reset(**given))
    messages: Messages = prompt
    if isinstance(prompt, str):
        messages = [{"role": "user", "content": prompt}]
    if text:
        last = [each for each in messages if each["role"] == "user"][-1]
        last["content"] += text
    return messages


def _asked(base_url: str, messages: Messages) -> dict[str, Any] | None:
    """Return the policy's turn, with its reasoning if that is apart; None: there is no room."""
    body = json.dumps({"model": "policy", "messages": messages}).encode()
    request = urllib.request.Request(f"{base_url}/chat/completions", body)
    try:
        with _DIRECTLY.open(request) as answer:
            turn = json.load(answer)["choices"][0]["message"]
            return {name: each for name, each in turn.items() if each is not None}
    except urllib.error.HTTPError as error:
        said = json.load(error)["error"]
        if said.get("code") == "context_length_exceeded":
            return None
        raise RuntimeError(said["message"]) from None


def _answers(answer: Any, most_chars: int) -> Messages:
    """Return what the environment answered as messages. Raises `TypeError` if it is no answer."""
    if isinstance(answer, str):
        answer = [{"role": "user", "content": answer}]
    is_list = isinstance(answer, list) and answer and all(isinstance(x, dict) for x in answer)
    if not is_list or any(each.get("role") in (None, "assistant") for each in answer):
        raise TypeError(
            f"step returned {answer!r:.100}, should be text, messages of others, or None"
        )
    messages: Messages = answer
    for each in messages:
        text = each["content"]
        if len(text) > most_chars:
            note = f"\n[cut: {most_chars} of {len(text)} characters]"
            each["content"] = text[:most_chars] + note
        most_chars = max(most_chars - len(text), 0)
    return messages


async def _value(value: Any) -> Any:
    return await value if inspect.isawaitable(value) else value
