"""`Trainer`: Python objects become files and names that other processes can load."""

import asyncio
import datetime
import decimal
import functools
import importlib
import itertools
import json
import math
import re
import threading
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest

from rhymeflow import Trainer, UserError
from rhymeflow.config import Config, RewardFunction
from rhymeflow.config.fields import check_unread
from rhymeflow.config.load import read_config
from rhymeflow.data.load import load_prompts
from rhymeflow.reward.functions import Judge
from rhymeflow.trainer.inputs import Inputs
from rhymeflow.trainer.inputs import reward_function as named_function
from tests.refused import refusal
from tests.reward import judged


def longest(prompts: list[str], completions: list[str], **columns: Any) -> list[float]:
    return [float(len(completion)) for completion in completions]


def judge_request(spec: str, **columns: Any) -> list[float | None]:
    return judged(Judge(RewardFunction(function=spec)), ["a", "abc"], columns)


def trainer(tmp_path: Path, **arguments: Any) -> Trainer:
    config = {"output_dir": str(tmp_path / "run"), **arguments.pop("config", {})}
    return Trainer(config=config, **arguments)


def prompts_of(made: Trainer, **data: Any) -> list[Any]:
    """The training prompts of a trainer, once it has written down what it was given."""
    made._inputs.write()
    config = made.config.data.model_copy(update=data)
    return [each.prompt for each in load_prompts(config, 0)[0]]  # type: ignore[attr-defined]


def test_datasets_are_written_down_and_names_pass_through(tmp_path):
    rows = [{"prompt": "ä?", "answer": 1}, {"prompt": [{"role": "user", "content": "b"}]}]
    made = trainer(tmp_path, train_dataset=rows, eval_dataset=(row for row in rows[:1]))
    assert prompts_of(made) == [row["prompt"] for row in rows]
    source, eval_source = made.config.data.source, str(made.config.data.eval_source)
    assert {Path(each).parent for each in (source, eval_source)} == {made.run_dir / "inputs"}
    assert [json.loads(line) for line in Path(source).read_text("utf-8").splitlines()] == rows
    assert prompts_of(made, source=eval_source, eval_source=None, eval_size=0) == ["ä?"]
    made = trainer(tmp_path / "b", model="org/name", train_dataset=tmp_path / "a.jsonl")
    assert made.config.model.name == "org/name"
    assert made.config.data.source == str(tmp_path / "a.jsonl")
    assert not made.run_dir.exists()


def test_datasets_of_the_library_those_that_stream_and_those_of_the_hub(tmp_path, monkeypatch):
    import datasets

    given, asked = datasets.Dataset.from_list([{"prompt": "a", "answer": 1}]), list[Any]()
    made = trainer(tmp_path / "a", train_dataset=given)
    assert prompts_of(made) == ["a"]
    assert made.config.data.eval_size == 0

    def load_dataset(*given_: Any, **named: Any) -> Any:
        asked.append((given_, named))
        return given

    monkeypatch.setattr(datasets, "load_dataset", load_dataset)
    assert prompts_of(trainer(tmp_path / "b", train_dataset="someone/prompts")) == ["a"]
    assert asked == [(("someone/prompts",), {"split": "train"})]

    def endless() -> Any:
        for number in itertools.count():
            yield {"prompt": f"p{number}"}

    stream = datasets.IterableDataset.from_generator(endless)
    sizes = {"max_steps": 3, "groups_per_batch": 4}
    made = trainer(tmp_path / "c", train_dataset=stream, config=sizes)
    assert len(prompts_of(made)) == 12, "as many as are trained on"


def test_functions_are_named_so_that_others_can_import_them(tmp_path, monkeypatch):
    (tmp_path / "judges.py").write_text("def short(completions, **columns): ...")
    monkeypatch.syspath_prepend(tmp_path)
    short = importlib.import_module("judges").short

    def reward_function(given: Any) -> RewardFunction:
        return named_function(given, Inputs(Path("run")))

    assert reward_function(short).function == f"{tmp_path / 'judges.py'}:short"
    assert reward_function(json.dumps).function == "json.dumps"
    assert reward_function(functools.partial(longest, scale=2)).options == {"scale": 2}
    assert reward_function("exact_match") == RewardFunction(function="exact_match")


def test_several_functions_keep_their_weights(tmp_path):
    weighted = RewardFunction(function="regex", weight=0.5, options={"pattern": "x"})
    made = trainer(tmp_path, reward_funcs=[longest, weighted])
    assert [each.weight for each in made.config.reward.functions] == [1.0, 0.5]
    assert made.config.reward.functions[1] == weighted
    made = trainer(tmp_path, reward_funcs=[longest, longest], reward_weights=[0.5, 2])
    assert [each.weight for each in made.config.reward.functions] == [0.5, 2.0]


class Judged:
    """Counts what it is asked, which stays in its process."""

    def __init__(self, factor: float) -> None:
        self.factor, self.calls = factor, 0

    def __call__(self, completions: list[str], **columns: Any) -> list[float]:
        self.calls += 1
        return [self.factor * len(each) for each in completions]

    def plus_one(self, completions: list[str], **columns: Any) -> list[float]:
        return [self.factor * len(each) + 1 for each in completions]


def test_what_no_module_has_goes_by_value(tmp_path):
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
    assert [judge_request(each, answer=7) for each in specs] == [
        [2.0, 6.0], [0.25, 0.25], [3.0, 9.0], [2.0, 4.0], [7.0, 7.0],
        [0.5, 0.5], [0.25, 0.25],
    ]  # fmt: skip


def test_rows_of_arrays_and_times(tmp_path):
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
    made = trainer(tmp_path, train_dataset=rows)
    made._inputs.write()
    (prompt,) = load_prompts(made.config.data, 0)[0]
    assert prompt.columns == {
        "array": [0, 1, 2], "number": 0.5, "day": "2026-01-02", "moment": "2026-01-02T03:04:05",
        "made": [{"at": "2026-01-02T03:00:00", "hour": "03:04:00"}], "lasts": 90.0, "price": "1.50",
    }  # fmt: skip


def test_several_eval_datasets_are_suites(tmp_path):
    parts = {"math/easy": [{"prompt": "a"}, {"prompt": "b"}], "hard": [{"prompt": "c"}]}
    given = {"train_dataset": [{"prompt": "x"}], "config": {"eval_steps": 3}}
    made = trainer(tmp_path, eval_dataset=parts, **given)
    assert made.config.data.eval_size == 0
    easy, hard = made.config.eval.suites
    assert (easy.name, easy.steps, hard.name) == ("math/easy", 3, "hard")
    assert prompts_of(made, source=easy.source) == ["a", "b"]


LOCK = threading.Lock()


def waits_for_it() -> Any:
    lock = LOCK  # of this process only
    return lambda completions, **columns: lock


def with_x(value: Any) -> dict[str, Any]:
    return {"train_dataset": [{"prompt": "a", "x": None}, {"prompt": "b", "x": value}]}


@pytest.mark.parametrize(
    ("arguments", "part"),
    [
        ({"model": object()}, "model is a object"),
        ({"model": type("Model", (), {"save_pretrained": print})()}, "processing_class"),
        ({"reward_funcs": 3}, "the reward function is a int, not a function"),
        ({"reward_funcs": waits_for_it()}, "lambda cannot be carried.*lock.*inside of it"),
        ({"reward_funcs": longest, "reward_weights": [1, 2]}, "2 reward_weights .* 1 reward_funcs"),
        ({"reward_funcs": RewardFunction(function="reward_model", options={"model": "org/judge"}),
          "reward_processing_classes": object()}, "model 'org/judge' has a tokenizer of its own"),
        ({"train_dataset": ["a"]}, "train_dataset, row 0: is a str"),
        ({"train_dataset": []}, "train_dataset is empty"),
        ({"train_dataset": [{"prompt": "a"}], "eval_dataset": []}, "eval_dataset is empty"),
        ({"eval_dataset": {"none": []}}, "eval-none_dataset is empty"),
        ({"train_dataset": [{"prompt": object()}]}, "train_dataset, row 0: column"),
        ({"config": {"max_turns": 3}}, "Trainer: environment.max_turns: has no effect without"),
        ({"config": {"sft.max_steps": 3}}, "Trainer: sft.max_steps: has no effect in a run"),
        ({"config": {"learning_rte": 1}}, "did you mean learner.learning_rate"),
        ({"config": 3}, "config is a int; give a rhymeflow.Config or a mapping"),
        (with_x("\ud83d"), "train_dataset, row 1: column 'x': holds half of a surrogate pair"),
        (with_x({"\ud83d": 1}), r"column 'x': the key '\\ud83d' of a mapping: holds half"),
        (with_x({1: "a"}), "row 1: column 'x': the key 1 of a mapping is no text"),
        (with_x(math.nan), "row 1: column 'x': holds nan"),
        (with_x(b"2"), "row 1: column 'x': holds bytes"),
        (with_x({1, "a"}), "row 1: column 'x': holds set"),
    ],
)  # fmt: skip
def test_mistakes_are_one_clear_line(tmp_path, arguments, part):
    if arguments.get("config") != 3:
        arguments["config"] = {"output_dir": str(tmp_path / "run"), **arguments.get("config", {})}
    assert re.search(part, refusal(Trainer, **arguments))
    assert not (tmp_path / "run").exists()


def test_what_a_recipe_has_for_sft_stays_when_the_run_moves(tmp_path):
    made = Trainer(config=read_config("demo"))
    made._move(tmp_path / "run")
    check_unread(made.config, "Trainer")
    assert made.config.sft == read_config("demo").sft != Config().sft


def test_each_of_several_trainers_with_one_directory_has_its_own_inputs(tmp_path, monkeypatch):
    """As in TRL: made one after the other or twice, trained or not, and again in another script."""
    from rhymeflow.runtime import train as runs

    trained: list[str] = []

    def attempt(config: Any, *_: Any, **__: Any) -> Any:
        function = config.reward.functions[0]
        prompt = json.loads(Path(config.data.source).read_text())["prompt"]
        trained.append(f"{judge_request(function.function)[0]} {prompt}")
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
    assert "found late" in refusal(first.train)
    assert not first.run_dir.exists()
    first.train()

    def there() -> list[Any]:
        files = sorted((path, path.stat().st_mtime_ns) for path in first.run_dir.rglob("*"))
        return [each for each in files if each[0].name != "writer.lock"]

    before = there()
    for late in (second, make("in another script", 3.0)):
        assert "run holds a run already; `rhymeflow resume" in refusal(late.train)
        assert late.checkpoint is None
    assert trained == ["1.0 first", "1.0 first"]
    assert there() == before


def test_a_model_object_and_a_tokenizer_are_saved(tmp_path):
    from transformers import LlamaConfig, LlamaForCausalLM

    tiny = LlamaConfig(
        hidden_size=8, intermediate_size=8, num_hidden_layers=1, num_attention_heads=1, vocab_size=9
    )

    class Tokenizer:
        def save_pretrained(self, folder: Path) -> None:
            Path(folder).mkdir(parents=True, exist_ok=True)
            (Path(folder) / "tokenizer.json").write_text("{}")

    made = trainer(tmp_path, model=LlamaForCausalLM(tiny), processing_class=Tokenizer())
    made._inputs.write()
    folder = Path(made.config.model.name)
    assert folder == made.run_dir / "inputs" / "model"
    names = {each.name for each in folder.iterdir()}
    assert {"config.json", "model.safetensors", "tokenizer.json"} <= names
    made = trainer(tmp_path / "named", model="org/name", processing_class=Tokenizer())
    made._inputs.write()
    assert made.config.model.name == "org/name"
    assert Path(made.config.model.tokenizer or "") == made.run_dir / "inputs" / "tokenizer"
    assert (made.run_dir / "inputs" / "tokenizer" / "tokenizer.json").is_file()
