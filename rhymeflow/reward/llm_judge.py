"""The built-in reward `llm_judge`: a language model on an OpenAI-compatible server scores
responses.

This process asks each question only once. An answer without a number is an error."""

from __future__ import annotations

import re
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from typing import Any

from rhymeflow.errors import UserError
from rhymeflow.reward.builtin import content
from rhymeflow.utils.openai_api import asking


def llm_judge(
    url: str,
    model: str,
    prompt: str,
    pattern: str = r"(-?\d+(?:\.\d+)?)(?!.*\d)",
    scale: float = 1.0,
    concurrency: int = 16,
    retries: int = 3,
    timeout: float = 30.0,
    max_tokens: int = 256,
    api_key_variable: str = "OPENAI_API_KEY",
) -> Callable[..., list[float]]:
    """Have a model score each response.

    Args:
        url: address of the server, up to `/v1`.
        model: name of the model on the server.
        prompt: the question, with `{prompt}`, `{completion}` and columns of the data in braces.
        pattern: regular expression whose first group is the reward; by default the last number.
        scale: divisor of the number.
        concurrency: questions at a time of each of `reward.num_workers` processes.
        retries: further tries if the server is busy, gone, or silent for `timeout` seconds.
            `reward.timeout` limits a whole group with all tries.
        timeout: longest time for one answer in seconds.
        max_tokens: longest answer in tokens.
        api_key_variable: environment variable with the key; if it is empty, no key is sent."""
    try:
        compiled = re.compile(pattern, re.DOTALL)
    except re.error as error:
        raise UserError(f"pattern {pattern!r} is no regular expression: {error}") from None
    if not compiled.groups:
        raise UserError(f"pattern {pattern!r} has no group")
    if scale == 0:
        raise UserError("scale is 0")
    if not url.startswith(("http://", "https://")):
        raise UserError(f"url is {url!r}, should begin with http:// or https://")
    chat = url.rstrip("/") + "/chat/completions"
    ask = asking(chat, timeout, retries, api_key_variable=api_key_variable)
    rewards: dict[str, float] = {}  # by question
    pool = ThreadPoolExecutor(concurrency, "judge")

    def judge(question: str) -> float:
        if question not in rewards:
            messages = [{"role": "user", "content": question}]
            reply = ask(model=model, messages=messages, temperature=0, max_tokens=max_tokens)
            answer = str(reply["choices"][0]["message"]["content"])
            match = compiled.search(answer)
            if match is None:
                raise ValueError(f"the judge's answer has no reward: {answer[:200]!r}")
            rewards[question] = float(match[1]) / scale
        return rewards[question]

    def score(
        completions: list[Any], prompts: list[Any], completion_ids: list[list[int]], **columns: Any
    ) -> list[float]:
        questions = []
        for number, completion in enumerate(completions):
            row = {name: str(values[number]) for name, values in columns.items()}
            row |= {"prompt": content(prompts[number]), "completion": content(completion)}
            questions.append(_filled(prompt, row))
        return list(pool.map(judge, questions))

    return score


def _filled(template: str, row: dict[str, str]) -> str:
    """Replace names of the row in braces by their values; other braces stay."""
    return re.sub(r"\{(\w+)\}", lambda match: row.get(match[1], match[0]), template)
