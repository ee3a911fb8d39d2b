"""Problems that are made: reasoning-gym, recipes, and what is held out."""

from __future__ import annotations

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
from rhymeflow.errors import UserError

factory = reasoning_gym("this test").factory
NO_PYCOSAT = not hasattr(sys.modules["pycosat"], "__file__")
NOT_HERE = {"composite"} | ({"zebra_puzzles"} if NO_PYCOSAT else set())


def load(source: str, seed: int = 0, **fields: Any) -> tuple[list[Prompt], list[Prompt]]:
    train, held_out = load_prompts(DataConfig(source=source, **fields), seed)
    return [train[n] for n in range(len(train))], [held_out[n] for n in range(len(held_out))]


def texts(prompts: list[Prompt]) -> list[Any]:
    return [prompt.prompt for prompt in prompts]


def refused(source: str, **fields: Any) -> str:
    with pytest.raises(UserError) as error:
        load(source, **fields)
    return str(error.value)


def test_reasoning_gym_items() -> None:
    options = {"min_terms": 2, "max_terms": 3}
    train, held_out = load("reasoning_gym:chain_sum", size=20, eval_size=10, options=options)
    assert (len(train), len(held_out)) == (20, 10)
    assert [prompt.row for prompt in train] == list(range(20))
    entry = ast.literal_eval(train[3].columns["entry"])
    assert entry["question"] == train[3].prompt
    assert entry["answer"] == train[3].columns["answer"]
    assert entry["metadata"]["difficulty"]["num_terms"] == (2, 3)  # a tuple still
    assert train[3].columns["data_source"] == "reasoning_gym:chain_sum"


def test_a_seed_makes_the_same_problems_and_another_others() -> None:
    same = [load("reasoning_gym:chain_sum", 7, size=8, eval_size=4) for _ in range(2)]
    other = load("reasoning_gym:chain_sum", 8, size=8, eval_size=4)
    assert same[0] == same[1]
    assert not set(texts(same[0][0])) & set(texts(other[0]))
    # An explicit seed is reasoning-gym's own.
    explicit = load("reasoning_gym:chain_sum", 0, size=3, eval_size=0, options={"seed": 42})[0]
    assert explicit[2].prompt == factory.create_dataset("chain_sum", seed=42, size=3)[2]["question"]


def test_held_out_problems_are_distinct_even_where_few_exist() -> None:
    """One-digit sums of two terms: 200 problems or so, drawn again and again."""
    few = {"min_terms": 2, "max_terms": 2, "min_digits": 1, "max_digits": 1}
    train, held_out = load("reasoning_gym:chain_sum", size=100, eval_size=20, options=few)
    assert len(set(texts(train))) < 100  # so there was something to avoid
    assert not set(texts(train)) & set(texts(held_out))
    assert len(set(texts(held_out))) == 20
    message = refused("reasoning_gym:chain_sum", size=400, eval_size=300, options=few)
    assert "problems besides the 400 to train on, and 300 are to be held" in message


def test_mistakes_are_named() -> None:
    gym = "reasoning_gym:chain_sum"
    assert "did you mean chain_sum?" in refused("reasoning_gym:chain_sums", size=1)
    assert "has no option 'min_term'; did you mean min_terms?" in refused(
        gym, size=1, options={"min_term": 1}
    )
    assert "has no option 'size'" in refused(gym, size=1, options={"size": 1})
    assert "refuses {'min_terms': 0}" in refused(gym, size=1, options={"min_terms": 0})
    assert "say how many" in refused(gym)
    assert "composite needs `datasets`" in refused("reasoning_gym:composite", size=1)
    assert "the recipe 'no_such' has no task" in refused("recipe:no_such", size=1)
    assert "'../x' is no name of a recipe" in refused("recipe:../x", size=1)


def test_more_problems_than_can_be_made_are_refused_at_once() -> None:
    for fields in ({"size": 99_999_999}, {"size": 1, "eval_size": 99_999_999}):
        assert "so at most 1,000,000" in refused("recipe:demo", **fields)
        with pytest.raises(UserError, match="99,999,999"):
            check_sources(DataConfig(source="recipe:demo", **fields))


def test_composite_mixes_datasets() -> None:
    parts = [{"name": "chain_sum"}, {"name": "gcd", "weight": 2}]
    train, _ = load("reasoning_gym:composite", size=20, eval_size=2, options={"datasets": parts})
    made_by = {ast.literal_eval(p.columns["entry"])["metadata"]["source_dataset"] for p in train}
    assert made_by == {"chain_sum", "gcd"}


@pytest.mark.parametrize("name", sorted(factory.DATASETS.keys() - NOT_HERE))
def test_every_dataset_keeps_its_score_through_the_entry_column(name: str) -> None:
    """Tuples matter: through JSON some scorers give the right answer 0.05."""
    dataset = factory.create_dataset(name, seed=3, size=2)
    item = dataset[0]
    text = exact_entry(item)
    assert text is not None
    entry = ast.literal_eval(text)
    assert entry == item
    assert dataset.score_answer(item["answer"], entry) == dataset.score_answer(item["answer"], item)


@pytest.fixture
def recipe(monkeypatch: pytest.MonkeyPatch) -> ModuleType:
    module = ModuleType("rhymeflow.recipes.toy")
    monkeypatch.setitem(sys.modules, module.__name__, module)

    def problems(count: int, seed: int, *, modulus: int = 1000) -> list[dict[str, Any]]:
        return [{"prompt": f"{(seed + n) % modulus}?", "level": (n,)} for n in range(count)]

    module.problems = problems  # type: ignore[attr-defined]
    return module


@pytest.mark.usefixtures("recipe")
def test_a_recipe_of_one_file() -> None:
    train, held_out = load("recipe:toy", 5, size=30, eval_size=30, options={"modulus": 70})
    assert texts(train) == [f"{n}?" for n in range(5, 35)]
    assert train[3].columns == {"level": [3]}
    assert not set(texts(train)) & set(texts(held_out))
    assert len(set(texts(held_out))) == 30
    assert "makes only 30 problems" in refused(
        "recipe:toy", size=40, eval_size=31, options={"modulus": 70}
    )
    assert "recipe:toy: takes no option 'mod'; did you mean modulus?" in refused(
        "recipe:toy", size=1, options={"mod": 1}
    )


def test_held_out_problems_of_another_generator() -> None:
    train, held_out = load(
        "reasoning_gym:gcd", size=3, eval_source="reasoning_gym:lcm", eval_size=4
    )
    assert (len(train), len(held_out)) == (3, 4)
    assert "GCD" in texts(train)[0]
    assert "LCM" in texts(held_out)[0]


def test_no_torch_is_imported() -> None:
    code = (
        "import sys; from rhymeflow.config import DataConfig;"
        "from rhymeflow.data.load import load_prompts;"
        "load_prompts(DataConfig(source='reasoning_gym:chain_sum', size=2, eval_size=1), 0);"
        "import rhymeflow.reward.calls;"
        "assert not {'torch', 'transformers'} & set(sys.modules)"
    )
    subprocess.run([sys.executable, "-c", code], check=True)


def test_reasoning_gym_needs_no_compiler() -> None:
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
"""
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    count, refusal = done.stdout.splitlines()
    assert count == "2"
    assert refusal.endswith("pip install pycosat")
