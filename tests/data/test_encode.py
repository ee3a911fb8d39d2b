"""From prompts to tokens, with a character tokenizer whose text can be read back."""

from typing import Any

import pytest
from pydantic import ValidationError
from tokenizers import Tokenizer, models, pre_tokenizers, processors
from transformers import PreTrainedTokenizerFast

from rhymeflow.config import DataConfig
from rhymeflow.data.encode import PromptEncoder
from rhymeflow.data.prompts import Prompt, opened
from tests import characters
from tests.refused import refusal

TEMPLATE = (
    "{{ bos_token }}{% for m in messages %}"
    "{% if m.role == 'tool' %}{{ raise_exception('no tools here') }}{% endif %}"
    "[{{ m.role }}]{{ m.content }};{% endfor %}"
    "{% if add_generation_prompt %}[assistant]{% endif %}"
)


def tokenizer(template: str | None) -> PreTrainedTokenizerFast:
    made = characters.make_tokenizer("abcdefghijklmnopqrstuvwxyz0123456789 +=?[];<>^", 200)
    made.add_special_tokens({"bos_token": "^"})
    made.backend_tokenizer.post_processor = processors.TemplateProcessing(
        "^ $A", special_tokens=[("^", made.convert_tokens_to_ids("^"))]
    )
    made.chat_template = template
    return made


CHAT, BASE = tokenizer(TEMPLATE), tokenizer(None)


def text(tok: PreTrainedTokenizerFast, prompt: Any, **fields: Any) -> str:
    encoder = PromptEncoder(tok, DataConfig(**fields))
    ids = encoder.encode(Prompt(3, prompt, {}, "a.jsonl:4"))
    assert all(type(token) is int for token in ids)
    return "".join(tok.convert_ids_to_tokens(ids))


USER, SYSTEM = {"role": "user", "content": "hi"}, {"role": "system", "content": "x"}
BEGUN = {"role": "assistant", "content": "well"}
SHOWN = [{"role": "user", "content": "1"}, {"role": "assistant", "content": "2"}]
TRIMS = tokenizer(TEMPLATE.replace("m.content", "m.content.strip()"))
BEGINS_NO_TURN = tokenizer(TEMPLATE.partition("{% if add_gen")[0])
NEEDS_NO_BEGINNING = tokenizer("{% for m in messages %}{{ m.content }}]{% endfor %}")
HAS_VARIABLE = tokenizer(TEMPLATE + "{% if thinks is false %}<>{% endif %}")
SEVERAL = tokenizer({"rag": "", "use": TEMPLATE})  # type: ignore[arg-type]
NAMED = "{% if m.tool_calls %}{{ m.tool_calls[0].name }}{% endif %}"
WRITES_CALLS = tokenizer(TEMPLATE.replace("m.content }}", "m.content }}" + NAMED))
CALL = [{"name": "add", "arguments": {}}]
CALLED = [USER, {"role": "assistant", "content": "so", "tool_calls": CALL}, USER]


@pytest.mark.parametrize(
    ("tok", "prompt", "fields", "expected"),
    [
        (BASE, "1+1=", {}, "^1+1="),
        (CHAT, "1+1=", {"chat_template": False}, "^1+1="),
        (CHAT, "1+1=", {}, "^[user]1+1=;[assistant]"),
        (CHAT, "1+1=", {"chat_template": True}, "^[user]1+1=;[assistant]"),
        (CHAT, [USER], {}, "^[user]hi;[assistant]"),
        (CHAT, [USER], {"chat_template": False}, "^[user]hi;[assistant]"),
        (CHAT, [USER, BEGUN], {}, "^[user]hi;[assistant]well"),
        (CHAT, "hi", {"system_prompt": "be brief", "assistant_prefix": "<think>"},
         "^[system]be brief;[user]hi;[assistant]<think>"),
        (BASE, "hi", {"assistant_prefix": " so"}, "^hi so"),
        (CHAT, "3", {"few_shot": SHOWN}, "^[user]1;[assistant]2;[user]3;[assistant]"),
        (CHAT, "3", {"few_shot": SHOWN, "system_prompt": "s"},
         "^[system]s;[user]1;[assistant]2;[user]3;[assistant]"),
        (CHAT, [SYSTEM, USER], {"few_shot": SHOWN},
         "^[system]x;[user]1;[assistant]2;[user]hi;[assistant]"),
        (BASE, "1234", {"max_prompt_length": 5}, "^1234"),
        (HAS_VARIABLE, "hi", {}, "^[user]hi;[assistant]"),
        (HAS_VARIABLE, "hi", {"chat_template_kwargs": {"thinks": False}},
         "^[user]hi;[assistant]<>"),
        (SEVERAL, "hi", {"chat_template_kwargs": {"chat_template": "use"}},
         "^[user]hi;[assistant]"),
        # Blanks after which the answer goes on stay.
        (TRIMS, [{**USER, "content": " hi "}, {**BEGUN, "content": "a  "}], {},
         "^[user]hi;[assistant]a  "),
        (WRITES_CALLS, CALLED, {}, "^[user]hi;[assistant]soadd;[user]hi;[assistant]"),
        (BEGINS_NO_TURN, "hi", {"assistant_prefix": "[assistant]"}, "^[user]hi;[assistant]"),
        (NEEDS_NO_BEGINNING, "hi", {}, "hi]"),
        # Text that the template made is not wrapped again unless that is asked for.
        (CHAT, "^[user]hi;[assistant]", {"chat_template": False}, "^[user]hi;[assistant]"),
        (CHAT, "^[user]hi;[assistant]", {"chat_template": True},
         "^[user]^[user]hi;[assistant];[assistant]"),
    ],
)  # fmt: skip
def test_what_a_prompt_becomes(tok, prompt, fields, expected):
    assert text(tok, prompt, **fields) == expected


DEAF = tokenizer(
    TEMPLATE.replace("[{{ m.role", "{% if m.role == 'system' %}{% continue %}{% endif %}[{{ m.role")
)
NO_VARIABLE = "data.chat_template_kwargs: the model's chat template has no variable"
REFUSES = "the chat template refuses the prompt: "


@pytest.mark.parametrize(
    ("tok", "prompt", "fields", "says"),
    [
        (BASE, "3", {"few_shot": SHOWN}, "data.few_shot: "),
        (BASE, "a", {"chat_template": True}, "data.chat_template: "),
        (BASE, "a", {"chat_template_kwargs": {"thinks": False}}, f"{NO_VARIABLE} 'thinks'"),
        (HAS_VARIABLE, "a", {"chat_template_kwargs": {"think": False}},
         f"{NO_VARIABLE} 'think'; did you mean thinks?"),
        (BASE, "a", {"system_prompt": "b"}, "data.system_prompt: "),
        (BASE, "a", {"chat_template_kwargs": {"b": 1}}, "data.chat_template_kwargs: "),
        (CHAT, "a", {"system_prompt": "b", "chat_template": False}, "data.system_prompt: "),
        (BASE, [USER], {}, "a.jsonl:4: the prompt is a list of messages, but the model's tokenizer "
         "has no chat template"),
        (CHAT, [SYSTEM, USER], {"system_prompt": "b"}, "a.jsonl:4: the prompt has a system"),
        (CHAT, [USER, {"role": "tool", "content": "4"}], {}, f"a.jsonl:4: {REFUSES}no tools here"),
        (BASE, "12345", {"max_prompt_length": 5},
         "a.jsonl:4: the prompt is 6 tokens long, data.max_prompt_length = 5"),
        (tokenizer("{% if false %}{% endif %}"), [{"role": "tool", "content": "a"}], {},
         "a.jsonl:4: the prompt has no tokens"),
        (CHAT, "^[user]hi;[assistant]", {},
         "a.jsonl:4: the text has ';[assistant]', as if the chat template"),
        (DEAF, "hi", {"system_prompt": "be brief"}, "a.jsonl:4: the chat template leaves "
         "the system message out of the prompt ('be brief')"),
        (CHAT, CALLED, {},
         "a.jsonl:4: the chat template leaves the call of 'add' out of the prompt"),
        (BEGINS_NO_TURN, "hi", {}, "the chat template does not begin the assistant's turn"),
        (tokenizer({"rag": TEMPLATE, "use": TEMPLATE}), [USER], {},  # type: ignore[arg-type]
         f"a.jsonl:4: {REFUSES}there are several (rag, use), and none is the default"),
        (tokenizer("{{ tools | length }}" + TEMPLATE), [USER], {},
         f"a.jsonl:4: {REFUSES}TypeError: object of type 'NoneType' has no len()"),
        (tokenizer("{{ 1 // 0 }}" + TEMPLATE), [USER], {}, f"a.jsonl:4: {REFUSES}ZeroDivisionErr"),
        (tokenizer("{% for m in messages %}{% if loop.first %}{{ m.content }}{% endif %}"
                   "{% endfor %}"), [USER, BEGUN], {},
         f"a.jsonl:4: {REFUSES}it leaves out the assistant's"),
    ],
)  # fmt: skip
def test_what_is_refused_and_how(tok, prompt, fields, says):
    assert refusal(text, tok, prompt, **fields).startswith(says)


def test_the_configuration_is_looked_at():
    assert 'data.assistant_prefix: "[assistant]"' in refusal(text, BEGINS_NO_TURN, "hi")
    with pytest.raises(ValidationError, match="the last message should be the assistant's"):
        DataConfig(few_shot=SHOWN[:1])
    with pytest.raises(ValidationError, match="'tokenize' is no variable of the template"):
        DataConfig(chat_template_kwargs={"tokenize": True})


def test_tools_are_told_to_the_chat_template_or_refused():
    tells = tokenizer("{% for t in tools or [] %}<{{ t.name }}>{% endfor %}" + TEMPLATE)

    def told(tools: Any, tok: Any = tells, prompt: str = "hi", **fields: Any) -> str:
        asked = Prompt(3, prompt, {"environment": "b"}, "a.jsonl:4")
        ids = PromptEncoder(tok, DataConfig(**fields), tools=tools).encode(asked)
        return "".join(tok.convert_ids_to_tokens(ids)).partition("^")[0]

    assert told(None) == ""
    assert told([{"name": "add"}, {"name": "sub"}]) == "<add><sub>"
    assert told({"a": [{"name": "add"}], "b": [{"name": "sub"}]}) == "<sub>"
    assert told({"a": [{"name": "add"}], "b": []}) == ""
    add = [{"type": "function", "function": {"name": "add"}}]
    assert "does not mention the tool 'add'" in refusal(told, add, CHAT, "addition")
    told(add, CHAT, "1+1?", system_prompt="you may call add")


def test_what_an_environment_opens_with_is_put_after_the_user():
    assert opened("hi", " you") == "hi you"
    assert opened([SYSTEM, USER, BEGUN], " you") == [SYSTEM, {**USER, "content": "hi you"}, BEGUN]
    assert USER["content"] == "hi"
    assert opened([SYSTEM], "") == [SYSTEM]
    assert "no message of the user" in refusal(opened, [SYSTEM], "so")


def test_a_prompt_begins_once_and_does_not_end():
    around = tokenizer(None)
    around.backend_tokenizer.post_processor = processors.TemplateProcessing(
        "^ $A ]", special_tokens=[(each, around.convert_tokens_to_ids(each)) for each in "^]"]
    )
    assert text(around, "1+1=") == text(around, "^1+1=") == text(BASE, "^1+1=") == "^1+1="
    assert text(around, "a]") == "^a]"  # as it was given
    around.chat_template = TEMPLATE
    assert text(around, "hi") == "^[user]hi;[assistant]"


def test_what_the_tokenizer_cannot_write_is_refused():
    letters = {each: n for n, each in enumerate("abc ")}
    kinds = models.BPE(letters, []), models.WordLevel(letters), models.WordLevel(letters, "b")
    tokenizers = [Tokenizer(each) for each in kinds]
    for each in tokenizers:
        each.pre_tokenizer = pre_tokenizers.Split("", "isolated")
    loses, fails, alike = (PreTrainedTokenizerFast(tokenizer_object=each) for each in tokenizers)
    assert text(loses, "a\nb c") == "ab c"  # it may drop blanks
    lost = "a.jsonl:4: the model's tokenizer has no token for the character 'é'"
    assert refusal(text, loses, "abécd") == refusal(text, alike, "abécd") == lost
    assert text(alike, "abc") == "abc", "what it writes for others is a token too"
    assert "a.jsonl:4: the model's tokenizer cannot write it: " in refusal(text, fails, "abécd")


def test_what_a_policy_was_given_is_told_in_messages_or_text():
    user, so = {"role": "user", "content": "1+1="}, {"role": "assistant", "content": " so"}

    def seen(tok: PreTrainedTokenizerFast, prompt: Any, **fields: Any) -> Any:
        return PromptEncoder(tok, DataConfig(**fields)).seen(prompt)

    assert seen(BASE, "1+1=") == seen(CHAT, "1+1=", chat_template=False) == "1+1="
    assert seen(BASE, "1+1=", assistant_prefix=" so") == "1+1= so"
    assert seen(CHAT, [user, BEGUN], system_prompt="x") == [SYSTEM, user, BEGUN]
    assert seen(CHAT, "1+1=", assistant_prefix=" so") == [user, so]
    both = {"role": "assistant", "content": "well so"}
    assert seen(CHAT, [user, BEGUN], assistant_prefix=" so") == [user, both]
    assert BEGUN["content"] == "well"
