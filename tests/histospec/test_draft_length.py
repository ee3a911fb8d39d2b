"""Window rules: the one that is published step by step, the one by cost against all choices."""

from __future__ import annotations

from itertools import product

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from rhymeflow.histospec.draft_length import LEAST_GAIN, Times, make_rule

HANDLES = np.array([0, 1])


def seconds_from(first: int, rows: list[float], seconds: list[float]) -> np.ndarray:
    """Of iterations with 0 to 20 drafted tokens beside `first` rows, by a line through points."""
    return np.interp(np.arange(first, first + 21), rows, seconds)


def times_from(first: int, rows: list[float], seconds: list[float], **more: float) -> Times:
    """Without prompts."""
    found = seconds_from(first, rows, seconds)
    return Times(found, found, **more)


def table(rows: list[list[float]]) -> tuple[np.ndarray, np.ndarray]:
    """Path probabilities as a padded table, and their counts."""
    width = max(map(len, rows), default=0)
    probability = np.zeros((len(rows), max(width, 1)), np.float32)
    for i, row in enumerate(rows):
        probability[i, : len(row)] = row
    return probability, np.array([len(row) for row in rows], np.int64)


def windows_of(name: str, outcomes: list[float], *, max_draft: int) -> list[int]:
    """The window of one sequence before each draft and after the last; an outcome is a share."""
    rule = make_rule(name, max_sequences=2, max_draft=max_draft)
    rule.begin(1)
    windows = []
    for share in [*outcomes, None]:
        window = int(rule.most(HANDLES, np.array([99, 99]))[1])
        windows.append(window)
        if share is not None:
            lengths = np.array([0, window])
            rule.observe(HANDLES, lengths, np.array([0, int(share * window)]))
    return windows


def test_aimd_adds_two_and_goes_back_to_two() -> None:
    assert windows_of("aimd", [1, 1, 1, 0.5, 1, 0], max_draft=32) == [2, 4, 6, 8, 2, 4, 2]


def test_aimd_stays_within_the_most() -> None:
    assert windows_of("aimd", [1, 1, 1], max_draft=5) == [2, 4, 5, 5]
    assert windows_of("aimd", [1, 0], max_draft=1) == [1, 1, 1]


def test_a_sequence_without_a_draft_keeps_its_window_and_a_new_one_starts_anew() -> None:
    rule = make_rule("aimd", max_sequences=2, max_draft=16)
    rule.observe(HANDLES, np.array([2, 0]), np.array([2, 0]))
    assert rule.most(HANDLES, np.array([99, 99])).tolist() == [4, 2]
    rule.begin(0)
    assert rule.most(HANDLES, np.array([99, 1])).tolist() == [2, 1]


def test_aimd_verifies_whatever_is_found() -> None:
    rule = make_rule("aimd", max_sequences=2, max_draft=16)
    probability, counts = table([[0.01, 0.001], [0.9]])
    assert rule.cut(probability, counts, None).tolist() == [2, 1]


reaches = st.lists(st.floats(0, 1, width=32), max_size=3).map(lambda row: sorted(row)[::-1])
sequences = st.lists(reaches, min_size=1, max_size=4)
slopes = st.lists(st.floats(0, 1), min_size=1, max_size=5)


def check_against_all_choices(rows: list[list[float]], times: Times) -> None:
    """The rule's choice makes as many tokens per second as the best of all, or is none."""
    probability, counts = table(rows)
    lengths = make_rule("cost", max_sequences=9, max_draft=16).cut(probability, counts, times)

    def rate(chosen: tuple[int, ...]) -> float:
        tokens = len(rows) + sum(
            float(row[:size].sum(dtype=float))
            for row, size in zip(probability, chosen, strict=True)
        )
        return tokens / times.seconds[sum(chosen)]

    chosen, none = tuple(lengths.tolist()), (0,) * len(rows)
    assert (lengths <= counts).all()
    best = max(map(rate, product(*[range(count + 1) for count in counts])))
    if best > rate(none) * (1 + LEAST_GAIN) * (1 + 1e-9):
        assert rate(chosen) == pytest.approx(best, rel=1e-9)
    elif best < rate(none) * (1 + LEAST_GAIN) * (1 - 1e-9):
        assert chosen == none


@settings(max_examples=150, deadline=None)
@given(sequences, slopes, st.integers(0, 3))
def test_cost_is_the_best_choice_for_convex_times(
    rows: list[list[float]], rises: list[float], other: int
) -> None:
    seconds = 1.0 + np.concatenate([[0.0], np.cumsum(sorted(rises))])
    points = list(range(1, len(seconds) + 1)), seconds.tolist()
    check_against_all_choices(rows, times_from(len(rows) + other, *points))


@settings(max_examples=150, deadline=None)
@given(sequences, slopes, st.integers(0, 3))
def test_cost_is_the_best_choice_for_times_in_steps(
    rows: list[list[float]], rises: list[float], other: int
) -> None:
    at, seconds = [1.0], [1.0]
    for step, rise in enumerate(rises):
        at += [2.5 * step + 2, 2.5 * step + 2.01]
        seconds += [seconds[-1], seconds[-1] + rise]
    check_against_all_choices(rows, times_from(len(rows) + other, at, seconds))


def test_cost_drafts_nothing_where_rows_cost_as_much_as_tokens() -> None:
    probability, counts = table([[0.9, 0.8], [0.95]])
    rule = make_rule("cost", max_sequences=2, max_draft=16)
    assert rule.cut(probability, counts, times_from(2, [1, 100], [1, 100])).tolist() == [0, 0]
    assert rule.cut(probability, counts, times_from(2, [1, 100], [1, 1])).tolist() == [2, 1]


def test_prompts_that_are_prefilled_make_no_draft_cheaper() -> None:
    """Their time is spent whatever is drafted, so it is no reason for more rows."""
    probability, counts = table([[0.9, 0.8], [0.9, 0.3]])
    rule = make_rule("cost", max_sequences=2, max_draft=16)
    alone = seconds_from(2, [2, 100], [2.0, 100.0])
    mixed = Times(seconds_from(52, [52, 150], [52.0, 150.0]), alone)
    assert rule.cut(probability, counts, mixed).tolist() == [0, 0]
    assert rule.cut(probability, counts, mixed._replace(alone=mixed.seconds)).any()
    cheap = Times(seconds_from(52, [52, 90], [9.0, 9.4]), seconds_from(2, [2, 90], [2.0, 2.4]))
    assert rule.cut(probability, counts, cheap).tolist() == [2, 2]


def test_no_more_is_drafted_than_may_be_lost() -> None:
    probability, counts = table([[0.9, 0.8, 0.7, 0.6]])
    rule = make_rule("cost", max_sequences=2, max_draft=16)
    times = times_from(1, [1, 5], [1.0, 1.4])
    assert rule.cut(probability, counts, times).tolist() == [4]
    assert rule.cut(probability, counts, times._replace(max_loss=0.21)).tolist() == [2]
    assert rule.cut(probability, counts, times._replace(max_loss=0.41, doubt=0.1)).tolist() == [2]
    # One token is always tried: of one sequence nothing could be learned otherwise.
    assert rule.cut(probability, counts, times._replace(max_loss=0.0)).tolist() == [1]


def test_only_part_of_what_is_expected_is_reckoned_with() -> None:
    probability, counts = table([[0.9]])
    rule = make_rule("cost", max_sequences=2, max_draft=16)
    times = times_from(1, [1, 2], [1.0, 1.8])
    assert rule.cut(probability, counts, times).tolist() == [1]
    assert rule.cut(probability, counts, times._replace(acceptance_discount=0.85)).tolist() == [0]
