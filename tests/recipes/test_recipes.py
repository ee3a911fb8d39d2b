"""Every recipe is a valid configuration, and what it ships fits together."""

import importlib
import json

import pytest
import torch

from rhymeflow import cli, recipes
from rhymeflow.config import ModelConfig
from rhymeflow.config.load import list_recipes, read_config
from rhymeflow.core.strategies.schedules import SCHEDULES
from rhymeflow.data.load import load_prompts
from rhymeflow.models.load import load_model, stop_token_ids
from rhymeflow.models.tokenizer import load_tokenizer
from rhymeflow.recipes.demo import task as demo
from rhymeflow.sft.train import digest
from tests.characters import make_tokenizer
from tests.refused import refusal

SHIPPED = {"demo": 4, "guess": 2, "tools": 2}
"""Recipes with a checkpoint, and MB that it may have."""


@pytest.mark.parametrize("schedule", SCHEDULES)
@pytest.mark.parametrize("name", list_recipes())
def test_a_recipe_has_its_files_name_and_runs_under_every_schedule(name, schedule):
    assert read_config(name, {"schedule.name": schedule}).name == name


def test_a_recipe_without_files_is_named():
    said = refusal(recipes.directory, "demoo")
    assert said == "recipe:demoo: there is no such recipe with files; did you mean demo?"


@pytest.mark.parametrize("name", [*SHIPPED, "smollm2"])
def test_held_out_problems_are_not_trained_on(name):
    if name == "smollm2":
        pytest.importorskip("reasoning_gym")
    config = read_config(name)
    train, held_out = load_prompts(config.data, config.run.seed)
    assert (len(train), len(held_out)) == (config.data.size, config.data.eval_size)
    seen = {train[row].prompt for row in range(len(train))}
    assert not seen & {held_out[row].prompt for row in range(len(held_out))}


@pytest.mark.parametrize("name", SHIPPED)
def test_problems_are_distinct_and_depend_on_the_seed_alone(name):
    task = importlib.import_module(f"rhymeflow.recipes.{name}.task")
    problems = task.problems(2000, 5)
    prompts = {problem["prompt"] for problem in problems}
    assert len(prompts) == 2000
    assert task.problems(500, 5) == problems[:500]
    assert len(prompts & {problem["prompt"] for problem in task.problems(2000, 6)}) < 500
    rows = importlib.import_module(f"rhymeflow.recipes.{name}.warm_start").rows
    assert rows(20, 0) == rows(20, 0) != rows(20, 1)


def parts(name):
    """The model and the tokenizer of that name."""
    about = ModelConfig(name=name)
    model = load_model(about, dtype=torch.float32, device=torch.device("cpu"))
    return model, load_tokenizer(about)


def shapes(model):
    return {name: parameter.shape for name, parameter in model.named_parameters()}


@pytest.mark.parametrize("name", SHIPPED)
def test_the_shipped_checkpoint_is_the_recorded_one_and_small(name):
    directory = recipes.directory(name)
    task = importlib.import_module(f"rhymeflow.recipes.{name}.task")
    recorded, config = json.loads((directory / "warm_start.json").read_text()), read_config(name)
    assert recorded["sha256"] == digest(directory)
    made = config.run.seed, config.sft.max_steps
    if name == "demo":  # as made before there was `rhymeflow sft`
        made = 20_000, 1600
    assert (recorded["seed"], recorded["steps"]) == made
    sizes = [each.stat().st_size for each in directory.iterdir() if each.is_file()]
    assert sum(sizes) <= SHIPPED[name] * 1024**2
    model, tokenizer = parts(f"recipe:{name}")
    longest = model.config.max_position_embeddings
    prompts = [problem["prompt"] for problem in task.problems(4000, 0)]
    assert max(map(len, prompts)) + config.rollout.max_completion_length <= longest
    assert tokenizer.get_vocab() == make_tokenizer(task.ALPHABET, longest).get_vocab()
    assert stop_token_ids(model, tokenizer) == {tokenizer.eos_token_id}
    ids = tokenizer.encode(task.ALPHABET)
    assert len(ids) == len(task.ALPHABET), "a token a character"
    text = tokenizer.decode([*ids, tokenizer.eos_token_id], skip_special_tokens=True)
    assert text == task.ALPHABET


def test_the_command_makes_such_a_checkpoint(tmp_path):
    made = tmp_path / "made"
    options = {"max_steps": 2, "size": 40, "eval_size": 0, "tokens_per_batch": 400}
    arguments = [f"--sft.{name}={value}" for name, value in options.items()]
    assert cli.main(["sft", "demo", "--sft.output_dir", str(made), *arguments]) == 0
    assert shapes(parts(str(made))[0]) == shapes(parts("recipe:demo")[0])
    shipped = {each.name for each in recipes.directory("demo").iterdir()}
    assert {each.name for each in made.iterdir()} <= shipped


def test_the_teacher_of_distill_is_the_recorded_one_and_learnt_right_solutions():
    directory, config = recipes.directory("distill"), read_config("distill")
    recorded = json.loads((directory / "warm_start.json").read_text())
    assert recorded["sha256"] == digest(directory)
    assert (recorded["seed"], recorded["steps"]) == (config.run.seed, config.sft.max_steps)
    assert sum(each.stat().st_size for each in directory.iterdir() if each.is_file()) < 2 * 1024**2
    rows = importlib.import_module("rhymeflow.recipes.distill.warm_start").rows(50, 0)
    prompts, completions = ([row[name] for row in rows] for name in ("prompt", "completion"))
    sums = [str(sum(demo.read_prompt(prompt))) for prompt in prompts]
    assert demo.reward(prompts, completions, sums) == [1.0] * 50
