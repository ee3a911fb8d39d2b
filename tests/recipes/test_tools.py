"""The recipe `tools`: the calculator is right, a perfect policy gets 1, the careless one less."""

import random
import statistics

import pytest
from hypothesis import given
from hypothesis import strategies as st

from rhymeflow.config.load import read_config
from rhymeflow.recipes.tools import task, warm_start
from tests.recipes.play import play, replay

some_terms = st.lists(st.integers(100, 99_999), min_size=2, max_size=7).flatmap(
    lambda numbers: st.tuples(*(st.sampled_from([n, -n]) for n in numbers[1:])).map(
        lambda others: [numbers[0], *others]
    )
)


def problem_of(terms):
    return {"prompt": task.write_prompt(terms), "answer": str(sum(terms))}


def perfect(terms):
    """A policy that adds one number after the other."""

    def policy(messages):
        answers = [m["content"].strip() for m in messages if m["role"] == "user"]
        done = len(answers)
        if done == len(terms) - 1:
            return f"={answers[-1]}"
        left = answers[-1] if answers else f"a{terms[0]}"
        return f"[{left} {task.write_term(task.LABELS[done + 1], terms[done + 1])}]"

    return policy


def test_the_example_of_the_docstring():
    problem = problem_of([48213, 9977, -31415])
    assert problem == {"prompt": "a48213 b+9977 c-31415?", "answer": "26775"}
    reward, messages = play(task.Environment(), problem, perfect([48213, 9977, -31415]))
    assert reward == 1.0
    contents = [message["content"].strip() for message in messages]
    assert contents == ["[a48213 b+9977]", "58190", "[58190 c-31415]", "26775", "=26775"]
    for content in [problem["prompt"], *contents]:
        assert content in task.__doc__


@given(some_terms, st.integers(-700_000, 700_000))
def test_a_perfect_policy_gets_1_and_a_wrong_answer_0(terms, said):
    assert task.read_prompt(task.write_prompt(terms)) == terms
    reward, messages = play(task.Environment(), problem_of(terms), perfect(terms))
    assert reward == 1.0
    assert len(messages) == 2 * len(terms) - 1
    reward, _ = play(task.Environment(), problem_of(terms), lambda _: f"={said}")
    assert reward == float(said == sum(terms))


@given(st.text(task.ALPHABET, max_size=20))
def test_a_turn_that_is_no_call_is_answered_and_the_episode_goes_on(turn):
    environment = task.Environment()
    environment.reset(answer="7")
    answer = environment.step([{"role": "assistant", "content": turn}])
    if turn.startswith("="):
        assert answer is None
        assert environment.reward() == float(turn == "=7")
    else:
        assert answer == task.calculate(turn)
        assert environment.step([{"role": "assistant", "content": "=7"}]) is None
        assert environment.reward() == 1.0


@pytest.mark.parametrize(
    "turn", ["", "[a12 b+5", "a12 b+5]", "[a12b+5]", "[a12 +5]", "[a12 b5]", "[a12 b+]", "[12]"]
)
def test_malformed_calls(turn):
    assert task.calculate(turn) == "?\n"


def test_problems_need_one_to_six_calls():
    problems = task.problems(2000, 5)
    assert {problem["calls"] for problem in problems} == set(range(1, 7))
    for problem in problems:
        terms = task.read_prompt(problem["prompt"])
        assert problem["answer"] == str(sum(terms))
        assert all(sum(terms[:n]) >= 0 for n in range(len(terms)))
    with pytest.raises(ValueError, match="need 2 <= min_numbers"):
        task.problems(3, 0, max_numbers=8)


def test_the_careless_teacher_is_right_a_third_of_the_time_and_fits_the_model():
    config = read_config("tools")
    noise = random.Random(0)
    rewards, unreadable, calls = [], 0, 0
    for problem in task.problems(3000, 1):
        messages = warm_start.played(task.read_prompt(problem["prompt"]), noise)
        rewards.append(replay(task.Environment(), problem, messages))
        answers = [m["content"] for m in messages if m["role"] == "user"]
        unreadable, calls = unreadable + answers.count(task.UNREADABLE), calls + len(answers)
        assert len(answers) < config.environment.max_turns
    assert 0.28 < statistics.mean(rewards) < 0.4
    assert 0.02 < unreadable / calls < 0.06


def test_an_episode_without_mistakes_fits_the_recipe():
    config = read_config("tools")
    terms = [99_999] * 7
    _, messages = play(task.Environment(), problem_of(terms), perfect(terms))
    tokens = sum(len(m["content"]) + (m["role"] == "assistant") for m in messages)
    assert tokens <= config.rollout.max_completion_length
