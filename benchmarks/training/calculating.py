"""The task of recipe `smollm2_tools`, played by a program that knows the policy's address."""

from __future__ import annotations

import json
import re
from http.client import HTTPConnection
from typing import Any
from urllib.parse import urlsplit

from rhymeflow.config.load import read_config
from rhymeflow.recipes.smollm2_tools.task import calculate

CONFIG = read_config("smollm2_tools")
BEGINNING = [
    {"role": "system", "content": CONFIG.data.system_prompt},
    *(
        {"role": "user" if each.role == "tool" else each.role, "content": each.content}
        for each in CONFIG.data.few_shot
    ),
]
"""What the class says, but that the user gives the calculator's answers: its model's template knows
no calls, and a message of a tool has to answer one."""
_CALL = re.compile(r"<tool_call>(.*?)</tool_call>", re.DOTALL)


def solve(base_url: str, row: dict[str, Any]) -> None:
    """Play one episode, on which the recipe's reward functions look."""
    place = urlsplit(base_url)
    connection = HTTPConnection(place.hostname or "", place.port)
    messages = [*BEGINNING, {"role": "user", "content": row["prompt"]}]
    for _ in range(CONFIG.environment.max_turns):
        body = json.dumps({"model": "policy", "messages": messages})
        connection.request("POST", f"{place.path}/chat/completions", body)
        answer = json.load(connection.getresponse())
        if error := answer.get("error"):
            if error["code"] == "context_length_exceeded":
                return
            raise RuntimeError(error["message"])
        turn = answer["choices"][0]["message"]["content"]
        if (call := _CALL.search(turn)) is None:
            return
        messages.append({"role": "assistant", "content": turn})
        messages.append({"role": "user", "content": answered(call[1])})


def answered(call: str) -> str:
    """What the calculator says to a call, right or wrong."""
    try:
        return calculate(**json.loads(call)["arguments"])
    except (ValueError, TypeError, KeyError, ArithmeticError) as error:
        return f"Error: {error}"
