"""avg@k, pass@k and maj@k against their definitions, written out."""

import itertools
from collections import Counter
from fractions import Fraction

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from rhymeflow.suites.figures import JudgedAnswer, figures, ks_of_pass, majority, pass_at_k, vote_of

REWARDS = st.sampled_from([0.0, 0.25, 1.0, 2.0])
ANSWERS = st.builds(JudgedAnswer, REWARDS, st.integers(0, 9), st.booleans(), st.sampled_from("abc"))


@given(st.lists(st.booleans(), min_size=1, max_size=8), st.data())
def test_pass_at_k_is_the_share_of_subsets_in_which_one_passes(passes, data):
    k = data.draw(st.integers(1, len(passes)))
    subsets = list(itertools.combinations(passes, k))
    share = Fraction(sum(map(any, subsets)), len(subsets))
    assert pass_at_k(len(passes), sum(passes), k) == pytest.approx(float(share), abs=1e-12)


@given(st.lists(ANSWERS, min_size=1, max_size=9))
def test_the_majority_is_what_is_said_most_often_and_first(answers):
    counts = Counter(each.vote for each in answers)
    largest = max(counts.values())
    won = next(each.vote for each in answers if counts[each.vote] == largest)
    rewards = [each.reward for each in answers if each.vote == won]
    assert majority(answers) == pytest.approx(sum(rewards) / len(rewards))


@given(st.integers(1, 5).flatmap(
    lambda n: st.lists(st.lists(ANSWERS, min_size=n, max_size=n), min_size=1, max_size=6)
))  # fmt: skip
def test_every_figure_is_a_mean_over_prompts(prompts):
    n, found = len(prompts[0]), figures(prompts, 1.0)
    every = [each for answers in prompts for each in answers]
    expected = {
        f"avg@{n}": [each.reward for each in every],
        "mean_length": [each.length for each in every],
        "clipped_ratio": [each.is_cut for each in every],
        "pass@1": [each.reward >= 1.0 for each in every],
        f"pass@{n}": [any(each.reward >= 1.0 for each in answers) for answers in prompts],
    }
    if n > 1:
        expected[f"maj@{n}"] = [majority(answers) for answers in prompts]
    if len(prompts) > 1:
        means = [sum(each.reward for each in answers) / n for answers in prompts]
        assert found.pop("stderr") == pytest.approx(
            float(np.std(means, ddof=1)) / len(means) ** 0.5
        )
    assert set(found) == set(expected) | {f"pass@{k}" for k in ks_of_pass(n)}
    for name, values in expected.items():
        assert found[name] == pytest.approx(sum(values) / len(values)), name


def test_pass_at_k_is_found_for_powers_of_two_and_all_answers():
    assert ks_of_pass(1) == [1]
    assert ks_of_pass(8) == [1, 2, 4, 8]
    assert ks_of_pass(12) == [1, 2, 4, 8, 12]


@pytest.mark.parametrize(
    ("text", "pattern", "counts_as"),
    [
        (" 12 \n", None, "12"),
        ("a3+0=3 b9+3=12 =12", r"=(\d+)", "12"),
        ("1 2 3", r"\d", "3"),
        ("none", r"\d", ""),
        ("x", r"x(y)?", ""),
    ],
)
def test_what_is_counted(text, pattern, counts_as):
    assert vote_of(text, pattern) == counts_as
