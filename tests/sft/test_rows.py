"""Rows to samples: which tokens are learnt, and what is said of a row that does not fit."""

import json
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from rhymeflow.config import DataConfig, SftConfig
from rhymeflow.data.prompts import Row
from rhymeflow.learner.sample import Sample
from rhymeflow.sft.rows import RowEncoder
from tests import characters
from tests.refused import refusal

TEMPLATE = (
    "{% for m in messages %}"
    "{% if m.role == 'robot' %}{{ raise_exception('no robots') }}{% endif %}"
    "[{{ m.role }}]{{ m.content }}<eos>;{% endfor %}"
    "{% if add_generation_prompt %}[assistant]{% endif %}"
)
TOOLS = (
    "{% if tools %}<{{ tools | map(attribute='function.name') | join(' ') }}>{% endif %}"
    "{% for m in messages %}[{{ m.role }}]{{ m.content }}"
    "{% for call in m.tool_calls or [] %}<{{ call.function.name }} "
    "{{ call.function.arguments.of }}{{ mark }}>{% endfor %}<eos>;{% endfor %}"
    "{% if add_generation_prompt %}[assistant]{% endif %}"
)
FORGETFUL = (
    "{% for m in messages %}[{{ m.role }}]{{ m.content if loop.last else '' }}<eos>{% endfor %}"
    "{% if add_generation_prompt %}[assistant]{% endif %}"
)
ENDLESS = TEMPLATE.replace("<eos>", "")
ALPHABET = "abcdefghijklmnopqrstuvwxyz0123456789 +=?[];<>^"


def encoder(template: str | None, max_length: int = 200, **fields: Any) -> RowEncoder:
    tokenizer = characters.make_tokenizer(ALPHABET, max_length)
    tokenizer.chat_template = template
    data = DataConfig(**{k: v for k, v in fields.items() if k in DataConfig.model_fields})
    sft = SftConfig(**{k: v for k, v in fields.items() if k in SftConfig.model_fields})
    return RowEncoder(tokenizer, data, sft, {tokenizer.eos_token_id}, max_length)


CHAT, PLAIN, CALLS = encoder(TEMPLATE), encoder(None), encoder(TOOLS)


def shown(sample: Sample) -> tuple[str, str]:
    """The prompt; the rest with learnt characters as capitals, and `!` for the token that ends."""
    symbols = ["<pad>", "!", *ALPHABET]
    observed = sample.observed or [False] * len(sample.completion_ids)
    rest = [
        symbols[token] if seen else symbols[token].upper()
        for token, seen in zip(sample.completion_ids, observed, strict=True)
    ]
    return "".join(symbols[token] for token in sample.prompt_ids), "".join(rest)


def encoded(with_: RowEncoder, **values: Any) -> tuple[str, str]:
    return shown(with_.encode(Row("rows.jsonl:7", values)))


def says(role: str, content: str) -> dict[str, str]:
    return {"role": role, "content": content}


MESSAGES = [says("user", "q"), says("assistant", "a"), says("user", "r"), says("assistant", "b")]
READ, LEARNT = "[user]q!;[assistant]", "A!;[user]r!;[assistant]B!"


@pytest.mark.parametrize(
    ("encoder_", "values", "read", "learnt"),
    [
        (PLAIN, {"prompt": "a+b?", "completion": "c"}, "a+b?", "C!"),
        (encoder(None, completion_column="of"), {"prompt": "a?", "of": "b"}, "a?", "B!"),
        # What follows the last turn is left out.
        (PLAIN, {"prompt": "q?", "completion": [says("assistant", "ab"), says("tool", "cd")]},
         "q?", "AB!"),
        (CHAT, {"prompt": "q", "completion": [says("assistant", "ab"), says("tool", "cd")]},
         READ, "AB!"),
        # Of a conversation is learnt what the assistant says.
        (CHAT, {"messages": MESSAGES}, READ, LEARNT),
        (CHAT, {"prompt": "q", "completion": MESSAGES[1:]}, READ, LEARNT),
        (CHAT, {"prompt": MESSAGES[:3], "completion": "b"},
         "[user]q!;[assistant]a!;[user]r!;[assistant]", "B!"),
        (encoder(TEMPLATE, system_prompt="s"), {"messages": MESSAGES},
         f"[system]s!;{READ}", LEARNT),
        # An end that the row has is learnt once.
        (PLAIN, {"prompt": "q?", "completion": "so<eos>"}, "q?", "SO!"),
        (CHAT, {"prompt": "q", "completion": "so<eos>"}, READ, "SO!"),
    ],
)  # fmt: skip
def test_what_is_read_and_what_is_learnt(encoder_, values, read, learnt):
    assert encoded(encoder_, **values) == (read, learnt)


ADD = {"type": "function", "function": {"name": "add", "parameters": {}}}
CALL = {"role": "assistant", "tool_calls": [{"name": "add", "arguments": {}}]}


@pytest.mark.parametrize("arguments", [{"of": "1 2"}, '{"of": "1 2"}'], ids=["mapping", "text"])
@pytest.mark.parametrize("tools", [[ADD], json.dumps([ADD])], ids=["list", "text"])
def test_calls_of_tools_are_learnt(arguments, tools):
    call = {"id": "a", "type": "function", "function": {"name": "add", "arguments": arguments}}
    turns = [
        {"role": "assistant", "tool_calls": [call], "name": None},
        {"role": "tool", "content": "3", "tool_calls": None},
        says("assistant", "3"),
    ]
    chat = encoder(TOOLS, chat_template_kwargs={"mark": "^"})
    whole = "<add>[user]q!;[assistant]", "<ADD 1 2^>!;[tool]3!;[assistant]3!"
    assert encoded(chat, messages=[says("user", "q"), *turns], tools=tools) == whole
    assert encoded(chat, prompt="q", completion=turns, tools=tools) == whole
    assert encoded(chat, prompt="q", completion=turns, tools=None)[0] == "[user]q!;[assistant]"


@given(
    st.lists(
        st.tuples(st.sampled_from(["assistant", "user"]), st.text("abcde", max_size=4)),
        min_size=1,
        max_size=6,
    ).filter(lambda turns: turns[0][0] == turns[-1][0] == "assistant")
)
def test_a_turn_is_learnt_and_nothing_else(turns):
    completion = [says(*turn) for turn in turns]
    _, rest = encoded(CHAT, prompt="q", completion=completion)
    learnt = "".join(each for each in rest if each.isupper() or (each == "!"))
    opened = rest.split("!")
    own = [content.upper() for role, content in turns if role == "assistant"]
    assert "".join(each for each in learnt if each != "!") == "".join(own)
    assert len(opened) - 1 == len(turns)  # each message ends, the assistant's and the others
    _, plain = encoded(PLAIN, prompt="q", completion=completion)
    assert plain == "".join(
        content.upper() + "!" if role == "assistant" else content for role, content in turns
    )


def calling(calls: object = None, tools: object = None) -> dict[str, Any]:
    turn = {"role": "assistant", "tool_calls": calls, "content": "a"}
    return {"prompt": "q", "completion": [turn], "tools": tools}


@pytest.mark.parametrize(
    ("encoder_", "values", "part"),
    [
        (CALLS, calling(tools="{"), "7: column 'tools': is no JSON"),
        (CALLS, calling(tools="3"), "7: column 'tools': should be a list of JSON schemas"),
        (CALLS, calling(tools=["add"]), "7: column 'tools': should be a list of JSON schemas"),
        (CALLS, calling("add"), "message 0: 'tool_calls' should be a list of calls, is str 'add'"),
        (CALLS, calling(["add"]), "column 'completion', message 0, call 0: should be a mapping"),
        (CALLS, calling([{"arguments": {}}]), "call 0: has no name of a function"),
        (CALLS, calling([{"name": "add", "arguments": "{"}]), "call 0: 'arguments' is no JSON"),
        (CALLS, calling([{"name": "add"}]), "call 0: 'arguments' should be a mapping, is None"),
        (PLAIN, {"question": "a"}, "rows.jsonl:7: has neither 'prompt' nor 'messages'"),
        (PLAIN, {"prompt": "a", "completion": None}, "rows.jsonl:7: no column 'completion'"),
        (PLAIN, {"prompt": "a", "completion": 3}, "column 'completion': should be a string or"),
        (PLAIN, {"prompt": "", "completion": "b"}, "column 'prompt': the prompt is empty"),
        (PLAIN, {"prompt": "a", "completion": ""}, "'completion' is empty, so nothing would be"),
        (PLAIN, {"prompt": "a", "completion": "b", "tools": [ADD]}, "need a model with a chat"),
        (PLAIN, {"prompt": "a", "completion": [CALL]}, "need a model with a chat template"),
        (PLAIN, {"prompt": "a" * 150, "completion": "b" * 50}, "is 201 tokens long"),
        (PLAIN, {"messages": [says("user", "a"), says("assistant", "b")]}, "no chat template"),
        (CHAT, {"messages": "a"}, "column 'messages': should be a list of messages"),
        (CHAT, {"messages": [says("user", "a")]}, "no message is the assistant's"),
        (CHAT, {"messages": [says("assistant", "a")]}, "begins with the assistant's turn"),
        (CHAT, {"prompt": "a", "completion": [says("user", "b")]}, "a message of 'user', not the"),
        (CHAT, {"messages": [{"role": "user"}]}, "message 0: has no 'content'"),
        (CHAT, {"messages": [says("user", "a")], "prompt": "b"}, "a row has one or the other"),
        (CHAT, {"prompt": [says("assistant", "a")], "completion": "b"}, "the prompt ends with the"),
        (
            CHAT,
            {"prompt": [says("robot", "b"), says("user", "a")], "completion": "c"},
            "refuses the prompt: no robots",
        ),
        (encoder(FORGETFUL), {"prompt": "a", "completion": "b"}, "changes earlier turns"),
        (encoder(ENDLESS), {"prompt": "a", "completion": "b"}, "would not learn to stop"),
    ],
)
def test_a_row_that_does_not_fit_is_named(encoder_, values, part):
    message = refusal(encoded, encoder_, **values)
    assert message.startswith("rows.jsonl:7: ")
    assert part in message


def test_a_prefix_of_answers_is_refused():
    assert "assistant_prefix" in refusal(encoder, None, assistant_prefix="a")


@pytest.mark.parametrize(
    ("turn", "lost"),
    [
        ({"content": "because^so"}, "'because^so'"),
        ({"content": "so", "reasoning_content": "because"}, "'because'"),
        ({"content": "so", "tool_calls": [{"name": "add", "arguments": {}}]}, "'add'"),
    ],
)
def test_what_is_lost_is_not_learnt_in_silence(turn, lost):
    row = {"messages": [says("user", "hi"), {"role": "assistant", **turn}]}
    strips = encoder(TEMPLATE.replace("m.content", "m.content.split('^')[-1]"))
    assert f"does not write all of a turn that is to be learnt ({lost})" in refusal(
        encoded, strips, **row
    )
    blanks = encoder(TEMPLATE.replace("m.content", "m.content.replace('^', ' ^ ')"))
    if "^" in lost:
        assert encoded(blanks, **row)[1] == "BECAUSE ^ SO!"
