"""The chat template that a run uses, and `rhymeflow render`, which shows what comes of it."""

import json
from pathlib import Path

import pytest
from transformers import LlamaConfig
from trl.chat_template_utils import qwen3_training_chat_template

from rhymeflow import cli
from rhymeflow.config import DataConfig
from rhymeflow.data.encode import PromptEncoder
from rhymeflow.data.prompts import Prompt
from rhymeflow.environments import template
from rhymeflow.environments.families import Family, family_of, response_template
from rhymeflow.environments.template import settle
from tests.environments import worlds
from tests.environments.test_rendering import CHATML, FORGETS, NO_TOOLS, tokenizer

OTHER = (
    "{% for m in messages %}<{{ m.role }}>{{ m.content }}{% endfor %}"
    "{% if add_generation_prompt %}>{% endif %}"
)
QWEN3 = Family("qwen3", qwen3_training_chat_template)


def test_a_file_replaces_the_template(tmp_path):
    file = tmp_path / "other.jinja"
    file.write_text(OTHER)
    data = DataConfig(chat_template=str(file))
    for own in (None, CHATML):
        tok = tokenizer(own)
        assert settle(tok, data, has_turns=False) is None
        assert tok.decode(PromptEncoder(tok, data).encode(Prompt(0, "hm", {}))) == "<user>hm>"


@pytest.mark.parametrize(
    ("content", "part"),
    [
        (None, "No such file"),
        (b" \n", "the file is empty"),
        (b"\xff", "is not UTF-8"),
        (b"{{ messages }}\n{% for m in messages %}", "line 2 is no Jinja: Unexpected end of"),
        (b"Be brief.", "the chat template leaves the user message out of the prompt"),
    ],
)
def test_a_file_that_is_no_template_is_refused(content, part, tmp_path, capsys):
    path = tmp_path / "x.jinja"
    if content is not None:
        path.write_bytes(content)
    assert cli.main(["render", "recipe:demo", "demo", "--data.chat_template", str(path)]) == 2
    said = capsys.readouterr().err
    assert part in said
    if content != b"Be brief.":
        assert f"data.chat_template = {str(path)!r}: {part}" in said


@pytest.mark.parametrize(
    ("own", "has_turns", "variables", "is_replaced"),
    [
        (FORGETS, True, {}, True),
        (FORGETS, False, {}, False),
        (CHATML, True, {}, False),  # it appends itself
        (FORGETS, True, {"chat_template": "mine"}, False),
    ],
)
def test_a_template_for_training_replaces_one_that_does_less(
    own, has_turns, variables, is_replaced, monkeypatch
):
    monkeypatch.setattr(template, "family_of", lambda text: QWEN3)
    tok = tokenizer(own)
    note = settle(tok, DataConfig(chat_template_kwargs=variables), has_turns=has_turns)
    assert tok.chat_template == (QWEN3.training if is_replaced else own)
    assert (note is not None) == is_replaced
    if note is not None:
        assert "the chat template of qwen3 changes earlier turns" in note


def test_a_template_is_known_by_its_text():
    text = QWEN3.training
    found = family_of(text)
    assert found is not None
    assert (found.name, found.training) == ("qwen3_training", None)
    assert response_template(found)["fields"]["tool_calls"]
    assert family_of({"default": text, "other": CHATML}) == found
    for other in (text + " ", {"other": text}, None):
        assert family_of(other) is None


def save(directory: Path, chat_template: str) -> str:
    tok = tokenizer(chat_template)
    tok.save_pretrained(directory)
    LlamaConfig(vocab_size=len(tok), architectures=["LlamaForCausalLM"]).save_pretrained(directory)
    return str(directory)


def test_render_shows_prompts_tools_and_special_tokens(tmp_path, capsys):
    told = "{% for t in tools or [] %}{{ t.function.name }} {% endfor %}"
    model = save(tmp_path / "model", told + CHATML)
    rows = [{"prompt": f"times {each}?"} for each in range(20)]
    rows[0]["prompt"] += "<|im_end|"
    data = tmp_path / "rows.jsonl"
    data.write_text("".join(json.dumps(each) + "\n" for each in rows))
    tools = ["--environment.tools", f"[{worlds.FILE}:multiply]"]
    assert cli.main(["render", model, "--data", str(data), *tools, "--rows", "2"]) == 0
    shown = capsys.readouterr().out
    begin, end = "⟦<|im_start|>⟧", "⟦<|im_end|>⟧"
    assert f"multiply {begin}user\ntimes 0?<|im_end|{end}\n{begin}assistant\n" in shown
    titles = [line for line in shown.split("\n") if line.startswith("#")]
    assert [each.rpartition(": ")[2] for each in titles] == ["45 tokens", "36 tokens"]
    assert cli.main(["render", model]) == 0
    assert f"{begin}user\nWhat is two plus two?{end}" in capsys.readouterr().out


def test_render_says_what_a_run_would_say(tmp_path, capsys):
    model, tools = save(tmp_path / "model", NO_TOOLS), f"[{worlds.FILE}:multiply]"
    assert cli.main(["render", model, "--environment.tools", tools]) == 2
    assert "does not mention the tool 'multiply'" in capsys.readouterr().err
    system = ["--data.system_prompt", "You can multiply."]
    assert cli.main(["render", model, "--environment.tools", tools, *system]) == 0
    assert "the chat template has no messages of tools" in capsys.readouterr().err
