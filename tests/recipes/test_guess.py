"""The recipe `guess`: halving finds every number in time, the careless teacher a third of them."""

import random
import statistics

import pytest
from hypothesis import given
from hypothesis import strategies as st

from rhymeflow.config.load import read_config
from rhymeflow.recipes.guess import task, warm_start
from tests.recipes.play import play, replay


def played(hidden, policy):
    return play(task.Environment(), {"prompt": "#1?", "hidden": hidden}, policy)


def interval(messages):
    """What the hints leave."""
    lowest, highest = 1, task.LARGEST
    for turn, answer in zip(messages[::2], messages[1::2], strict=True):
        guess = int(turn["content"])
        if answer["content"] == "<":
            highest = min(highest, guess - 1)
        else:
            lowest = max(lowest, guess + 1)
    return lowest, highest


def test_halving_finds_every_number_in_time():
    for hidden in range(1, task.LARGEST + 1):
        reward, messages = played(hidden, lambda messages: str(sum(interval(messages)) // 2))
        assert reward == 1.0
        assert len(messages) <= 2 * task.MAX_TURNS - 1


@given(st.integers(1, 63), st.lists(st.text(task.ALPHABET, max_size=3), min_size=6, max_size=6))
def test_a_game_ends_with_the_number_or_after_six_turns(hidden, turns):
    given_turns = iter(turns)
    reward, messages = played(hidden, lambda _: next(given_turns))
    guesses = [message["content"] for message in messages[::2]]
    assert reward == float(guesses[-1] == str(hidden))
    assert reward or len(guesses) == 6
    for guess, answer in zip(guesses, messages[1::2], strict=False):
        if guess.isdigit() and guess[0] != "0":
            assert answer["content"] == ("<" if hidden < int(guess) else ">")
        else:
            assert answer["content"] == "?"


def test_problems_hide_every_number():
    assert {problem["hidden"] for problem in task.problems(2000, 5)} == set(range(1, 64))
    with pytest.raises(ValueError, match="50000"):
        task.problems(50_001, 0)


def test_the_careless_teacher_finds_a_third_and_heeds_the_hints():
    noise, rewards = random.Random(0), []
    for problem in task.problems(3000, 1):
        messages = warm_start.played(problem["hidden"], noise)
        rewards.append(replay(task.Environment(), problem, messages))
        for place in range(0, len(messages), 2):
            lowest, highest = interval(messages[:place])
            assert lowest <= int(messages[place]["content"]) <= highest
    assert 0.3 < statistics.mean(rewards) < 0.4


def test_a_game_fits_the_recipe():
    config = read_config("guess")
    assert config.environment.max_turns == task.MAX_TURNS
    longest = task.MAX_TURNS * 3 + (task.MAX_TURNS - 1)  # two digits and <eos>; a hint
    assert longest <= config.rollout.max_completion_length
