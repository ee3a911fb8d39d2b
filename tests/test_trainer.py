"""`Trainer`: Python objects become files and names that other processes can load."""

from __future__ import annotations

import functools
import importlib
import json
import types
from pathlib import Path
from typing import Any

import pytest

from rhymeflow import Config, Trainer, UserError
from rhymeflow.config import RewardFunction
from rhymeflow.data.load import load_prompts
from rhymeflow.trainer import reward_function


def longest(prompts: list[str], completions: list[str], **columns: Any) -> list[float]:
    return [float(len(completion)) for completion in completions]


def trainer(tmp_path: Path, **arguments: Any) -> Trainer:
    config = {"output_dir": str(tmp_path / "run"), **arguments.pop("config", {})}
    return Trainer(config=config, **arguments)


def test_trl_names_are_fields(tmp_path: Path) -> None:
    names = {
        "num_generations": 4, "max_completion_length": 32, "learning_rate": 1e-4, "beta": 0.01,
        "epsilon": 0.1, "epsilon_high": 0.3, "loss_type": "dr_grpo", "scale_rewards": "none",
        "temperature": 0.9, "max_steps": 3, "num_iterations": 2, "max_grad_norm": 0.5,
        "lr_scheduler_type": "linear", "warmup_steps": 1, "weight_decay": 0.1, "seed": 3,
        "mask_truncated_completions": True, "gradient_checkpointing": True, "save_steps": 2,
        "eval_steps": 5, "max_prompt_length": 99, "top_p": 0.9, "top_k": 5, "max_staleness": 2,
    }  # fmt: skip
    config = trainer(tmp_path, config=names).config
    for name, value in names.items():
        homes = [section for section in (config.rollout, config.learner, config.run, config.data,
                                         config.schedule) if hasattr(section, name)]  # fmt: skip
        assert [getattr(home, name) for home in homes] == [value]


def test_args_is_config_under_trls_name(tmp_path: Path) -> None:
    made = Trainer(args={"output_dir": str(tmp_path), "max_steps": 7})
    assert made.config.learner.max_steps == 7
    with pytest.raises(UserError, match="config and args"):
        Trainer(config=Config(), args=Config())


def test_datasets_are_written_down(tmp_path: Path) -> None:
    rows = [{"prompt": "ä?", "answer": 1}, {"prompt": [{"role": "user", "content": "b"}]}]
    made = trainer(tmp_path, train_dataset=rows, eval_dataset=(row for row in rows[:1]))
    source = Path(made.config.data.source)
    assert source.parent.parent == made.run_dir
    assert [json.loads(line) for line in source.read_text("utf-8").splitlines()] == rows
    assert made.config.data.eval_source is not None
    assert len(Path(made.config.data.eval_source).read_text("utf-8").splitlines()) == 1
    train, held_out = load_prompts(made.config.data, 0)
    assert [len(train), len(held_out)] == [2, 1]


def test_without_held_out_rows_nothing_is_held_out(tmp_path: Path) -> None:
    made = trainer(tmp_path, train_dataset=[{"prompt": "a"}])
    train, held_out = load_prompts(made.config.data, 0)
    assert [len(train), len(held_out)] == [1, 0]


def test_a_huggingface_dataset_is_a_dataset(tmp_path: Path) -> None:
    datasets = pytest.importorskip("datasets")
    rows = [{"prompt": "a", "answer": 1}, {"prompt": "b", "answer": 2}]
    made = trainer(tmp_path, train_dataset=datasets.Dataset.from_list(rows))
    written = Path(made.config.data.source).read_text().splitlines()
    assert [json.loads(line) for line in written] == rows


def test_paths_and_names_pass_through(tmp_path: Path) -> None:
    made = trainer(tmp_path, model="org/name", train_dataset=tmp_path / "a.jsonl")
    assert made.config.model.name == "org/name"
    assert made.config.data.source == str(tmp_path / "a.jsonl")
    assert not made.run_dir.exists()


def test_functions_are_named_so_that_others_can_import_them(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "judges.py").write_text("def short(completions, **columns): ...")
    monkeypatch.syspath_prepend(tmp_path)
    short = importlib.import_module("judges").short
    assert reward_function(short).function == f"{tmp_path / 'judges.py'}:short"
    assert reward_function(json.dumps).function == "json.dumps"
    assert reward_function(functools.partial(longest, scale=2)).options == {"scale": 2}
    assert reward_function("exact_match") == RewardFunction(function="exact_match")


def test_several_functions_keep_their_weights(tmp_path: Path) -> None:
    weighted = RewardFunction(function="regex", weight=0.5, options={"pattern": "x"})
    made = trainer(tmp_path, reward_funcs=[longest, weighted])
    assert [each.weight for each in made.config.reward.functions] == [1.0, 0.5]
    assert made.config.reward.functions[1] == weighted


def test_functions_that_no_process_can_import_are_refused() -> None:
    def closure(completions: list[str], **columns: Any) -> list[float]:
        return [0.0] * len(completions)

    class Judge:
        def __call__(self, completions: list[str], **columns: Any) -> list[float]:
            return [0.0] * len(completions)

        def judge(self, completions: list[str], **columns: Any) -> list[float]:
            return [0.0] * len(completions)

    typed = types.FunctionType(compile("0", "<stdin>", "eval"), {"__name__": "__main__"}, "typed")
    for function in (closure, lambda completions, **columns: [0.0], Judge(), Judge().judge, len):
        with pytest.raises(UserError, match=r"cannot be imported by another process"):
            reward_function(function)
    typed.__qualname__ = "typed"
    with pytest.raises(UserError, match="typed is in no file"):
        reward_function(typed)


@pytest.mark.parametrize(
    ("arguments", "part"),
    [
        ({"model": object()}, "model is a object"),
        ({"model": type("Model", (), {"save_pretrained": print})()}, "processing_class"),
        ({"train_dataset": ["a"]}, "train_dataset, row 0: is a str"),
        ({"train_dataset": []}, "train_dataset is empty"),
        ({"train_dataset": [{"prompt": object()}]}, "train_dataset, row 0: cannot be written"),
        ({"config": {"learning_rte": 1}}, "did you mean learner.learning_rate"),
    ],
)
def test_mistakes_are_one_clear_line(tmp_path: Path, arguments: dict[str, Any], part: str) -> None:
    with pytest.raises(UserError, match=part) as error:
        trainer(tmp_path, **arguments)
    assert "\n" not in str(error.value)


@pytest.mark.parametrize("tries", [1, 2])
def test_a_mistake_before_the_first_step_leaves_no_run_directory(
    tmp_path: Path, tries: int
) -> None:
    made = trainer(tmp_path, model="./nowhere", train_dataset=[{"prompt": "a"}])
    assert Path(made.config.data.source).is_file()
    for _ in range(tries):
        with pytest.raises(UserError, match=r"\./nowhere.*no such directory"):
            made.train()
        assert not made.run_dir.exists()


def test_a_mistake_in_an_argument_leaves_no_inputs(tmp_path: Path) -> None:
    with pytest.raises(UserError, match="eval_dataset is empty"):
        trainer(tmp_path, train_dataset=[{"prompt": "a"}], eval_dataset=[])
    assert not (tmp_path / "run").exists()


def test_a_model_object_is_saved(tmp_path: Path) -> None:
    from transformers import LlamaConfig, LlamaForCausalLM

    tiny = LlamaConfig(
        hidden_size=8, intermediate_size=8, num_hidden_layers=1, num_attention_heads=1, vocab_size=9
    )

    class Tokenizer:
        def save_pretrained(self, folder: Path) -> None:
            (Path(folder) / "tokenizer.json").write_text("{}")

    made = trainer(tmp_path, model=LlamaForCausalLM(tiny), processing_class=Tokenizer())
    folder = Path(made.config.model.name)
    assert folder == made.run_dir / "inputs" / "model"
    assert {"config.json", "model.safetensors", "tokenizer.json"} <= {
        p.name for p in folder.iterdir()
    }
