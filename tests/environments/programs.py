"""Programs of agents, run in processes of their own: each does what its row says."""

from __future__ import annotations

import contextlib
import json
import os
import subprocess
import sys
import threading
import time
import urllib.error
import urllib.request
from pathlib import Path
from typing import Any

FILE = Path(__file__)


def post(
    base_url: str, said: list[dict[str, Any]], path="/chat/completions", patience=60, **more: Any
) -> dict[str, Any]:
    """The body of an answer."""
    headers = more.pop("headers", {})
    body = json.dumps({"messages": said, **more}).encode()
    request = urllib.request.Request(base_url + path, body, headers)
    try:
        with urllib.request.urlopen(request, timeout=patience) as answer:
            return json.load(answer)
    except urllib.error.HTTPError as error:
        return json.load(error)


def ask(base_url: str, said: list[dict[str, Any]], **more: Any) -> dict[str, Any]:
    """The message of an answer."""
    return post(base_url, said, **more)["choices"][0]["message"]


def user(text: str) -> dict[str, str]:
    return {"role": "user", "content": text}


def talks(base_url, row, seed):
    """Two turns; then what the policy said first is edited; then another conversation."""
    begin = [user(row["prompt"])]
    first = ask(base_url, begin)
    second = [*begin, first, user("go on")]
    ask(base_url, second)
    if row.get("branches"):
        ask(base_url, [*begin, {**first, "content": "0"}, user("go on")])
        ask(base_url, [*begin, first, user("or else")])
        ask(base_url, [user("summary")], max_tokens=2)
    return sum(each in "02468" for each in first["content"]) / 10


ADD = {
    "type": "function",
    "function": {
        "name": "add",
        "description": "Add.",
        "parameters": {"type": "object", "properties": {"a": {"type": "integer"}}},
    },
}


def uses_tools(base_url, row):
    """Answers a call, as the client of OpenAI sends it back."""
    begin = [user(row["prompt"])]
    turn = ask(base_url, begin, tools=[ADD])
    [call] = turn["tool_calls"]
    arguments = json.loads(call["function"]["arguments"])
    answer = {"role": "tool", "tool_call_id": call["id"], "content": str(arguments["a"] + 1)}
    said = ask(base_url, [*begin, turn, answer], tools=[ADD])["content"]
    ask(base_url, [*begin, turn, answer])  # without tools it is another conversation
    return float(said)


def needs_more(base_url, prompt, *rest, verbose=False):
    raise AssertionError


def one(base_url, row):
    return float(len(ask(base_url, [user(row["prompt"])])["content"]))


async def misbehaves(base_url, row, seed):  # noqa: C901 - a table
    """As its row says."""
    begin = [user("a")]
    match row["does"]:
        case "raise":
            ask(base_url, begin)
            raise ValueError("no, thank you")
        case "raise at once":
            raise ValueError("not today")
        case "exit":
            os._exit(3)
        case "exit in silence":
            ask(base_url, begin)
            os._exit(0)
        case "die":
            os.kill(os.getpid(), 9)
        case "kill its launcher":
            ask(base_url, begin)
            os.kill(os.getppid(), 9)
        case "hang":
            ask(base_url, begin)
            time.sleep(1000)
        case "nothing":
            return 1.0
        case "flood":
            while True:
                post(base_url, begin)
        case "text":
            ask(base_url, begin)
            return "good"
        case "leaves a child":
            command = [sys.executable, "-c", f"import time; time.sleep(1000)  # {seed}"]
            subprocess.Popen(command)
            leads = subprocess.Popen(command, start_new_session=True)
            ask(base_url, begin)
            return leads.pid
        case "asks wrongly":
            told = post(base_url, begin, **row["how"])["error"]["message"]
            if row["said"] not in told:
                raise ValueError(told)


def stops(base_url):
    """What clients make of a turn that a text of theirs has ended."""
    import anthropic
    import openai

    completions, messages = openai.OpenAI().chat.completions, anthropic.Anthropic().messages
    texts, said = ["\nObs", "Observation:"], [user("look")]
    asked = {"model": "policy", "stop": texts}
    choice = completions.create(messages=said, **asked).choices[0]
    found = [(choice.message.content, choice.finish_reason)]
    said = [*said, choice.message.model_dump(), user("x")]
    parts = [each.choices[0] for each in completions.create(messages=said, stream=True, **asked)]
    text = "".join(each.delta.content or "" for each in parts)
    found.append((text, parts[-1].finish_reason))
    asked = {"model": "policy", "max_tokens": 90, "stop_sequences": texts, "messages": [user("a")]}
    whole = messages.create(**asked)
    with messages.stream(**asked) as stream:
        streamed = stream.get_final_message()
    for each in (whole, streamed):
        found.append((each.content[0].text, each.stop_reason, each.stop_sequence))
    if found != [("I look.", "stop")] * 2 + [("I look.", "stop_sequence", "\nObs")] * 2:
        raise ValueError(found)
    generate = base_url.removesuffix("/v1") + "/inference/v1/generate"
    sampling = {"stop": "x", "stop_token_ids": [7]}
    body = json.dumps({"token_ids": [5, 6], "sampling_params": sampling}).encode()
    with urllib.request.urlopen(urllib.request.Request(generate, body), timeout=60) as answer:
        [choice] = json.load(answer)["choices"]
    if (len(choice["token_ids"]), choice["finish_reason"]) != (4, "stop"):
        raise ValueError(choice)


def ends(base_url, row):
    """How a turn ended, in each dialect, as a whole and as a stream."""
    about = {**ADD["function"]}
    custom = {"name": "add", "input_schema": about["parameters"]}
    chats = {"messages": [user("add")]}
    asks = {
        "/v1/chat/completions": ("max_tokens", chats | {"tools": [ADD]}),
        "/v1/responses": ("max_output_tokens", {"input": "add", "tools": [about]}),
        "/v1/messages": ("max_tokens", chats | {"tools": [custom]}),
        "/inference/v1/generate": ("max_tokens", {"token_ids": [5, 6]}),
    }
    about["type"], found = "function", []
    for path, (limit, body) in asks.items():
        for stream in (False, True)[: 1 if "token_ids" in body else 2]:
            for most in (90, 90, 2):
                given = body | {limit: most} | ({"stream": True} if stream else {})
                url = base_url.removesuffix("/v1") + path
                request = urllib.request.Request(url, json.dumps(given).encode())
                with urllib.request.urlopen(request, timeout=60) as answer:
                    lines = answer.read().decode().replace("data: ", "\n").split("\n")
                events = [json.loads(each) for each in lines if each.startswith("{")]
                found.append(f"{path} {end_of(events)}")
    if found != row["ends"]:
        raise ValueError(f"{found}")


def end_of(events):
    """What is said of it: of the last event that says something."""
    [*_, last] = filter(None, map(said_of, events))
    return last


def said_of(event):
    for choice in event.get("choices", ()):
        return choice["finish_reason"]
    body = event.get("delta") or event.get("response") or event
    if not isinstance(body, dict):
        return None
    if "stop_reason" in body:
        return body["stop_reason"] and f"{body['stop_reason']} {body['stop_sequence']}"
    return body.get("status") and f"{body['status']} {body['incomplete_details']}"


def retries(base_url):
    """A client that loses patience, and asks again as OpenAI's does."""
    begin = [user("a")]
    with contextlib.suppress(TimeoutError):
        post(base_url, begin, patience=0.3)
    again = ask(base_url, begin, headers={"x-stainless-retry-count": "1"})
    return float(again["content"])


def loses_patience(base_url):
    """A client that goes away for good, and asks something else."""
    with contextlib.suppress(TimeoutError):
        post(base_url, [user("a")], patience=0.3)
    time.sleep(0.6)
    return float(ask(base_url, [user("b")])["content"])


def official_clients(base_url, row):
    """The sum of what is said to OpenAI's and Anthropic's clients, and the argument of a call."""
    import anthropic
    import openai

    said = [user(row["prompt"])]
    completions = openai.OpenAI(base_url=base_url).chat.completions
    first = completions.create(model="policy", messages=said).choices[0].message
    more = [*said, first, user("go on")]
    with completions.stream(model="policy", messages=more) as events:
        second = events.get_final_completion().choices[0].message
    texts = [first.content, second.content]
    texts.append(openai.OpenAI().responses.create(model="policy", input="b").output_text)
    asked = {"model": "policy", "max_tokens": 90, "messages": said}
    for client in (anthropic.Anthropic(), anthropic.Anthropic(base_url=base_url)):
        texts.append(client.messages.create(**asked).content[0].text)
    add = {**ADD["function"]}
    add["input_schema"] = add.pop("parameters")
    text, call = anthropic.Anthropic().messages.create(**asked, tools=[add]).content
    with anthropic.Anthropic().messages.stream(**asked, tools=[add]) as stream:
        again = stream.get_final_message().content
    tool = completions.create(model="policy", messages=said, tools=[ADD]).choices[0].message
    arguments = json.loads(tool.tool_calls[0].function.arguments)
    if not (text.text == again[0].text and call.input == again[1].input == arguments):
        raise ValueError(f"{text} {call} {again} {tool}")
    return sum(map(float, texts)) + arguments["a"] - 35


def streams(base_url):
    """Reads turns as they come; after the first text of each it asks something else."""
    import anthropic
    import openai

    client, said = openai.OpenAI(), [user("a")]
    dialects = {
        "chat": (client.chat.completions, {"messages": said}, "choices.0.delta.content"),
        "responses": (client.responses, {"input": "a"}, "delta"),
        "messages": (
            anthropic.Anthropic().messages, {"messages": said, "max_tokens": 90}, "delta.text",
        ),
    }  # fmt: skip
    for name, (interface, asked, path) in dialects.items():
        heard = []
        for part in interface.create(model="policy", stream=True, **asked):
            for step in path.split("."):
                part = part[0] if step == "0" else getattr(part, step, None)
            heard += filter(None, [part])
            if len(heard) == 1 and part:
                ask(base_url, [user(f"{name} said {part}")])
        if heard != ["I say", " now", "€"]:
            raise ValueError(f"{name}: {heard}")


def read_stream(base_url, said, **more):
    """The texts of a turn as they come, without a client library."""
    body = json.dumps({"messages": said, "stream": True, **more}).encode()
    request = urllib.request.Request(f"{base_url}/chat/completions", body)
    with urllib.request.urlopen(request, timeout=60) as events:
        for line in events:
            data = line.removeprefix(b"data: ")
            if data != line and data != b"[DONE]\n":
                yield json.loads(data)["choices"][0]["delta"].get("content", "")


def reads(base_url):
    return float("".join(read_stream(base_url, [user("a")])))


def stops_reading(base_url):
    """Reads the beginning of a turn, and asks for the same again."""
    with contextlib.closing(read_stream(base_url, [user("a")])) as texts:
        first = next(texts)
    return float(first + "".join(read_stream(base_url, [user("a")])))


def at_once(base_url, row):
    """Four equal calls at once, and one of n = 2."""
    texts: list[str] = []
    begin = [user(row["prompt"])]
    threads = [
        threading.Thread(target=lambda: texts.append(ask(base_url, begin)["content"]))
        for _ in range(4)
    ]
    for each in threads:
        each.start()
    for each in threads:
        each.join()
    both = post(base_url, begin, n=2)["choices"]
    texts += [each["message"]["content"] for each in both]
    return float(len(set(texts)))


if __name__ == "__main__":  # as a command: the row is its input
    given = json.load(sys.stdin)
    content = ask(os.environ["OPENAI_BASE_URL"], [user(given["prompt"])])["content"]
    if given.get("fails"):
        sys.exit(7)
    reward = Path(os.environ["RHYMEFLOW_REWARD"])
    match given.get("gives"):
        case "directory":
            reward.mkdir()
        case "bytes":
            reward.write_bytes(b"\xff" * 2000)
        case _:
            reward.write_text(f"{len(content)}\n")


class Steps:
    """An environment: the reward is the number of turns that it has answered, and a share of what
    was said in them."""

    def __init__(self, answer):
        self.answer = answer

    async def reset(self, *, a, seed, **columns):
        self.digits, self.turns = a, 0
        assert set(columns) == {"b"}
        assert isinstance(seed, int)
        return " Begin."

    def step(self, messages):
        said = messages[-1]["content"]
        if said.endswith("done"):
            return None
        self.turns += 1
        if said.endswith("wrong"):
            return ["no message"]
        long = {"role": "user", "content": "123456789012345678901234"}
        return [long, user("on")] if said.endswith("long") else self.answer.format(self.turns)

    async def reward(self):
        return self.turns + self.digits

    def close(self):
        self.turns = None
