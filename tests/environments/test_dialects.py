"""Dialects of agent programs, spoken by the clients of OpenAI and Anthropic."""

import json
from pathlib import Path
from typing import get_args

import anthropic
import httpx2
import openai
import pytest
from anthropic.types import Message as AnthropicMessage
from anthropic.types import RawMessageStreamEvent
from hypothesis import given, settings
from hypothesis import strategies as st
from msgspec.structs import replace
from openai.types.chat import ChatCompletion, ChatCompletionChunk
from openai.types.responses import Response, ResponseStreamEvent

from rhymeflow.environments import dialects
from rhymeflow.environments.dialect_answers import (
    ModelTurn,
    answer,
    message_of,
    models,
    refusal,
    too_long,
)
from rhymeflow.environments.dialect_streams import STREAMS
from rhymeflow.environments.dialects import DIALECTS, BadRequest, read
from rhymeflow.environments.messages import Call

PATHS = {dialect: path for path, dialect in DIALECTS.items()}
SCHEMA = {"type": "object", "properties": {"a": {"type": "integer"}, "b": {"enum": [2, None]}}}
USER = {"role": "user", "content": "2+3?"}
ASKS = {
    "chat": {"messages": [USER]},
    "responses": {"input": [USER]},
    "messages": {"messages": [USER], "max_tokens": 9},
    "tokens": {"token_ids": [5, 6], "sampling_params": {"max_tokens": 9}},
}


def turn(content="", calls=(), finish="stop", **fields):
    made = [Call(name, json.dumps(arguments)) for name, arguments in calls]
    fields = {"id": "7-2", "prompt_ids": [1, 2, 3], "tokens": [10, 11], **fields}
    fields |= {"logprobs": [-0.5, -1.25], "pieces": ["ab", "\ufffd"]}
    return ModelTurn(content=content, calls=made, finish=finish, **fields)


ADDS = turn("I add.", [("add", {"a": 2, "b": None}), ("add", {"a": 5})], reasoning="Two calls.")


def events(call, said):
    """A stream in which the first half of each text comes before all else."""
    nothing = {"tokens": [], "logprobs": [], "pieces": [], "content": "", "calls": []}
    nothing |= {"reasoning": "", "finish": "stop"}
    stream = STREAMS[call.dialect](call, [replace(each, **nothing) for each in said], created=3)
    parts = []
    for index, each in enumerate(said):
        half = {"content": each.content[: len(each.content) // 2]}
        half |= {name: getattr(each, name)[:1] for name in ("tokens", "logprobs", "pieces")}
        if not each.reasoning:  # which would be before it
            parts.append(stream.more(index, replace(each, **nothing | half)))
    return b"".join([*parts, stream.end(said)])


class Policy(httpx2.MockTransport):
    """A server that says what it is told, and keeps what it was asked."""

    def __init__(self, *turns):
        super().__init__(self.handle)
        self.turns, self.calls, self.limit = list(turns), [], 100

    def handle(self, request):
        path = request.url.path
        if request.method == "GET":
            return httpx2.Response(200, json=models("policy", 4096))
        try:
            call = read(path, request.content)
            if len(str(call.messages)) > 1000:
                raise too_long(path, 5000, 4096)
        except BadRequest as error:
            return httpx2.Response(error.status, json=refusal(path, error))
        self.calls.append(call)
        said = [self.turns.pop(0) for _ in range(call.n)]
        if not call.stream:
            return httpx2.Response(200, json=answer(call, said, created=3))
        kind = {"content-type": "text/event-stream"}
        return httpx2.Response(200, headers=kind, content=events(call, said))

    def openai(self):
        client = httpx2.Client(transport=self)
        return openai.OpenAI(base_url="http://policy/v1", api_key="none", http_client=client)

    def anthropic(self):
        client = httpx2.Client(transport=self)
        return anthropic.Anthropic(base_url="http://policy", api_key="none", http_client=client)


def chat(policy, talk, stream):
    tools = [
        {"type": "function", "function": {"name": "add", "parameters": SCHEMA, "strict": True}}
    ]
    asked = {"model": "m", "messages": talk, "tools": tools, "temperature": 0.5, "max_tokens": 9}
    completions = policy.openai().chat.completions
    if stream:
        with completions.stream(**asked, stream_options={"include_usage": True}) as events:
            for _ in events:
                pass
            got = events.get_final_completion()
    else:
        got = completions.create(**asked)
    message = got.choices[0].message
    talk.append(message)
    for each in message.tool_calls or []:
        talk.append({"role": "tool", "tool_call_id": each.id, "content": "five"})
    used = got.usage.prompt_tokens, got.usage.completion_tokens
    return message.content, got.choices[0].finish_reason, used


def responses(policy, talk, stream):
    tools = [{"type": "function", "name": "add", "parameters": SCHEMA, "strict": True}]
    asked = {"model": "m", "input": talk, "tools": tools, "temperature": 0.5}
    asked["max_output_tokens"] = 9
    if stream:
        with policy.openai().responses.stream(**asked) as events:
            for _ in events:
                pass
            got = events.get_final_response()
    else:
        got = policy.openai().responses.create(**asked)
    talk += got.output
    for item in got.output:
        if item.type == "function_call":
            answered = {"type": "function_call_output", "call_id": item.call_id}
            talk.append({**answered, "output": "five"})
    return got.output_text, got.status, (got.usage.input_tokens, got.usage.output_tokens)


def messages(policy, talk, stream):
    tools = [{"name": "add", "input_schema": SCHEMA}]
    asked = {"model": "m", "messages": talk, "tools": tools, "max_tokens": 9}
    asked["extra_body"] = {"temperature": 0.5}  # the client has dropped it, agents have not
    if stream:
        with policy.anthropic().messages.stream(**asked) as events:
            got = events.get_final_message()
    else:
        got = policy.anthropic().messages.create(**asked)
    talk.append({"role": "assistant", "content": got.content})
    results = [
        {"type": "tool_result", "tool_use_id": block.id, "content": "five"}
        for block in got.content
        if block.type == "tool_use"
    ]
    if results:
        talk.append({"role": "user", "content": results})
    text = "".join(block.text for block in got.content if block.type == "text")
    return text, got.stop_reason, (got.usage.input_tokens, got.usage.output_tokens)


ENDS = {
    chat: ("tool_calls", "stop", "length"),
    responses: ("completed", "completed", "incomplete"),
    messages: ("tool_use", "end_turn", "max_tokens"),
}


@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize("ask", ENDS)
def test_a_client_calls_tools_and_its_conversation_comes_back_as_it_was(ask, stream):
    policy, talk = Policy(ADDS, turn("It is 5.")), [dict(USER)]
    called, said, cut = ENDS[ask]
    assert ask(policy, talk, stream) == ("I add.", called, (3, 2))
    assert ask(policy, talk, stream) == ("It is 5.", said, (3, 2))
    first, second = policy.calls
    named = {"function": {"name": "add", "arguments": {"a": 2, "b": None}}}
    assert first.messages == [USER]
    assert first.tools[0]["function"]["parameters"] == SCHEMA
    assert (first.temperature, first.max_tokens, first.stream) == (0.5, 9, stream)
    sent = message_of(first, ADDS)
    assert sent["reasoning_content"] == "Two calls."
    assert sent["tool_calls"][0] == {"id": "call00000", "type": "function", **named}
    assert second.messages[:2] == [USER, sent]
    answers = second.messages[2:]
    assert [each.pop("tool_call_id") for each in answers] == ["call00000", "call00001"]
    assert answers == [{"role": "tool", "name": "add", "content": "five"}] * 2
    if not stream or ask is messages:  # OpenAI's helper raises at a turn that is cut
        policy.turns = [turn("It was", finish="length")]
        talk.append(USER)
        assert ask(policy, talk, stream) == ("It was", cut, (3, 2))
        assert policy.calls[2].messages[-2:] == [message_of(second, turn("It is 5.")), USER]


def test_three_dialects_ask_the_same():
    calls = []
    for ask in ENDS:
        policy, talk = Policy(ADDS, turn("5")), [dict(USER)]
        ask(policy, talk, False)
        ask(policy, talk, False)
        calls.append((policy.calls[1].messages, policy.calls[1].tools))
    assert calls[0] == calls[1] == calls[2]


@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize(
    "said",
    [
        ADDS,
        turn(""),
        turn("I add.", [("add", {"a": 2})]),
        turn("x", finish="length"),
    ],
)
@pytest.mark.parametrize(
    ("dialect", "whole", "part"),
    [
        ("chat", ChatCompletion, ChatCompletionChunk),
        ("responses", Response, ResponseStreamEvent),
        ("messages", AnthropicMessage, RawMessageStreamEvent),
    ],
)
def test_answers_have_every_field_that_the_client_declares(dialect, whole, part, said, stream):
    more = {"include": ["message.output_text.logprobs"]} if dialect == "responses" else {}
    more |= (
        {"logprobs": True, "stream_options": {"include_usage": True}} if dialect == "chat" else {}
    )
    call = call_of(dialect, stream=stream, **more)
    if not stream:
        whole.model_validate(answer(call, [said], created=3))
        return
    written = events(call, [said]).decode().split("\n\n")
    assert written.pop() == ""
    if dialect == "chat":
        assert written.pop() == "data: [DONE]"
    for each in written:
        event = json.loads(each.partition("data: ")[2])
        if dialect == "chat":
            part.model_validate(event)
        else:
            part_of(part, event["type"]).model_validate(event)
            assert each.startswith(f"event: {event['type']}\n")


def part_of(union, type):
    """The class of an event of this type, in an annotated union."""
    (found,) = [
        each
        for each in get_args(get_args(union)[0])
        if type in get_args(each.model_fields["type"].annotation)
    ]
    return found


def call_of(dialect, **more):
    return read(PATHS[dialect], json.dumps(ASKS[dialect] | more).encode())


def test_log_probabilities_and_two_answers_to_a_prompt():
    policy = Policy(turn("a"), turn("b", id="8"))
    asked = {"model": "m", "messages": [USER], "n": 2, "logprobs": True}
    got = policy.openai().chat.completions.create(**asked)
    assert [each.message.content for each in got.choices] == ["a", "b"]
    assert [each.index for each in got.choices] == [0, 1]
    tokens = got.choices[1].logprobs.content
    assert [(each.token, each.logprob) for each in tokens] == [("ab", -0.5), ("\ufffd", -1.25)]
    assert [each.bytes for each in tokens] == [[97, 98], None]
    assert (got.usage.prompt_tokens, got.usage.completion_tokens) == (3, 4)
    policy.turns = [turn("a"), turn("b", id="8")]
    parts = list(policy.openai().chat.completions.create(**asked, stream=True))
    said = [(each.index, each.delta.content) for part in parts for each in part.choices]
    assert [each for each in said if each[1]] == [(0, "a"), (1, "b")]
    logged = [each.logprobs.content for p in parts for each in p.choices if each.logprobs]
    assert logged == [tokens, tokens]
    policy.turns = [turn("c")]
    include = ["message.output_text.logprobs"]
    got = policy.openai().responses.create(model="m", input="?", include=include)
    assert [each.logprob for each in got.output[0].content[0].logprobs] == [-0.5, -1.25]


def test_text_comes_in_parts_and_log_probabilities_with_them():
    policy = Policy(*[turn("It is 5.")] * 3)
    chat = policy.openai().chat.completions.create(
        model="m", messages=[USER], stream=True, logprobs=True
    )
    parts = [part.choices[0] for part in chat]
    assert [each.delta.content for each in parts] == ["It i", "s 5.", None]
    assert [each.delta.role for each in parts] == ["assistant", None, None]
    logged = [[at.logprob for at in each.logprobs.content] for each in parts if each.logprobs]
    assert logged == [[-0.5], [-1.25]]
    include = ["message.output_text.logprobs"]
    told = policy.openai().responses.create(model="m", input="?", include=include, stream=True)
    deltas = [each for each in told if each.type == "response.output_text.delta"]
    assert [each.delta for each in deltas] == ["It i", "s 5."]
    assert [[at.logprob for at in each.logprobs] for each in deltas] == logged
    asked = {"model": "m", "messages": [USER], "max_tokens": 9}
    with policy.anthropic().messages.stream(**asked) as stream:
        assert list(stream.text_stream) == ["It i", "s 5."]


def test_tokens_in_tokens_out():
    sampling = {"temperature": 1.0, "max_tokens": 24, "stop_token_ids": [2], "logprobs": 1}
    sampling["skip_special_tokens"] = False
    call = call_of("tokens", model="m", sampling_params=sampling)
    assert (call.token_ids, call.max_tokens, call.stop_token_ids) == ([5, 6], 24, {2})
    assert call.wants_logprobs
    body = answer(call, [turn("x")], created=0)
    choice = body["choices"][0]
    assert (choice["token_ids"], choice["finish_reason"]) == ([10, 11], "stop")
    logged = [(each["token"], each["logprob"]) for each in choice["logprobs"]["content"]]
    assert logged == [("token_id:10", -0.5), ("token_id:11", -1.25)]


def test_anthropics_tool_runner_sends_the_whole_conversation():
    policy, added = Policy(ADDS, turn("5")), []

    @anthropic.beta_tool
    def add(a: int, b: int | None = None) -> str:
        """Add."""
        added.append((a, b))
        return "five"

    runner = policy.anthropic().beta.messages.tool_runner(
        model="m", max_tokens=9, tools=[add], messages=[USER]
    )
    assert runner.until_done().content[0].text == "5"
    assert added == [(2, None), (5, None)]
    assert policy.calls[1].messages[:2] == [USER, message_of(policy.calls[0], ADDS)]


def test_contexts_that_are_too_long_and_models():
    policy = Policy()
    long = [{"role": "user", "content": "x" * 2000}]
    with pytest.raises(openai.BadRequestError, match="maximum context length is 4096") as raised:
        policy.openai().chat.completions.create(model="m", messages=long)
    assert raised.value.code == "context_length_exceeded"
    with pytest.raises(anthropic.BadRequestError, match="prompt is too long: 5000 tokens > 4096"):
        policy.anthropic().messages.create(model="m", messages=long, max_tokens=4)
    with pytest.raises(openai.NotFoundError, match="there is no /v1/completions"):
        policy.openai().completions.create(model="m", prompt="x")
    (found,) = policy.openai().models.list().data
    assert (found.id, found.max_model_len) == ("policy", 4096)
    (found,) = policy.anthropic().models.list().data
    assert (found.id, found.display_name) == ("policy", "policy")


def said_by(role, **texts):
    """A message of Anthropic's, with blocks of these types in this order."""
    blocks = [{"type": kind, kind: text} for kind, text in texts.items()]
    return {"role": role, "content": blocks}


def test_anthropics_blocks_keep_their_order():
    called = {"type": "tool_use", "id": "t", "name": "add", "input": {}}
    result = {"type": "tool_result", "tool_use_id": "t", "content": "5"}
    texts = [{"type": "text", "text": text} for text in ("a", "", "b")]
    said = {"role": "assistant", "content": [called, texts[1]]}
    heard = {"role": "user", "content": [*texts, result, texts[0]]}
    _, turn, *answers = call_of("messages", messages=[USER, said, heard]).messages
    assert turn["tool_calls"]
    found = [(each["role"], each["content"]) for each in answers]
    assert found == [("user", "a\n\nb"), ("tool", "5"), ("user", "a")]


def part(kind, **fields):
    return {"messages": [{"role": "user", "content": [{"type": kind, **fields}]}]}


CALLED = {"role": "assistant", "tool_calls": [{"id": "1", "type": "function", "function": {}}]}


@pytest.mark.parametrize(
    ("dialect", "body", "says"),
    [
        ("chat", {"seed": 3}, "seed = int 3: what is sampled follows from run.seed"),
        ("chat", {"tool_choice": "required"}, "tool_choice = str 'required': the policy chooses"),
        ("chat", {"top_logprobs": 5}, "top_logprobs = int 5: only sampled tokens"),
        ("chat", {"frequency_penalty": 0.1}, "frequency_penalty = float 0.1: it is not supported"),
        ("chat", {"response_format": {"type": "json_object"}}, "ask for the form in a message"),
        ("chat", {"guided_json": {}}, "guided_json = dict {}: it is not supported; leave it out"),
        ("chat", {"temperature": -1}, "temperature: Expected `float` >= 0"),
        ("chat", {"n": 0}, "n: Expected `int` >= 1"),
        (
            "chat",
            {"stream_options": {"include_usage": True, "continuous_usage_stats": True}},
            "stream_options: str 'continuous_usage_stats' is not supported; leave it out",
        ),
        ("responses", {"include": ["file_search_call.results"]}, "include: str 'file_search_call."),
        (
            "chat",
            {"messages": [{"role": "assistant", "reasoning": "a", "reasoning_content": "b"}, USER]},
            "messages[0]: reasoning_content and reasoning differ; send one of them",
        ),
        ("chat", {"stop": [""]}, "Expected `str` of length >= 1"),
        ("messages", {"stop_sequences": [3]}, "stop_sequences: Expected `str`, got `int`"),
        ("responses", {"stop": "x"}, "stop = str 'x': it is not supported; leave it out"),
        ("chat", {"max_tokens": 4, "max_completion_tokens": 5}, "another field says otherwise"),
        ("chat", {"messages": []}, "messages: should end with a message that is not the"),
        ("chat", {"messages": [USER, {"role": "assistant"}]}, "messages: should end with"),
        ("chat", {"messages": "hello"}, "messages: should be a list, is str 'hello'"),
        ("chat", {"messages": [{"role": "robot"}]}, "messages[0].role: is str 'robot', should be"),
        ("chat", part("image_url"), "messages[0].content[0].type: is str 'image_url', should be"),
        ("chat", {"messages": [CALLED, USER]}, "tool_calls[0]: it has no"),
        (
            "chat",
            {"messages": [{"role": "tool", "tool_call_id": "x", "content": "5"}]},
            "messages[0]: answers the call 'x', which no earlier message makes",
        ),
        ("chat", {"messages": [USER | {"audio": 1}]}, "messages[0].audio: is not supported"),
        ("chat", {"tools": [{"type": "function"}]}, "tools[0]: should have a name"),
        ("responses", {"previous_response_id": "r"}, "nothing is kept between calls"),
        ("responses", {"reasoning": {"effort": "low"}}, "data.chat_template_kwargs"),
        ("responses", {"tools": [{"type": "web_search"}]}, "tools[0].type: is str 'web_search'"),
        ("responses", {"input": [{"type": "item_reference"}]}, "input[0].type: is str 'item_ref"),
        ("responses", {"input": [{"type": "reasoning", "summary": ["x"]}]}, "summary: is not"),
        ("messages", part("image"), "messages[0].content[0].type: is str 'image', should be"),
        (
            "messages",
            {"messages": [USER, said_by("assistant", text="a", thinking="b"), USER]},
            "messages[1].content[1]: a turn is thinking, text, tool_use, in this order",
        ),
        ("messages", {"thinking": {"type": "enabled"}}, "data.chat_template_kwargs"),
        ("messages", {"tools": [{"type": "bash_20250124"}]}, "tools[0].type: is str 'bash"),
        ("tokens", {"sampling_params": {"logprobs": 5}}, "logprobs: Expected `bool`"),
        ("tokens", {"token_ids": []}, "token_ids: Expected `array` of length >= 1"),
        ("tokens", {"stream": True}, "stream = bool True: it is not supported"),
    ],
)
def test_what_cannot_be_done_is_refused_by_name(dialect, body, says):
    with pytest.raises(BadRequest) as raised:
        call_of(dialect, **body)
    assert says in raised.value.message
    assert raised.value.status == 400


def test_what_changes_nothing_is_read_past():
    for dialect in ("chat", "responses", "messages"):
        plain = call_of(dialect)
        for name in dialects.HARMLESS:
            assert call_of(dialect, **{name: "x"}) == plain
        for name, values in dialects.USUAL.items():
            for value in values:
                assert call_of(dialect, **{name: value}) == plain
        assert call_of(dialect, **dict.fromkeys(["seed", "tools", "reasoning"])) == plain


def test_arguments_that_are_a_mapping_are_left_as_they_are():
    given = {"a": None, "function": {"b": None}}
    call = {"id": "1", "type": "function", "function": {"name": "add", "arguments": given}}
    talk = [USER, {"role": "assistant", "tool_calls": [call]}, USER]
    [read] = call_of("chat", messages=talk).messages[1]["tool_calls"]
    assert read["function"]["arguments"] == given


def test_parts_are_lines_and_developers_are_the_system():
    parts = [{"type": "text", "text": "a"}, {"type": "text", "text": "b"}]
    system = {"role": "system", "content": "a\nb"}
    talk = [{"role": "developer", "content": parts}, USER | {"name": "Ann"}]
    assert call_of("chat", messages=talk).messages == [system, USER | {"name": "Ann"}]
    assert call_of("responses", instructions="a\nb").messages == [system, USER]
    developer = {"role": "developer", "content": [{"type": "input_text", "text": "a\nb"}]}
    assert call_of("responses", input=[developer, USER]).messages == [system, USER]
    assert call_of("messages", system=parts).messages == [system, USER]
    assert call_of("responses", input="2+3?").messages == [USER]


NAMES = {"role", "type", "text", "function", "tool_calls", "output", "stream_options"} | {
    name
    for kinds in (dialects._ROLES, dialects._ITEMS, *dialects._BLOCKS.values(), dialects._TOOLS)
    for names in kinds.values()
    for name in names.split()
}
JSON = st.recursive(
    st.none() | st.booleans() | st.integers() | st.sampled_from(["x", "user", "text", "function"]),
    lambda inner: (
        st.lists(inner, max_size=3)
        | st.dictionaries(st.sampled_from(sorted(NAMES)), inner, max_size=4)
    ),
    max_leaves=12,
)


@settings(max_examples=60)
@given(
    dialect=st.sampled_from(list(PATHS)),
    name=st.sampled_from(sorted(set(" ".join(dialects._ACCEPTED.values()).split()))),
    value=JSON,
)
def test_nothing_but_a_bad_request_is_raised(dialect, name, value):
    for body in (ASKS[dialect] | {name: value}, value, ASKS["chat"] | {"messages": [value, USER]}):
        try:
            read(PATHS[dialect], json.dumps(body).encode())
        except BadRequest as error:
            assert error.message  # noqa: PT017 - what it says is for the tests above


def test_the_page_names_every_field_that_is_read_past():
    page = (Path(__file__).parents[2] / "docs" / "agents.md").read_text()
    assert [name for name in sorted(dialects.HARMLESS) if f"`{name}`" not in page] == []
