"""The demo's task: its solutions are right, its lengths have a tail, its teacher is careless."""

import random
import re

import pytest
from hypothesis import given
from hypothesis import strategies as st

from rhymeflow.config.load import read_config
from rhymeflow.recipes.demo import task, warm_start

some_digits = st.lists(st.integers(0, 9), min_size=2, max_size=42)


def judge(digits, completion):
    (reward,) = task.reward([task.write_prompt(digits)], [completion], answer=[str(sum(digits))])
    return reward


def test_the_example_of_the_docstring():
    assert task.write_prompt([3, 9, 4]) in task.__doc__
    assert task.solution([3, 9, 4]) in task.__doc__


@given(some_digits, st.integers(0, 1000))
def test_a_solution_is_right_and_each_forgotten_carry_costs_ten(digits, seed):
    assert task.read_prompt(task.write_prompt(digits)) == digits
    steps = re.findall(r"(\w)(\d)\+(\d+)=(\d+)", task.solution(digits))
    assert [int(digit) for _, digit, _, _ in steps] == digits
    assert all(int(digit) + int(total) == int(after) for _, digit, total, after in steps)
    assert judge(digits, task.solution(digits)) == 1.0
    noise, forgotten = random.Random(seed), []

    def forgets():
        forgotten.append(noise.random() < 0.5)
        return forgotten[-1]

    careless = task.solution(digits, forgets)
    assert int(careless.rpartition("=")[2]) == sum(digits) - 10 * sum(forgotten)
    assert judge(digits, careless) == float(not any(forgotten))


@given(some_digits, st.data())
def test_a_corrupted_or_unfinished_answer_is_wrong(digits, data):
    solution = task.solution(digits)
    at = data.draw(st.integers(solution.rindex("=") + 1, len(solution) - 1))
    symbol = data.draw(st.sampled_from(sorted(set(task.ALPHABET) - {solution[at]})))
    unfinished = solution[: solution.rindex(" =")]
    corrupted = solution[:at] + symbol + solution[at + 1 :]
    for each in (corrupted, "", unfinished, unfinished + " =", solution + " ", solution + "?"):
        assert judge(digits, each) == 0.0


def test_lengths_have_a_long_tail_within_the_recipes_limits():
    most = read_config("demo").rollout.max_completion_length
    problems = task.problems(4000, 0)
    solutions = [task.solution(task.read_prompt(problem["prompt"])) for problem in problems]
    lengths = sorted(len(solution) + 1 for solution in solutions)  # a token a character, and <eos>
    assert lengths[0] < 20
    assert lengths[2000] < 60
    assert lengths[-40] > 300  # the longest hundredth is more than five times the median
    assert lengths[-1] <= len(task.solution([9] * 42)) + 1 <= most


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


def test_rows_are_the_careless_teachers_and_mostly_of_common_lengths():
    right, tokens, lengths = 0.0, 0, []
    rows = warm_start.rows(3000, 0)
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
