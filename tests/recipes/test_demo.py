"""The demo: its task is what it says, its checkpoint is the recorded one and is small."""

import random
import re

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from transformers import LlamaForCausalLM

from rhymeflow import cli, recipes
from rhymeflow.config import ModelConfig
from rhymeflow.config.load import read_config
from rhymeflow.models.load import load_config, load_model, load_tokenizer, stop_token_ids
from rhymeflow.recipes import characters
from rhymeflow.recipes.demo import task, warm_start

DEMO = ModelConfig(name="recipe:demo")
DIRECTORY = recipes.directory("demo")
some_digits = st.lists(st.integers(0, 9), min_size=2, max_size=42)


def judge(digits, completion):
    (reward,) = task.reward([task.write_prompt(digits)], [completion], answer=[str(sum(digits))])
    return reward


def test_the_example_of_the_docstring():
    assert task.write_prompt([3, 9, 4]) == "a3 b9 c4?"
    assert task.solution([3, 9, 4]) == "a3+0=3 b9+3=12 c4+12=16 =16"
    assert task.write_prompt([3, 9, 4]) in task.__doc__
    assert task.solution([3, 9, 4]) in task.__doc__


@given(some_digits)
def test_the_reference_solution_is_right_and_its_arithmetic_too(digits):
    assert task.read_prompt(task.write_prompt(digits)) == digits
    steps = re.findall(r"(\w)(\d)\+(\d+)=(\d+)", task.solution(digits))
    assert [int(digit) for _, digit, _, _ in steps] == digits
    assert all(int(digit) + int(total) == int(after) for _, digit, total, after in steps)
    assert judge(digits, task.solution(digits)) == 1.0


@given(some_digits, st.data())
def test_a_corrupted_or_unfinished_answer_is_wrong(digits, data):
    solution = task.solution(digits)
    start = solution.rindex("=") + 1
    at = data.draw(st.integers(start, len(solution) - 1))
    symbol = data.draw(st.sampled_from(sorted(set(task.ALPHABET) - {solution[at]})))
    unfinished = solution[: solution.rindex(" =")]
    corrupted = solution[:at] + symbol + solution[at + 1 :]
    for each in (corrupted, "", unfinished, unfinished + " =", solution + " ", solution + "?"):
        assert judge(digits, each) == 0.0


@given(some_digits, st.integers(0, 1000))
def test_a_forgotten_carry_costs_ten(digits, seed):
    noise = random.Random(seed)
    forgotten = []

    def forgets():
        forgotten.append(noise.random() < 0.5)
        return forgotten[-1]

    careless = task.solution(digits, forgets)
    assert int(careless.rpartition("=")[2]) == sum(digits) - 10 * sum(forgotten)
    assert judge(digits, careless) == float(not any(forgotten))


def test_problems_are_distinct_and_depend_on_the_seed_alone():
    problems = task.problems(2000, 5)
    prompts = [problem["prompt"] for problem in problems]
    assert len(set(prompts)) == 2000
    assert task.problems(2000, 5) == problems
    assert task.problems(500, 5) == problems[:500]
    assert len(set(prompts) & {problem["prompt"] for problem in task.problems(2000, 6)}) < 500


def test_lengths_have_a_long_tail_within_the_recipes_limits():
    config = read_config("demo")
    problems = task.problems(4000, 0)
    solutions = [task.solution(task.read_prompt(problem["prompt"])) for problem in problems]
    lengths = sorted(len(solution) + 1 for solution in solutions)  # a token a character, and <eos>
    assert lengths[0] < 20
    assert lengths[2000] < 60
    assert lengths[-40] > 300  # the longest hundredth is more than five times the median
    longest = len(task.solution([9] * 42)) + 1
    assert lengths[-1] <= longest <= config.rollout.max_completion_length
    model_limit = load_config(DEMO).max_position_embeddings
    assert len(task.write_prompt([9] * 42)) + config.rollout.max_completion_length <= model_limit


@pytest.mark.parametrize(
    ("options", "said"),
    [
        *(({name: n}, "need 1 <= min_terms") for name, n in
          (("min_terms", 0), ("max_terms", 43), ("median_terms", 2.0), ("min_terms", 9))),
        ({"min_terms": 1, "median_terms": 1.5, "max_terms": 2}, "distinct"),
    ],
)  # fmt: skip
def test_impossible_options_are_refused(options, said):
    with pytest.raises(ValueError, match=said):
        task.problems(60, 0, **options)


def test_the_tokenizer_is_one_token_a_character():
    tokenizer = load_tokenizer(DEMO)
    text = task.write_prompt([3, 9, 4]) + task.solution([3, 9, 4])
    ids = tokenizer.encode(text)
    assert tokenizer.decode([*ids, tokenizer.eos_token_id], skip_special_tokens=True) == text
    assert tokenizer.get_vocab() == characters.make_tokenizer(task.ALPHABET, 768).get_vocab()


def test_the_shipped_checkpoint_has_the_scripts_architecture():
    model = load_model(DEMO, dtype=torch.float32, device=torch.device("cpu"))
    tokenizer = load_tokenizer(DEMO)
    tokenizer_made = characters.make_tokenizer(task.ALPHABET, warm_start.MAX_LENGTH)
    made = LlamaForCausalLM(characters.make_config(tokenizer_made, warm_start.MAX_LENGTH))
    shapes = {name: parameter.shape for name, parameter in made.named_parameters()}
    assert {name: parameter.shape for name, parameter in model.named_parameters()} == shapes
    assert stop_token_ids(model, tokenizer) == {tokenizer.eos_token_id}


def test_rows_are_the_careless_teachers_and_mostly_of_common_lengths():
    rows = warm_start.rows(3000, 0)
    assert warm_start.rows(3000, 0) == rows
    right, tokens, lengths = 0.0, 0, []
    for row in rows:
        digits = task.read_prompt(row["prompt"])
        assert len(digits) == row["completion"].count("+")
        right += judge(digits, row["completion"])
        lengths.append(len(digits))
        tokens += len(row["prompt"]) + len(row["completion"])
    assert set(range(2, 43)) <= set(lengths)
    assert 0.3 < right / len(rows) < 0.5
    long = sum(14 * length for length in lengths if length > 15)
    assert 0.15 < long / tokens < 0.4


def test_the_command_makes_such_a_checkpoint(tmp_path):
    made = tmp_path / "made"
    options = {"max_steps": 2, "size": 40, "eval_size": 0, "tokens_per_batch": 400}
    arguments = [f"--sft.{name}={value}" for name, value in options.items()]
    assert cli.main(["sft", "demo", "--sft.output_dir", str(made), *arguments]) == 0
    model, shipped = (
        load_model(ModelConfig(name=name), dtype=torch.float32, device=torch.device("cpu"))
        for name in (str(made), "recipe:demo")
    )
    shapes = {name: parameter.shape for name, parameter in shipped.named_parameters()}
    assert {name: parameter.shape for name, parameter in model.named_parameters()} == shapes
    assert {p.name for p in made.iterdir()} <= {p.name for p in DIRECTORY.iterdir()}
