"""What is done with the chat templates of known models: all of TRL's, and how six are spoken.

`python -m tests.environments.test_families` prints what is found.
"""

from __future__ import annotations

import contextlib
import json
from collections import defaultdict
from typing import Any

import pytest
from trl import chat_template_utils
from trl.chat_template_utils import get_training_chat_template

from rhymeflow.config import Config, DataConfig
from rhymeflow.data.text import StopTexts, rendered
from rhymeflow.environments import dialect_answers
from rhymeflow.environments.conversations import Conversations
from rhymeflow.environments.dialects import ModelCall, read
from rhymeflow.environments.families import family_of
from rhymeflow.environments.rendering import ChatRenderer
from rhymeflow.environments.template import settle
from rhymeflow.environments.tools import schema_of
from rhymeflow.errors import UserError
from tests.environments import worlds
from tests.environments.test_rendering import ids, tokenizer

END = "_chat_template"
TOOLS = [schema_of(worlds.multiply, "tool")]

OUTCOMES = {
    "turns, tools": """
        deepseek_r1_distill_training llama3 llama3_training qwen2_5 qwen2_5_training qwen2_5_vl
        qwen2_5_vl_training lfm2_v2 lfm2_v2_training qwen3_5_nothink_training
        qwen3_5_think_training qwen3_6_training
        qwen3_8 qwen3_8_training qwen3_instruct_2507 qwen3_instruct_2507_training qwen3_training
        qwen3_vl qwen3_vl_training""",
    "training template, turns, tools": """
        deepseek_r1_distill qwen3 qwen3_5_nothink qwen3_5_think qwen3_6""",
    "turns, tools by a response template": "gemma4_v2 llama3_1 llama3_2",
    "tools by a response template": """
        gemma4 gemma4_v3 gemma4_v4 gemma4_v5 glm4moe glm4moe_training gptoss gptoss_training""",
    "tools": """
        lfm2_2_5 lfm2_2_5_v2 lfm2_2_5_vl
        nemotron_3_5_lightning nemotron_3_5_lightning_training nemotron_3_nano
        nemotron_3_nano_training nemotron_3_super nemotron_3_super_training nemotron_3_ultra
        nemotron_3_ultra_training""",
    "turns, tools by messages of the user": """
        cohere cohere2 cohere2_training cohere_training gemma gemma3 gemma3_training
        gemma_training phi3 phi3_5 phi3_5_training phi3_training""",
    "turns": "lfm2 lfm2_training muse_glimmer muse_glimmer_training",
    "refused": """
        deepseekv3 deepseekv3_training diffusion_gemma diffusion_gemma_training idefics3
        idefics3_training llava_next llava_next_training smolvlm smolvlm_training""",
}
"""What becomes of each template of TRL's: whether environments may answer as users, and tools."""


def collection() -> dict[str, str]:
    """TRL's templates by name."""
    utils = vars(chat_template_utils).items()
    return {
        name.removesuffix(END): text
        for name, text in utils
        if name.endswith(END) and isinstance(text, str)
    }


def outcome(template: str) -> str:
    tok = tokenizer(template)
    tok.bos_token = "<|im_start|>"
    parts = ["training template"] if settle(tok, DataConfig(), has_turns=True) else []
    with contextlib.suppress(UserError):
        ChatRenderer(tok)
        parts.append("turns")
    with contextlib.suppress(UserError):
        renderer = ChatRenderer(tok, TOOLS, reads_users=False)
        how = " by messages of the user" if renderer.answers_as_user else ""
        parts.append(f"tools{how or (' by a response template' if renderer._response else '')}")
    return ", ".join(parts) or "refused"


def found() -> dict[str, list[str]]:
    names = defaultdict(list)
    for name, template in sorted(collection().items()):
        names[outcome(template)].append(name)
    return dict(names)


def test_every_template_of_trl_is_used_or_refused() -> None:
    expected = {what: sorted(names.split()) for what, names in OUTCOMES.items()}
    assert found() == expected


def test_trls_own_functions_say_the_same_of_families() -> None:
    """Which variant is for training, and what reads calls: here by names of files."""
    for name, text in collection().items():
        family, tok = family_of(text), tokenizer(text)
        assert family is not None
        assert family.name == name
        try:
            training = get_training_chat_template(tok)
        except ValueError:  # TRL has none
            training = None
        if not name.endswith("_training"):
            assert training in (None, family.training), name


@pytest.mark.parametrize(
    ("name", "tools", "variables", "says"),
    [
        ("gptoss", [], {}, "changes a turn of the assistant when others.*data.chat_template ="),
        ("glm4moe", [], {}, "changes a turn of the assistant when others.*data.chat_template ="),
        ("deepseekv3", [], {}, "begins the assistant's turn differently.*data.chat_template ="),
        ("gemma4", [], {}, "leaves out the reasoning of a turn.*data.chat_template = FILE"),
        ("lfm2_2_5", [], {}, "data.chat_template_kwargs = {preserve_thinking: true} may keep them"),
        ("lfm2_2_5", [], {"preserve_thinking": True}, None),
        ("nemotron_3_nano", [], {}, "{truncate_history_thinking: false} may keep them"),
        ("nemotron_3_nano", [], {"truncate_history_thinking": False}, None),
        ("smolvlm", [], {}, "leaves out what the assistant says as text.*data.chat_template ="),
        ("lfm2", TOOLS, {}, "leaves out calls of tools, here of 'multiply'.*data.chat_template ="),
        ("muse_glimmer", TOOLS, {}, "is not read as a call.*by a response_template of the token"),
    ],
)
def test_a_refusal_says_what_to_do(
    name: str, tools: list[Any], variables: dict[str, Any], says: str | None
) -> None:
    tok = tokenizer(collection()[name])
    if says is None:
        ChatRenderer(tok, tools, variables=variables)
        return
    with pytest.raises(UserError, match=says):
        ChatRenderer(tok, tools, reads_users=not tools, variables=variables)


CALL = {"name": "multiply", "arguments": {"a": 3, "b": 2.5}}
SPOKEN = {
    "qwen3": (
        ["<|im_start|>", "<|im_end|>", "<|endoftext|>"],
        "<think>\nso\n</think>\n\n<tool_call>\n" + json.dumps(CALL) + "\n</tool_call><|im_end|>",
    ),
    "llama3_2": (
        ["<|start_header_id|>", "<|end_header_id|>", "<|eot_id|>"],
        '{"name": "multiply", "parameters": {"a": 3, "b": 2.5}}<|eot_id|>',
    ),
    "lfm2_v2": (
        ["<|im_start|>", "<|im_end|>", "<|tool_call_start|>", "<|tool_call_end|>"],
        "<|tool_call_start|>[multiply(a=3, b=2.5)]<|tool_call_end|><|im_end|>",
    ),
    "gptoss": (
        ["<|start|>", "<|message|>", "<|channel|>", "<|call|>", "<|end|>", "<|return|>",
         "<|constrain|>"],
        "<|channel|>analysis<|message|>so<|end|><|start|>assistant to=functions.multiply"
        '<|channel|>commentary json<|message|>{"a": 3, "b": 2.5}<|call|>',
    ),
    "gemma3": (
        ["<start_of_turn>", "<end_of_turn>"],
        "<tool_call>" + json.dumps(CALL) + "</tool_call><end_of_turn>",
    ),
    "glm4moe": (
        ["<|user|>", "<|assistant|>", "<|observation|>", "<|system|>"],
        "\n<think>so</think>\n<tool_call>multiply\n<arg_key>a</arg_key>\n<arg_value>3</arg_value>\n"
        "<arg_key>b</arg_key>\n<arg_value>2.5</arg_value>\n</tool_call><|observation|>",
    ),
}  # fmt: skip
"""Special tokens of a family, and a turn of its model that calls a tool."""

GEMMA4 = ["<|turn>", "<turn|>", "<|channel>", "<channel|>", "<|tool_call>", "<tool_call|>"]
HARMONY = (
    "<|channel|>analysis<|message|>so<|end|><|start|>assistant<|channel|>commentary "
    'to=functions.multiply <|constrain|>json<|message|>{"a": 3, "b": 2.5}<|call|>'
)


def speaker(name: str) -> Any:
    """A tokenizer with the family's special tokens and template, as a run settles it."""
    special, _ = SPOKEN.get(name, (GEMMA4, ""))
    tok = tokenizer(collection()[name])
    tok.add_special_tokens({"additional_special_tokens": special})
    tok.bos_token = special[0]
    settle(tok, DataConfig(), has_turns=True)
    return tok


@pytest.mark.parametrize("name", SPOKEN)
def test_a_family_calls_a_tool_and_reads_its_answer(name: str) -> None:
    tok, (_, turn) = speaker(name), SPOKEN[name]
    renderer = ChatRenderer(tok, TOOLS, reads_users=False)
    for text in (turn, HARMONY) if name == "gptoss" else (turn,):
        [call] = renderer.said(ids(tok, text)).calls
        assert (call.name, json.loads(call.arguments)) == ("multiply", CALL["arguments"])
    for damage in ("[" * 100_000, "NaN", ""):
        calls = renderer.said(ids(tok, turn.replace("2.5", damage))).calls
        assert all(each.error or "2.5" not in each.arguments for each in calls)
    question = {"role": "user", "content": "3 times 2.5?"}
    answer = [{"role": "tool", "name": "multiply", "content": "7.5"}]
    sampled = ids(tok, turn)
    tokens = ids(tok, rendered(tok, [question], TOOLS)) + sampled + renderer.encode(answer, sampled)
    assert tokens == ids(tok, rendered(tok, [question, *conversation(name, answer)], TOOLS))


@pytest.mark.parametrize(
    ("name", "turn", "parts"),
    [
        ("gptoss", "<|channel|>analysis<|message|>so<|end|><|start|>assistant{}4<|return|>", "so"),
        ("gptoss", "{}4<|return|>", ""),
        ("gptoss", SPOKEN["gptoss"][1], ("so", "")),
        ("gptoss", "4", None),
        ("gptoss", "<|channel|>ana", ("", "")),
        (
            "gptoss",
            SPOKEN["gptoss"][1].removesuffix(": 2.5}<|call|>"),
            ("so", 'assistant to=functions.multiplycommentary json{"a": 3, "b"'),
        ),
        (
            "gptoss",
            '<|channel|>commentary to=functions.multiply <|constrain|>json<|message|>{"a"',
            ("", 'commentary to=functions.multiply json{"a"'),
        ),
        ("gemma4", "<|channel>thought\nso<channel|>4<turn|>", "so"),
        ("gemma4", "<|channel>tho", ("", "tho")),
        ("gemma4", "<|channel>thought\n", ("", "")),
        ("gemma4", "4<|tool_call>call:multiply{a:3", ("", "4call:multiply{a:3")),
        ("glm4moe", "\n<think>so</think>\n4<|user|>", None),
    ],
)
def test_reasoning_that_special_tokens_mark_is_apart(name: str, turn: str, parts: Any) -> None:
    tok = speaker(name)
    turn = turn.replace("{}", "<|channel|>final<|message|>")
    found = ChatRenderer(tok, appends=False).parted(ids(tok, turn))
    assert found == ((parts, "4") if isinstance(parts, str) else parts)


FINAL = "<|end|><|start|>assistant<|channel|>final<|message|>"


@pytest.mark.parametrize(
    ("name", "turn", "stop", "gets"),
    [
        ("gptoss", f"<|channel|>analysis<|message|>so{FINAL}4.\nNo", "\nNo", ("so", "4.")),
        ("gptoss", "<|channel|>analysis<|message|>so, no", "no", ("so, ", "")),
        ("gptoss", f"<|channel|>analysis<|message|>so{FINAL.removesuffix('<|message|>')}",
         "final", ("so", "")),
        ("gemma4", "<|channel>thought\nso<channel|>4.\nNo", "\nNo", ("so", "4.")),
        ("gemma4", "<|channel>thought\nso, no", "no", ("so, ", "")),
        ("gemma4", "<|channel>thought\n", "\n", ("", "")),
    ],
)  # fmt: skip
def test_a_text_of_the_programs_ends_a_turn_in_any_of_its_parts(
    name: str, turn: str, stop: str, gets: tuple[str, str]
) -> None:
    """Also in its reasoning, and in what marks its parts: the text is without special tokens."""
    tok = speaker(name)
    conversations, body = (
        Conversations(Config(), tok),
        {"messages": [{"role": "user", "content": "2 + 2?"}]},
    )
    call = read("/v1/chat/completions", json.dumps(body | {"stop": stop}).encode())
    asking, growing = conversations.asking(call, []), conversations.growing(call)
    ends = StopTexts(tok.decode, call.stop)
    for token in (tokens := ids(tok, turn)):
        growing.add([token], [-1.0])
        assert ends.add(token) == (len(growing.tokens) == len(tokens))
        assert conversations.begun(call, asking, growing, 0).content == ""
    said, _ = conversations.turn(call, asking, growing, 0, "stop")
    assert (said.reasoning, said.content, said.stop) == (*gets, stop)
    again = body["messages"] + [
        dialect_answers.message_of(call, said),
        {"role": "user", "content": "and 3?"},
    ]
    known = [conversations.answered(call, asking, said, 9)]
    asked = read("/v1/chat/completions", json.dumps(body | {"messages": again}).encode())
    assert conversations.asking(asked, known).follows == 0, "the template drops the reasoning"


@pytest.mark.parametrize("name", ["gptoss", "glm4moe", "gemma4"])
def test_a_conversation_without_its_reasoning_is_the_templates_own(name: str) -> None:
    """What a program gets, and sends back: the template drops what was reasoned."""
    tok = speaker(name)
    thought = {
        "gptoss": "<|channel|>analysis<|message|>because<|end|><|start|>assistant"
        "<|channel|>final<|message|>4<|return|>",
        "glm4moe": "\n<think>because</think>\n4<|user|>",
        "gemma4": "<|channel>thought\nbecause<channel|>4<turn|>",
    }[name]
    section = {"environment": {"agent": "a.py:b"}, "reward": {"functions": []}}
    conversations = Conversations(Config.model_validate(section), tok)

    def asked(messages: list[dict[str, Any]]) -> ModelCall:
        return read("/v1/chat/completions", json.dumps({"messages": messages}).encode())

    begin = [{"role": "user", "content": "2 + 2?"}]
    call = asked(begin)
    asking = conversations.asking(call, [])
    tokens, growing = ids(tok, thought), conversations.growing(call)
    growing.add(tokens[:-2], [-1.0] * len(tokens[:-2]))
    begun = conversations.begun(call, asking, growing, 0).content
    assert begun == ("" if name != "glm4moe" else tok.decode(tokens[:-2]))
    growing.add(tokens[-2:], [-1.0] * 2)
    turn, _ = conversations.turn(call, asking, growing, 0, "stop")
    assert turn.content.startswith(begun)
    body = dialect_answers.answer(call, [turn], created=0)
    known = [conversations.answered(call, asking, turn, 9)]
    more = [*begin, body["choices"][0]["message"], {"role": "user", "content": "and 3?"}]
    again = conversations.asking(asked(more), known)
    text = tok.decode(again.ids)
    assert again.follows == 0
    assert "because" not in text
    assert "4" in text.partition("2 + 2?")[2]


@pytest.mark.parametrize(
    ("name", "says"),
    [("lfm2_v2", "I multiply."), ("glm4moe", "\n<think>so</think>\nI multiply."), ("llama3_2", "")],
)
def test_what_a_turn_says_before_its_calls_reaches_the_program(name: str, says: str) -> None:
    tok, (_, spoken) = speaker(name), SPOKEN[name]
    conversations = Conversations(Config(), tok)
    function = {each: TOOLS[0]["function"][each] for each in ("name", "parameters")}
    body = {"messages": [{"role": "user", "content": "3 times 2.5?"}]}
    tools = {"tools": [{"type": "function", "function": function}]}
    call = read("/v1/chat/completions", json.dumps(body | tools).encode())
    asking, growing = conversations.asking(call, []), conversations.growing(call)
    tokens = ids(tok, says + spoken.removeprefix("\n<think>so</think>\n"))
    growing.add(tokens, [-1.0] * len(tokens))
    turn, _ = conversations.turn(call, asking, growing, 0, "stop")
    assert [each.name for each in turn.calls] == ["multiply"]
    assert turn.content == says


def conversation(name: str, answer: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """The turn of `SPOKEN` and its answer, as the family's template takes them."""
    call = {"id": "call00000", "type": "function", "function": CALL}
    message: dict[str, Any] = {"role": "assistant", "content": "", "tool_calls": [call]}
    if name == "gemma3":
        message = {"role": "assistant", "content": f"<tool_call>{json.dumps(CALL)}</tool_call>"}
        answer = [{"role": "user", "content": "<tool_response>\n7.5\n</tool_response>"}]
    elif name == "gptoss":
        message["thinking"] = "so"
    elif name in ("qwen3", "glm4moe"):
        message["reasoning_content"] = "so"
    return [message, *answer]


if __name__ == "__main__":
    print(json.dumps(found(), indent=1))
