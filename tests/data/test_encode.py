"""From prompts to tokens, with a character tokenizer whose text can be read back."""

from __future__ import annotations

from typing import Any

import pytest
from pydantic import ValidationError
from tokenizers import Tokenizer, models, pre_tokenizers, processors
from transformers import PreTrainedTokenizerFast

from rhymeflow.config import DataConfig
from rhymeflow.data import Prompt, PromptEncoder
from rhymeflow.data.prompts import opened
from rhymeflow.errors import UserError

TEMPLATE = (
    "{{ bos_token }}{% for m in messages %}"
    "{% if m.role == 'tool' %}{{ raise_exception('no tools here') }}{% endif %}"
    "[{{ m.role }}]{{ m.content }};{% endfor %}"
    "{% if add_generation_prompt %}[assistant]{% endif %}"
)


def tokenizer(template: str | None) -> PreTrainedTokenizerFast:
    characters = sorted(set("abcdefghijklmnopqrstuvwxyz0123456789 +=?[];<>^"))
    raw = Tokenizer(models.WordLevel({each: n for n, each in enumerate(characters)}, "?"))
    raw.pre_tokenizer = pre_tokenizers.Split("", "isolated")
    raw.post_processor = processors.TemplateProcessing(
        "^ $A", special_tokens=[("^", raw.token_to_id("^"))]
    )
    made = PreTrainedTokenizerFast(tokenizer_object=raw, bos_token="^")
    made.chat_template = template
    return made


CHAT, BASE = tokenizer(TEMPLATE), tokenizer(None)


def text(tok: PreTrainedTokenizerFast, prompt: Any, **fields: Any) -> str:
    encoder = PromptEncoder(tok, DataConfig(**fields))
    ids = encoder.encode(Prompt(3, prompt, {}, "a.jsonl:4"))
    assert all(type(token) is int for token in ids)
    return "".join(tok.convert_ids_to_tokens(ids))


def refused(tok: PreTrainedTokenizerFast, prompt: Any, **fields: Any) -> str:
    with pytest.raises(UserError) as error:
        text(tok, prompt, **fields)
    return str(error.value)


def test_strings() -> None:
    assert text(BASE, "1+1=") == "^1+1="
    assert text(CHAT, "1+1=", chat_template=False) == "^1+1="
    assert text(CHAT, "1+1=") == "^[user]1+1=;[assistant]"
    assert text(CHAT, "1+1=", chat_template=True) == "^[user]1+1=;[assistant]"


def test_messages() -> None:
    asked = [{"role": "user", "content": "hi"}]
    assert text(CHAT, asked) == "^[user]hi;[assistant]"
    assert text(CHAT, asked, chat_template=False) == "^[user]hi;[assistant]"
    begun = [*asked, {"role": "assistant", "content": "well"}]
    assert text(CHAT, begun) == "^[user]hi;[assistant]well"


def test_system_prompt_and_assistant_prefix() -> None:
    fields = {"system_prompt": "be brief", "assistant_prefix": "<think>"}
    assert text(CHAT, "hi", **fields) == "^[system]be brief;[user]hi;[assistant]<think>"
    assert text(BASE, "hi", assistant_prefix=" so") == "^hi so"


def test_worked_examples_come_after_the_system_message() -> None:
    shown = [{"role": "user", "content": "1"}, {"role": "assistant", "content": "2"}]
    assert text(CHAT, "3", few_shot=shown) == "^[user]1;[assistant]2;[user]3;[assistant]"
    assert text(CHAT, "3", few_shot=shown, system_prompt="s") == (
        "^[system]s;[user]1;[assistant]2;[user]3;[assistant]"
    )
    own = [{"role": "system", "content": "x"}, {"role": "user", "content": "3"}]
    assert text(CHAT, own, few_shot=shown) == (
        "^[system]x;[user]1;[assistant]2;[user]3;[assistant]"
    )
    assert refused(BASE, "3", few_shot=shown).startswith("data.few_shot: ")
    with pytest.raises(ValidationError, match="the last message is to be the assistant's"):
        DataConfig(few_shot=shown[:1])


def test_what_does_not_fit_the_tokenizer_is_refused() -> None:
    assert refused(BASE, "a", chat_template=True).startswith("data.chat_template: ")
    assert refused(BASE, "a", system_prompt="b").startswith("data.system_prompt: ")
    assert refused(CHAT, "a", system_prompt="b", chat_template=False).startswith("data.system_")
    asked = [{"role": "user", "content": "hi"}]
    assert refused(BASE, asked) == (
        "a.jsonl:4: the prompt is a list of messages, but the model's tokenizer has no chat "
        "template"
    )
    own = [{"role": "system", "content": "x"}, *asked]
    assert "a.jsonl:4: the prompt has a system message of its own" in refused(
        CHAT, own, system_prompt="b"
    )
    tool = [*asked, {"role": "tool", "content": "4"}]
    assert refused(CHAT, tool) == (
        "a.jsonl:4: the model's chat template refuses the prompt: no tools here"
    )


def test_a_long_prompt_is_named_and_not_cut() -> None:
    assert len(text(BASE, "1234", max_prompt_length=5)) == 5
    assert refused(BASE, "12345", max_prompt_length=5) == (
        "a.jsonl:4: the prompt is 6 tokens long, data.max_prompt_length = 5"
    )


def test_a_prompt_without_tokens_is_refused() -> None:
    asked = [{"role": "tool", "content": "a"}]
    silent = tokenizer("{% if false %}{% endif %}")
    assert refused(silent, asked) == "a.jsonl:4: the prompt has no tokens"


def test_tools_are_told_to_the_chat_template() -> None:
    tells = tokenizer("{% for t in tools or [] %}<{{ t.name }}>{% endfor %}" + TEMPLATE)
    asked = Prompt(3, "hi", {"environment": "b"}, "a.jsonl:4")

    def told(tools: Any) -> str:
        ids = PromptEncoder(tells, DataConfig(), tools=tools).encode(asked)
        return "".join(tells.convert_ids_to_tokens(ids)).partition("^")[0]

    assert told(None) == ""
    assert told([{"name": "add"}, {"name": "sub"}]) == "<add><sub>"
    assert told({"a": [{"name": "add"}], "b": [{"name": "sub"}]}) == "<sub>"
    assert told({"a": [{"name": "add"}], "b": []}) == ""


def test_a_tool_that_nobody_tells_of_is_refused() -> None:
    add = [{"type": "function", "function": {"name": "add"}}]

    def encoded(prompt: str, **fields: Any) -> list[int]:
        return PromptEncoder(CHAT, DataConfig(**fields), tools=add).encode(
            Prompt(3, prompt, {}, "a.jsonl:4")
        )

    with pytest.raises(UserError, match=r"a\.jsonl:4: .* not tell of the tool 'add'"):
        encoded("addition")
    assert encoded("1+1?", system_prompt="you may call add")


def test_what_an_environment_opens_with_is_put_after_the_user() -> None:
    user, system = {"role": "user", "content": "hi"}, {"role": "system", "content": "x"}
    begun = {"role": "assistant", "content": "well"}
    assert opened("hi", " you") == "hi you"
    assert opened([system, user, begun], " you") == [system, {**user, "content": "hi you"}, begun]
    assert user["content"] == "hi"
    assert opened([system], "") == [system]
    with pytest.raises(UserError, match="no message of the user"):
        opened([system], "so")


def test_variables_of_the_template() -> None:
    tok = tokenizer(TEMPLATE + "{% if thinks is false %}<>{% endif %}")
    assert text(tok, "hi") == "^[user]hi;[assistant]"
    given = {"chat_template_kwargs": {"thinks": False}}
    assert text(tok, "hi", **given) == "^[user]hi;[assistant]<>"


def test_a_prompt_begins_once_and_does_not_end() -> None:
    around = tokenizer(None)
    around.backend_tokenizer.post_processor = processors.TemplateProcessing(
        "^ $A ]", special_tokens=[(each, around.convert_tokens_to_ids(each)) for each in "^]"]
    )
    assert text(around, "1+1=") == text(around, "^1+1=") == text(BASE, "^1+1=") == "^1+1="
    assert text(around, "a]") == "^a]"  # as it was given
    around.chat_template = TEMPLATE
    assert text(around, "hi") == "^[user]hi;[assistant]"


def test_a_rendered_prompt_is_not_wrapped_again() -> None:
    made = text(CHAT, "hi")
    assert "a.jsonl:4: the text has ';[assistant]', as if the chat template" in refused(CHAT, made)
    assert text(CHAT, made, chat_template=False) == made
    assert text(CHAT, made, chat_template=True) == f"^[user]{made};[assistant]"


def without_unknown(model: Any) -> PreTrainedTokenizerFast:
    raw = Tokenizer(model)
    raw.pre_tokenizer = pre_tokenizers.Split("", "isolated")
    return PreTrainedTokenizerFast(tokenizer_object=raw)


def test_what_the_tokenizer_cannot_write_is_refused() -> None:
    letters = {each: n for n, each in enumerate("abc ")}
    loses = without_unknown(models.BPE(letters, []))
    assert text(loses, "a\nb c") == "ab c"  # it may drop blanks
    assert refused(loses, "abécd") == (
        "a.jsonl:4: the model's tokenizer has no token for the character 'é'"
    )
    assert "a.jsonl:4: the model's tokenizer cannot write it: " in refused(
        without_unknown(models.WordLevel(letters)), "abécd"
    )
    assert text(BASE, "aé") == "^a?"  # which has a token for it


@pytest.mark.parametrize(
    ("template", "part"),
    [
        ({"rag": TEMPLATE, "use": TEMPLATE}, "there are several, rag, use, and none is the defaul"),
        ("{{ tools | length }}" + TEMPLATE, "TypeError: object of type 'NoneType' has no len()"),
        ("{{ 1 // 0 }}" + TEMPLATE, "ZeroDivisionError: "),
        ("{% for m in messages %}{% if loop.first %}{{ m.content }}{% endif %}{% endfor %}",
         "a.jsonl:4: the model's chat template refuses the prompt: it leaves out the assistant's"),
    ],
)  # fmt: skip
def test_whatever_a_template_raises_is_one_line(template: Any, part: str) -> None:
    asked = [{"role": "user", "content": "hi"}, {"role": "assistant", "content": "well"}]
    said = refused(tokenizer(template), asked)
    assert said.startswith("a.jsonl:4: the model's chat template refuses the prompt: ")
    assert part in said
    assert "\n" not in said


def test_one_of_several_templates() -> None:
    tok = tokenizer({"rag": "", "use": TEMPLATE})  # type: ignore[arg-type]
    assert text(tok, "hi", chat_template_kwargs={"chat_template": "use"}) == text(CHAT, "hi")
    with pytest.raises(ValidationError, match="'tokenize' is no variable of the template"):
        DataConfig(chat_template_kwargs={"tokenize": True})


def test_blanks_that_the_answer_goes_on_after_stay() -> None:
    trims = tokenizer(TEMPLATE.replace("m.content", "m.content.strip()"))
    asked = [{"role": "user", "content": " hi "}, {"role": "assistant", "content": "a  "}]
    assert text(trims, asked) == "^[user]hi;[assistant]a  "


def test_a_message_that_the_template_leaves_out_is_refused() -> None:
    deaf = tokenizer(
        TEMPLATE.replace(
            "[{{ m.role", "{% if m.role == 'system' %}{% continue %}{% endif %}[{{ m.role"
        )
    )
    assert refused(deaf, "hi", system_prompt="be brief") == (
        "a.jsonl:4: the model's chat template leaves the system message out of the prompt "
        "('be brief')"
    )


def test_a_call_that_the_template_leaves_out_is_refused() -> None:
    call = [{"name": "add", "arguments": {}}]
    asked = [{"role": "user", "content": "hi"}] * 2
    asked.insert(1, {"role": "assistant", "content": "so", "tool_calls": call})  # type: ignore[dict-item]
    assert refused(CHAT, asked) == (
        "a.jsonl:4: the model's chat template leaves the call of 'add' out of the prompt"
    )
    named = "{% if m.tool_calls %}{{ m.tool_calls[0].name }}{% endif %}"
    writes = tokenizer(TEMPLATE.replace("m.content }}", "m.content }}" + named))
    assert text(writes, asked) == "^[user]hi;[assistant]soadd;[user]hi;[assistant]"


def test_the_policys_turn_is_begun() -> None:
    tok = tokenizer(TEMPLATE.partition("{% if add_gen")[0])
    assert 'data.assistant_prefix: "[assistant]"' in refused(tok, "hi")
    assert text(tok, "hi", assistant_prefix="[assistant]") == text(CHAT, "hi")
    needs_none = tokenizer("{% for m in messages %}[{{ m.content }}]{% endfor %}".replace("[", ""))
    assert text(needs_none, "hi") == "hi]"


def test_what_a_policy_was_given_is_told_in_messages_or_text() -> None:
    user = {"role": "user", "content": "1+1="}
    begun = {"role": "assistant", "content": "it is"}

    def seen(tok: PreTrainedTokenizerFast, prompt: Any, **fields: Any) -> Any:
        return PromptEncoder(tok, DataConfig(**fields)).seen(prompt)

    assert seen(BASE, "1+1=") == seen(CHAT, "1+1=", chat_template=False) == "1+1="
    assert seen(BASE, "1+1=", assistant_prefix=" so") == "1+1= so"
    assert seen(CHAT, "1+1=") == [user]
    system = {"role": "system", "content": "be brief"}
    assert seen(CHAT, [user, begun], system_prompt="be brief") == [system, user, begun]
    so = {"role": "assistant", "content": " so"}
    assert seen(CHAT, "1+1=", assistant_prefix=" so") == [user, so]
    both = {"role": "assistant", "content": "it is so"}
    assert seen(CHAT, [user, begun], assistant_prefix=" so") == [user, both]
    assert begun["content"] == "it is"
