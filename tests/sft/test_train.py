"""`rhymeflow sft` from files to a checkpoint that can be trained on."""

import json
import re
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file

from rhymeflow import cli, memory
from rhymeflow.config import Config, LoraConfig, ModelConfig
from rhymeflow.config.load import parse_config
from rhymeflow.models.adapter_files import CONFIG, WEIGHTS
from rhymeflow.models.tokenizer import load_tokenizer
from rhymeflow.sft.train import digest, train
from rhymeflow.utils.disk import size_text
from tests.characters import save_without_weights
from tests.refused import refusal
from tests.runtime.tiny import save_model


@pytest.fixture
def tiny(tmp_path):
    """A model's configuration and tokenizer, without weights."""
    return save_without_weights(tmp_path / "tiny", "abc?", 16)


def rows(path: Path, *lines: dict[str, str]) -> Path:
    path.write_text("".join(f"{json.dumps(line)}\n" for line in lines))
    return path


def sft(*arguments: object) -> int:
    return cli.main(["sft", *map(str, arguments)])


def test_a_model_from_nothing_and_further_from_its_weights(tiny, tmp_path, capsys):
    data = rows(
        tmp_path / "rows.jsonl",
        *({"prompt": f"{each}?", "completion": each * 3} for each in "abcabcabcabc"),
    )
    first, second = tmp_path / "first", tmp_path / "second"
    common = ["--data", data, "--sft.tokens_per_batch", 40, "--learner.num_threads", 1]
    common += ["--sft.learning_rate", 0.01, "--data.eval_size", 2, "--sft.max_steps", 30]
    assert sft("--model", tiny, "--sft.output_dir", first, "--sft.init", "config", *common) == 0
    out = capsys.readouterr().out
    assert re.search(r"step 30/30  loss \d", out)
    before, after = (float(n) for n in re.findall(r"held-out loss\D*: ([\d.]+)", out))
    assert after < before / 3

    bf16 = ["--sft.save_dtype", "bfloat16"]
    assert sft("--model", first, "--sft.output_dir", second, *bf16, *common) == 0
    out, err = capsys.readouterr()
    assert not err, "no bar without a terminal"
    again, final = (float(n) for n in re.findall(r"held-out loss\D*: ([\d.]+)", out))
    assert again == pytest.approx(after, abs=1e-3)
    assert final < after
    made = json.loads((second / "warm_start.json").read_text())
    assert (made["seed"], made["steps"], made["eval_loss"]) == (0, 30, pytest.approx(final))
    assert made["sha256"] == digest(second) != digest(first)
    assert {path.name for path in second.iterdir()} >= {"config.json", "model.safetensors"}
    assert not (second / "learner.pt").exists()

    assert json.loads((second / "config.json").read_text())["dtype"] == "bfloat16"
    tokenizer = load_tokenizer(ModelConfig(name=str(second)))
    assert tokenizer.decode([2, 3], skip_special_tokens=True) == "ab"


def test_a_dry_run_shows_what_is_learnt(tiny, tmp_path, capsys):
    data = rows(tmp_path / "rows.jsonl", *({"prompt": "a?", "completion": "bc"} for _ in range(4)))
    common = ["--model", tiny, "--data", data, "--dry-run"]
    assert sft(*common, "--sft.output_dir", tmp_path / "made", "--sft.init", "config") == 0
    out = capsys.readouterr().out
    assert "# rows: 3 to learn, of 15 tokens; 1 held out\n" in out
    assert "#   read  | a?\n#   learnt| bc<eos>\n" in out
    assert parse_config(out).sft.output_dir == str(tmp_path / "made")
    assert not (tmp_path / "made").exists()


@pytest.mark.parametrize("more", [["--dry-run"], []])
@pytest.mark.parametrize(
    ("given", "said"),
    [
        (["/proc/x"], "sft.output_dir: /proc/x cannot be written: /proc: "),
        (["made", "--learner.num_ranks", "2"], "sft is one process"),
        (["made", "--sft.min_lr_rate", "0.1"], "sft.min_lr_rate: has no effect without sft.lr_"),
        (["made"], "holds no weights"),
    ],
)
def test_what_could_not_be_saved_is_refused_first(tiny, more, given, said, refused):
    data = rows(tiny.parent / "rows.jsonl", *({"prompt": "a", "completion": "b"} for _ in range(4)))
    line = ["sft", "--model", str(tiny), "--data", str(data), "--sft.output_dir", *given, *more]
    assert said in refused(*line)


def test_from_python_what_has_no_effect_is_refused_as_by_the_command():
    without = Config(environment={"max_turns": 3})
    said = (
        "Config: environment.max_turns: has no effect without environment.classes, tools or agent"
    )
    assert refusal(train, without, print) == said


def test_the_same_seed_makes_the_same_checkpoint(tiny, tmp_path):
    data = rows(tmp_path / "rows.jsonl", *({"prompt": "a", "completion": "b"} for _ in range(4)))
    common = ["--model", tiny, "--data", data, "--sft.init", "config", "--sft.max_steps", 2]
    for name, seed in (("one", 0), ("same", 0), ("other", 1)):
        assert sft(*common, "--sft.output_dir", tmp_path / name, "--run.seed", seed) == 0
    one, same, other = (digest(tmp_path / name) for name in ("one", "same", "other"))
    assert one == same != other


@pytest.mark.parametrize(
    ("line", "options", "part"),
    [
        ({"prompt": "a"}, [], "rows.jsonl:2: no column 'completion'"),
        ({"prompt": "a", "completion": "b" * 15}, [], "rows.jsonl:2: is 17 tokens long"),
        ({}, ["--sft.size", "3"], "sft.size, sft.eval_size: belong to sft.source"),
        ({}, ["--sft.source", "warm_start:tools"], "sft.size: warm_start:tools makes rows"),
        ({}, ["--sft.source", "nothing.jsonl"], "sft.source: there is no file or directory"),
        ({}, ["--sft.source", "warm_start:smollm2", "--sft.size", "3"], "has no rows"),
        ({}, ["--sft.output_dir", "."], "sft.output_dir: . is there already"),
        ({}, ["--sft.stepz", "1"], "did you mean"),
    ],
)
def test_mistakes_are_one_line(line, options, part, tiny, refused, monkeypatch):
    monkeypatch.chdir(tiny.parent)
    good = {"prompt": "a", "completion": "b"}
    data = rows(Path("rows.jsonl"), good, line or good)
    given = ["--model", str(tiny), "--data", str(data), "--data.eval_size", "0"]
    assert part in refused("sft", *given, "--sft.init", "config", *options)
    assert not Path("runs").exists()


def test_an_adapter_is_fine_tuned_asked_and_merged(tmp_path, capsys):
    model = save_model(tmp_path / "model")
    data = rows(
        tmp_path / "rows.jsonl", *({"prompt": f"{n}+", "completion": "7"} for n in range(9))
    )
    first, merged = tmp_path / "first", tmp_path / "merged"
    common = ["--data", data, "--sft.tokens_per_batch", 40, "--learner.num_threads", 1]
    common += ["--sft.learning_rate", 0.05, "--sft.max_steps", 40, "--model.dtype", "float32"]
    training = ["--model", model, "--sft.output_dir", first, "--lora", 4, *common]
    training += ["--sft.save_dtype", "bfloat16"]
    assert sft(*training, "--dry-run") == 0
    config = ModelConfig(name=str(model), dtype="float32", lora=LoraConfig(rank=4))
    size = memory.model_here(Config(model=config)).num_adapter * 4 * 4
    assert f"AdamW's moments take {size_text(size)}" in capsys.readouterr().out
    assert sft(*training) == 0
    losses = [float(loss) for loss in re.findall(r"loss ([\d.]+)", capsys.readouterr().out)]
    assert losses[-1] < losses[0] - 0.05  # the head is frozen, and its logits are small
    assert {each.name for each in first.iterdir()} >= {CONFIG, WEIGHTS, "tokenizer.json"}
    assert {each.dtype for each in load_file(first / WEIGHTS).values()} == {torch.bfloat16}

    def answer(name: Path) -> str:
        assert cli.main(["generate", str(name), "5+", "--temperature", "0"]) == 0
        return capsys.readouterr().out

    assert answer(first) != answer(model)
    assert cli.main(["export", str(first), "--merged", "--output", str(merged)]) == 0
    assert capsys.readouterr().out == f"{merged}: the model with the adapter of {first}\n"
    assert answer(merged) == answer(first)
    assert not (merged / CONFIG).exists()
    for arguments, part in (
        ([merged, "--merged", "--output", tmp_path / "a"], "holds neither an adapter nor"),
        ([first, "--merged", "--output", merged], "is there already; name another"),
        ([first, "--merged", "--output", tmp_path / "a", "--best", 1], "--best: not with --merged"),
    ):
        assert cli.main(["export", *map(str, arguments)]) == 2
        assert part in capsys.readouterr().err
    assert sft("--model", first, "--sft.output_dir", tmp_path / "b", *common) == 2
    assert "is an adapter; to train it further" in capsys.readouterr().err
