"""Problems that are made: reasoning-gym, recipes, and what is held out."""

import ast
import subprocess
import sys
from types import ModuleType
from typing import Any

import pytest

from rhymeflow.config import DataConfig
from rhymeflow.data.generators import exact_entry, reasoning_gym
from rhymeflow.data.load import check_sources, load_prompts
from rhymeflow.data.prompts import Prompt
from tests.refused import refusal

factory = reasoning_gym("this test").factory
NO_PYCOSAT = not hasattr(sys.modules["pycosat"], "__file__")
NOT_HERE = {"composite"} | ({"zebra_puzzles"} if NO_PYCOSAT else set())


GYM = "reasoning_gym:chain_sum"


def load(source: str, seed: int = 0, **fields: Any) -> tuple[list[Prompt], list[Prompt]]:
    return load_prompts(DataConfig(source=source, **fields), seed)


def texts(prompts: list[Prompt]) -> list[Any]:
    return [prompt.prompt for prompt in prompts]


def refused(source: str, **fields: Any) -> str:
    return refusal(load, source, **fields)


def test_reasoning_gym_items():
    train, held_out = load(GYM, size=20, eval_size=10, options={"min_terms": 2, "max_terms": 3})
    assert (len(train), len(held_out)) == (20, 10)
    assert [prompt.row for prompt in train] == list(range(20))
    entry = ast.literal_eval(train[3].columns["entry"])
    assert entry["question"] == train[3].prompt
    assert entry["answer"] == train[3].columns["answer"]
    assert entry["metadata"]["difficulty"]["num_terms"] == (2, 3)  # a tuple still
    assert train[3].columns["data_source"] == GYM
    train, held_out = load(
        "reasoning_gym:gcd", size=3, eval_source="reasoning_gym:lcm", eval_size=4
    )
    assert (len(train), len(held_out)) == (3, 4)
    assert "GCD" in texts(train)[0]
    assert "LCM" in texts(held_out)[0]


def test_a_seed_makes_the_same_problems_and_another_others():
    same = [load(GYM, 7, size=8, eval_size=4) for _ in range(2)]
    assert same[0] == same[1]
    assert not set(texts(same[0][0])) & set(texts(load(GYM, 8, size=8, eval_size=4)[0]))
    # An explicit seed is reasoning-gym's own.
    explicit = load(GYM, 0, size=3, eval_size=0, options={"seed": 42})[0]
    assert explicit[2].prompt == factory.create_dataset("chain_sum", seed=42, size=3)[2]["question"]


def test_held_out_problems_are_distinct_even_where_few_exist():
    """One-digit sums of two terms: 200 problems or so, drawn again and again."""
    few = {"min_terms": 2, "max_terms": 2, "min_digits": 1, "max_digits": 1}
    train, held_out = load(GYM, size=100, eval_size=20, options=few)
    assert len(set(texts(train))) < 100  # so there was something to avoid
    assert not set(texts(train)) & set(texts(held_out))
    assert len(set(texts(held_out))) == 20
    message = refused(GYM, size=400, eval_size=300, options=few)
    assert "problems besides the 400 to train on, and 300 are to be held" in message


@pytest.mark.parametrize(
    ("source", "fields", "said"),
    [
        ("reasoning_gym:chain_sums", {}, "did you mean chain_sum?"),
        (GYM, {"options": {"min_term": 1}}, "no option 'min_term'; did you mean min_terms?"),
        (GYM, {"options": {"size": 1}}, "has no option 'size'"),
        (GYM, {"options": {"min_terms": 0}}, "refuses {'min_terms': 0}"),
        (GYM, {"size": None}, "say how many"),
        ("reasoning_gym:composite", {}, "composite needs `datasets`"),
        ("recipe:no_such", {}, "the recipe 'no_such' has no task"),
        ("recipe:../x", {}, "'../x' is no name of a recipe"),
        ("recipe:demo", {"options": {"foo": 1}}, "recipe:demo: takes no option 'foo'; there are:"),
    ],
)
def test_mistakes_are_named(source, fields, said):
    assert said in refused(source, **{"size": 1, **fields})


def test_more_problems_than_can_be_made_are_refused_at_once():
    for fields in ({"size": 99_999_999}, {"size": 1, "eval_size": 99_999_999}):
        assert "so at most 1,000,000" in refused("recipe:demo", **fields)
        data = DataConfig(source="recipe:demo", **fields)
        assert "99,999,999" in refusal(check_sources, data)


def test_composite_mixes_datasets():
    parts = [{"name": "chain_sum"}, {"name": "gcd", "weight": 2}]
    train, _ = load("reasoning_gym:composite", size=20, eval_size=2, options={"datasets": parts})
    made_by = {ast.literal_eval(p.columns["entry"])["metadata"]["source_dataset"] for p in train}
    assert made_by == {"chain_sum", "gcd"}


@pytest.mark.parametrize("name", sorted(factory.DATASETS.keys() - NOT_HERE))
def test_every_dataset_keeps_its_score_through_the_entry_column(name):
    """Tuples matter: through JSON some scorers give the right answer 0.05."""
    dataset = factory.create_dataset(name, seed=3, size=2)
    item = dataset[0]
    text = exact_entry(item)
    assert text is not None
    entry = ast.literal_eval(text)
    assert entry == item
    assert dataset.score_answer(item["answer"], entry) == dataset.score_answer(item["answer"], item)


def test_a_recipe_of_one_file(monkeypatch):
    def problems(count: int, seed: int, *, modulus: int = 1000) -> list[dict[str, Any]]:
        return [{"prompt": f"{(seed + n) % modulus}?", "level": (n,)} for n in range(count)]

    module = ModuleType("rhymeflow.recipes.toy")
    module.problems = problems  # type: ignore[attr-defined]
    monkeypatch.setitem(sys.modules, module.__name__, module)
    train, held_out = load("recipe:toy", 5, size=30, eval_size=30, options={"modulus": 70})
    assert texts(train) == [f"{n}?" for n in range(5, 35)]
    assert train[3].columns == {"level": [3]}
    assert not set(texts(train)) & set(texts(held_out))
    assert len(set(texts(held_out))) == 30
    more = {"size": 40, "eval_size": 31, "options": {"modulus": 70}}
    assert "makes only 30 problems" in refused("recipe:toy", **more)


def test_reasoning_gym_needs_neither_a_compiler_nor_torch():
    """Without pycosat, which is compiled when it is installed, one dataset is refused."""
    code = """
import importlib.util, sys
find = importlib.util.find_spec
importlib.util.find_spec = lambda name, *rest: None if name == "pycosat" else find(name, *rest)
from rhymeflow.config import DataConfig
from rhymeflow.data.load import load_prompts
from rhymeflow.errors import UserError
print(len(load_prompts(DataConfig(source="reasoning_gym:chain_sum", size=2, eval_size=1), 0)[0]))
try:
    load_prompts(DataConfig(source="reasoning_gym:zebra_puzzles", size=2, eval_size=0), 0)
except UserError as error:
    print(error)
import rhymeflow.reward.calls
assert not {"torch", "transformers"} & set(sys.modules)
"""
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    count, refusal = done.stdout.splitlines()
    assert count == "2"
    assert refusal.endswith("pip install pycosat")
