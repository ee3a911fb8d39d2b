"""`Trainer`: Python objects become files and names that other processes can load."""

from __future__ import annotations

import asyncio
import datetime
import decimal
import functools
import importlib
import itertools
import json
import math
import threading
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest

from rhymeflow import Trainer, UserError
from rhymeflow.config import RewardFunction
from rhymeflow.data.load import load_prompts
from rhymeflow.reward.functions import Judge
from rhymeflow.trainer.inputs import Inputs
from rhymeflow.trainer.inputs import reward_function as named_function
from tests.reward import judged


def longest(prompts: list[str], completions: list[str], **columns: Any) -> list[float]:
    return [float(len(completion)) for completion in completions]


def reward_function(given: Any) -> RewardFunction:
    return named_function(given, Inputs(Path("run")))


def judge_request(judge: Judge, **columns: Any) -> list[float | None]:
    return judged(judge, ["a", "abc"], columns)


def trainer(tmp_path: Path, **arguments: Any) -> Trainer:
    config = {"output_dir": str(tmp_path / "run"), **arguments.pop("config", {})}
    return Trainer(config=config, **arguments)


def begun(tmp_path: Path, **arguments: Any) -> Trainer:
    """A trainer that has written down what it was given."""
    made = trainer(tmp_path, **arguments)
    made._inputs.write()
    return made


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


def test_datasets_are_written_down(tmp_path: Path) -> None:
    rows = [{"prompt": "ä?", "answer": 1}, {"prompt": [{"role": "user", "content": "b"}]}]
    made = begun(tmp_path, train_dataset=rows, eval_dataset=(row for row in rows[:1]))
    source = Path(made.config.data.source)
    assert source.parent.parent == made.run_dir
    assert [json.loads(line) for line in source.read_text("utf-8").splitlines()] == rows
    assert made.config.data.eval_source is not None
    assert len(Path(made.config.data.eval_source).read_text("utf-8").splitlines()) == 1
    assert [len(part) for part in load_prompts(made.config.data, 0)] == [2, 1]
    datasets = pytest.importorskip("datasets")
    given = datasets.Dataset.from_list([{"prompt": "a", "answer": 1}])
    made = begun(tmp_path / "other", train_dataset=given)
    assert json.loads(Path(made.config.data.source).read_text()) == {"prompt": "a", "answer": 1}
    assert [len(part) for part in load_prompts(made.config.data, 0)] == [1, 0]


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
    made = trainer(tmp_path, reward_funcs=[longest, longest], reward_weights=[0.5, 2])
    assert [each.weight for each in made.config.reward.functions] == [0.5, 2.0]
    with pytest.raises(UserError, match="1 reward_weights are given for 2 reward_funcs"):
        trainer(tmp_path, reward_funcs=[longest, longest], reward_weights=[1.0])


class Judged:
    """Counts what it is asked, which stays in its process."""

    def __init__(self, factor: float) -> None:
        self.factor, self.calls = factor, 0

    def __call__(self, completions: list[str], **columns: Any) -> list[float]:
        self.calls += 1
        return [self.factor * len(each) for each in completions]

    def plus_one(self, completions: list[str], **columns: Any) -> list[float]:
        return [self.factor * len(each) + 1 for each in completions]


def test_what_no_module_has_goes_by_value(tmp_path: Path) -> None:
    factor = 2

    def closure(completions: list[str], **columns: Any) -> list[float]:
        return [float(factor * len(each)) for each in completions]

    async def waits(completions: list[str], answer: list[int], **columns: Any) -> list[float]:
        await asyncio.sleep(0)
        return [float(each) for each in answer]

    prompt: dict[str, Any] = {"__name__": "__main__"}
    exec("def typed(completions): return [0.5] * len(completions)", prompt)
    short = lambda completions, **columns: [0.25] * len(completions)  # noqa: E731
    inputs = Inputs(tmp_path)
    specs = [
        named_function(each, inputs).function
        for each in (closure, short, Judged(3), Judged(1).plus_one, waits, prompt["typed"], short)
    ]
    assert [each.rpartition(":")[2] for each in specs] == [
        "closure", "lambda", "Judged", "plus_one", "waits", "typed", "lambda_2",
    ]  # fmt: skip
    inputs.write()
    judges = [Judge(RewardFunction(function=each)) for each in specs]
    assert [judge_request(each, answer=7) for each in judges] == [
        [2.0, 6.0], [0.25, 0.25], [3.0, 9.0], [2.0, 4.0], [7.0, 7.0],
        [0.5, 0.5], [0.25, 0.25],
    ]  # fmt: skip


def test_what_is_of_this_process_only_is_refused_by_name(tmp_path: Path) -> None:
    lock = threading.Lock()

    def waits_for(completions: list[str], **columns: Any) -> list[float]:
        with lock:
            return [0.0] * len(completions)

    with pytest.raises(UserError, match=r"waits_for cannot be carried.*lock.*inside of it"):
        trainer(tmp_path, reward_funcs=waits_for)
    assert not (tmp_path / "run").exists()


def test_rows_of_arrays_and_times(tmp_path: Path) -> None:
    rows = [
        {
            "prompt": "a",
            "array": np.arange(3),
            "number": np.float32(0.5),
            "day": datetime.date(2026, 1, 2),
            "moment": np.datetime64("2026-01-02T03:04:05"),
            "made": [{"at": datetime.datetime(2026, 1, 2, 3), "hour": datetime.time(3, 4)}],
            "lasts": datetime.timedelta(seconds=90),
            "price": decimal.Decimal("1.50"),
        }
    ]
    made = begun(tmp_path, train_dataset=rows)
    (prompt,) = load_prompts(made.config.data, 0)[0]
    assert prompt.columns == {
        "array": [0, 1, 2], "number": 0.5, "day": "2026-01-02", "moment": "2026-01-02T03:04:05",
        "made": [{"at": "2026-01-02T03:00:00", "hour": "03:04:00"}], "lasts": 90.0, "price": "1.50",
    }  # fmt: skip


@pytest.mark.parametrize(
    ("value", "part"),
    [
        ("\ud83d", "column 'x': holds half of a surrogate pair"),
        ({"\ud83d": 1}, r"column 'x': the key '\\ud83d' of a mapping: holds half"),
        ({1: "a"}, "column 'x': the key 1 of a mapping is no text"),
        (math.nan, "column 'x': holds nan"),
        (b"2", "column 'x': holds bytes"),
        ({1, "a"}, "column 'x': holds set"),
    ],
)
def test_a_row_that_cannot_be_written_is_named(value: Any, part: str, tmp_path: Path) -> None:
    rows = [{"prompt": "a", "x": None}, {"prompt": "b", "x": value}]
    with pytest.raises(UserError, match=f"^Trainer: train_dataset, row 1: {part}"):
        trainer(tmp_path, train_dataset=rows)


def test_of_a_stream_as_many_rows_are_taken_as_are_trained_on(tmp_path: Path) -> None:
    datasets = pytest.importorskip("datasets")

    def endless() -> Any:
        for number in itertools.count():
            yield {"prompt": f"p{number}"}

    stream = datasets.IterableDataset.from_generator(endless)
    sizes = {"max_steps": 3, "groups_per_batch": 4}
    made = begun(tmp_path, train_dataset=stream, config=sizes)
    assert len(load_prompts(made.config.data, 0)[0]) == 12


def test_several_eval_datasets_are_suites(tmp_path: Path) -> None:
    parts = {"easy": [{"prompt": "a"}, {"prompt": "b"}], "hard": [{"prompt": "c"}]}
    given = {"train_dataset": [{"prompt": "x"}], "config": {"eval_steps": 3}}
    made = begun(tmp_path, eval_dataset=parts, **given)
    assert made.config.data.eval_size == 0
    easy, hard = made.config.eval.suites
    assert (easy.name, easy.steps, hard.name) == ("easy", 3, "hard")
    source = made.config.data.model_copy(update={"source": easy.source})
    assert [prompt.prompt for prompt in load_prompts(source, 0)[0]] == ["a", "b"]
    named = begun(tmp_path / "c", eval_dataset={"math/easy": parts["easy"]}, **given)
    (suite,) = named.config.eval.suites
    assert suite.name == "math/easy"
    source = named.config.data.model_copy(update={"source": suite.source})
    assert [prompt.prompt for prompt in load_prompts(source, 0)[0]] == ["a", "b"]
    with pytest.raises(UserError, match="eval-none_dataset"):
        trainer(tmp_path / "b", eval_dataset={"none": []}, **given)


def test_a_dataset_of_the_hub_is_fetched(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    datasets = pytest.importorskip("datasets")
    asked: list[Any] = []

    def load_dataset(*given: Any, **named: Any) -> Any:
        asked.append((given, named))
        return datasets.Dataset.from_list([{"prompt": "a"}])

    monkeypatch.setattr(datasets, "load_dataset", load_dataset)
    made = begun(tmp_path, train_dataset="someone/prompts")
    assert asked == [(("someone/prompts",), {"split": "train"})]
    assert len(load_prompts(made.config.data, 0)[0]) == 1


@pytest.mark.parametrize(
    ("arguments", "part"),
    [
        ({"model": object()}, "model is a object"),
        ({"model": type("Model", (), {"save_pretrained": print})()}, "processing_class"),
        ({"reward_funcs": 3}, "the reward function is a int, not a function"),
        ({"train_dataset": ["a"]}, "train_dataset, row 0: is a str"),
        ({"train_dataset": []}, "train_dataset is empty"),
        ({"train_dataset": [{"prompt": "a"}], "eval_dataset": []}, "eval_dataset is empty"),
        ({"train_dataset": [{"prompt": object()}]}, "train_dataset, row 0: column"),
        ({"config": {"learning_rte": 1}}, "did you mean learner.learning_rate"),
    ],
)
def test_mistakes_are_one_clear_line(tmp_path: Path, arguments: dict[str, Any], part: str) -> None:
    with pytest.raises(UserError, match=part) as error:
        trainer(tmp_path, **arguments)
    assert "\n" not in str(error.value)
    assert not (tmp_path / "run").exists()


@pytest.mark.parametrize("tries", [1, 2])
def test_a_mistake_before_the_first_step_leaves_no_run_directory(
    tmp_path: Path, tries: int
) -> None:
    made = trainer(tmp_path, model="./nowhere", train_dataset=[{"prompt": "a"}])
    assert not made.run_dir.exists()
    for _ in range(tries):
        with pytest.raises(UserError, match=r"\./nowhere.*no such directory"):
            made.train()
        assert not made.run_dir.exists()


def test_each_of_several_trainers_with_one_directory_has_its_own_inputs(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As in TRL: made one after the other or twice, trained or not, and again in another script."""
    from rhymeflow.runtime import train as runs

    trained: list[str] = []

    def attempt(config: Any, *_: Any, **__: Any) -> Any:
        function = config.reward.functions[0]
        given = [judge_request(Judge(function)), Path(config.data.source).read_text()]
        trained.append(f"{given[0][0]} {json.loads(given[1])['prompt']}")
        if len(trained) == 1:
            raise UserError("a mistake that is found late")
        return SimpleNamespace(seconds=1.0)

    monkeypatch.setattr(runs, "attempt", attempt)
    monkeypatch.setattr(runs, "prepare", lambda config: None)

    def make(prompt: str, value: float) -> Trainer:
        return trainer(
            tmp_path,
            model="recipe:demo",
            train_dataset=[{"prompt": prompt}],
            reward_funcs=lambda completions, **columns: [value] * len(completions),
        )

    make("never trained", 0.0)
    first, second = make("first", 1.0), make("second", 2.0)
    with pytest.raises(UserError, match="found late"):
        first.train()
    assert not first.run_dir.exists()
    first.train()
    before = sorted((path, path.stat().st_mtime_ns) for path in first.run_dir.rglob("*"))
    for late in (second, make("in another script", 3.0)):
        with pytest.raises(UserError, match="run holds a run already; `rhymeflow resume"):
            late.train()
        assert late.checkpoint is None
    assert trained == ["1.0 first", "1.0 first"]
    after = sorted((path, path.stat().st_mtime_ns) for path in first.run_dir.rglob("*"))
    assert [each for each in after if each[0].name != "writer.lock"] == [
        each for each in before if each[0].name != "writer.lock"
    ]


def test_a_model_object_and_a_tokenizer_are_saved(tmp_path: Path) -> None:
    from transformers import LlamaConfig, LlamaForCausalLM

    tiny = LlamaConfig(
        hidden_size=8, intermediate_size=8, num_hidden_layers=1, num_attention_heads=1, vocab_size=9
    )

    class Tokenizer:
        def save_pretrained(self, folder: Path) -> None:
            Path(folder).mkdir(parents=True, exist_ok=True)
            (Path(folder) / "tokenizer.json").write_text("{}")

    made = begun(tmp_path, model=LlamaForCausalLM(tiny), processing_class=Tokenizer())
    folder = Path(made.config.model.name)
    assert folder == made.run_dir / "inputs" / "model"
    assert {"config.json", "model.safetensors", "tokenizer.json"} <= {
        p.name for p in folder.iterdir()
    }
    made = begun(tmp_path / "named", model="org/name", processing_class=Tokenizer())
    assert made.config.model.name == "org/name"
    assert Path(made.config.model.tokenizer or "") == made.run_dir / "inputs" / "tokenizer"
    assert (made.run_dir / "inputs" / "tokenizer" / "tokenizer.json").is_file()
