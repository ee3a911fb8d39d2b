"""Window rules: the two that are published step by step, the one by cost against all choices."""

from __future__ import annotations

from itertools import product

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from rhymeflow.histospec.timing import Curve
from rhymeflow.histospec.window import LEAST_GAIN, MOST_LOSS, Iteration, make_rule

HANDLES = np.array([0, 1])


def curve(rows: list[float], seconds: list[float]) -> Curve:
    return Curve(np.array(rows, float), np.array(seconds, float))


def table(rows: list[list[float]]) -> tuple[np.ndarray, np.ndarray]:
    """Reaches as a padded table, and their counts."""
    width = max(map(len, rows), default=0)
    reach = np.zeros((len(rows), max(width, 1)), np.float32)
    for i, row in enumerate(rows):
        reach[i, : len(row)] = row
    return reach, np.array([len(row) for row in rows], np.int64)


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


def test_doubling_doubles_and_halves() -> None:
    outcomes = [1, 1, 1, 1, 0.5, 0, 0, 0]
    assert windows_of("doubling", outcomes, max_draft=32) == [2, 4, 8, 16, 16, 8, 4, 2, 2]


@pytest.mark.parametrize("name", ["aimd", "doubling"])
def test_a_sequence_without_a_draft_keeps_its_window_and_a_new_one_starts_anew(name: str) -> None:
    rule = make_rule(name, max_sequences=2, max_draft=16)
    rule.observe(HANDLES, np.array([2, 0]), np.array([2, 0]))
    assert rule.most(HANDLES, np.array([99, 99])).tolist() == [4, 2]
    rule.begin(0)
    assert rule.most(HANDLES, np.array([99, 1])).tolist() == [2, 1]


@pytest.mark.parametrize("name", ["aimd", "doubling"])
def test_the_published_rules_verify_whatever_is_found(name: str) -> None:
    rule = make_rule(name, max_sequences=2, max_draft=16)
    reach, counts = table([[0.01, 0.001], [0.9]])
    assert rule.cut(reach, counts, Iteration(2, None)).tolist() == [2, 1]
    weighted = Iteration(2, None, np.array([1.0, 9.0]))
    assert rule.cut(reach, counts, weighted).tolist() == [2, 1]


reaches = st.lists(st.floats(0, 1, width=32), max_size=3).map(lambda row: sorted(row)[::-1])
sequences = st.lists(reaches, min_size=1, max_size=4)
slopes = st.lists(st.floats(0, 1), min_size=1, max_size=5)
weights = st.one_of(
    st.none(), st.lists(st.sampled_from([0.5, 1.0, 3.0, 20.0]), min_size=4, max_size=4)
)


def check_against_all_choices(
    rows: list[list[float]], time: Curve, other: int, worth: list[float] | None
) -> None:
    """The rule's choice makes as many tokens per second as the best of all, or is none.

    Where that one gives up too much for weights: as the best cut by worth that does not.
    """
    reach, counts = table(rows)
    value = np.ones(len(rows)) if worth is None else np.array(worth[: len(rows)])
    iteration = Iteration(len(rows) + other, time, None if worth is None else value)
    lengths = make_rule("cost", max_sequences=9, max_draft=16).cut(reach, counts, iteration)

    def rate(chosen: tuple[int, ...]) -> float:
        tokens = sum(
            v * (1.0 + float(row[:size].sum(dtype=float)))
            for v, row, size in zip(value, reach, chosen, strict=True)
        )
        return tokens / time.at(iteration.rows + sum(chosen))

    def kept(chosen: tuple[int, ...]) -> float:
        """Tokens a second, unweighted, as a share of those without drafts."""
        made = sum(
            float(row[:size].sum(dtype=float)) for row, size in zip(reach, chosen, strict=True)
        )
        seconds = time.at(iteration.rows + sum(chosen)) / time.at(iteration.rows)
        return (1 + made / len(rows)) / seconds

    chosen, none = tuple(lengths.tolist()), (0,) * len(rows)
    assert (lengths <= counts).all()
    assert kept(chosen) >= 1 - MOST_LOSS - 1e-9
    cuts = cuts_by_worth(reach, counts, value)
    least, most = (
        max(rate(cut) for cut in cuts if kept(cut) >= 1 - MOST_LOSS + margin or cut == none)
        for margin in (1e-9, -1e-9)
    )
    if least > rate(none) * (1 + LEAST_GAIN) * (1 + 1e-9):
        assert least * (1 - 1e-9) <= rate(chosen) <= most * (1 + 1e-9)
    elif most < rate(none) * (1 + LEAST_GAIN) * (1 - 1e-9):
        assert chosen == none
    every = list(product(*[range(count + 1) for count in counts]))
    best = max(map(rate, every))
    if all(kept(c) >= 1 - MOST_LOSS + 1e-9 for c in every if rate(c) >= best * (1 - 1e-9)):
        assert least == pytest.approx(best, rel=1e-9)
    if worth is None:
        assert kept(chosen) >= 1 - 1e-9


def cuts_by_worth(
    reach: np.ndarray, counts: np.ndarray, value: np.ndarray
) -> list[tuple[int, ...]]:
    """The nodes by what they are worth, cut anywhere."""
    nodes = [(i, j) for i, count in enumerate(counts) for j in range(count)]
    nodes.sort(key=lambda node: -float(reach[node]) * value[node[0]])
    cuts = [(0,) * len(counts)]
    for i, _ in nodes:
        cuts.append(tuple(size + (k == i) for k, size in enumerate(cuts[-1])))
    return cuts


@settings(max_examples=150, deadline=None)
@given(sequences, slopes, st.integers(0, 3), weights)
def test_cost_is_the_best_choice_for_convex_times(
    rows: list[list[float]], rises: list[float], other: int, worth: list[float] | None
) -> None:
    seconds = 1.0 + np.concatenate([[0.0], np.cumsum(sorted(rises))])
    time = curve(list(range(1, len(seconds) + 1)), seconds.tolist())
    check_against_all_choices(rows, time, other, worth)


@settings(max_examples=150, deadline=None)
@given(sequences, slopes, st.integers(0, 3), weights)
def test_cost_is_the_best_choice_for_times_in_steps(
    rows: list[list[float]], rises: list[float], other: int, worth: list[float] | None
) -> None:
    at, seconds = [1.0], [1.0]
    for step, rise in enumerate(rises):
        at += [2.5 * step + 2, 2.5 * step + 2.01]
        seconds += [seconds[-1], seconds[-1] + rise]
    check_against_all_choices(rows, curve(at, seconds), other, worth)


def test_cost_drafts_nothing_where_rows_cost_as_much_as_tokens() -> None:
    reach, counts = table([[0.9, 0.8], [0.95]])
    rule = make_rule("cost", max_sequences=2, max_draft=16)
    proportional = curve([1, 100], [1, 100])
    assert rule.cut(reach, counts, Iteration(2, proportional)).tolist() == [0, 0]
    free = curve([1, 100], [1, 1])
    assert rule.cut(reach, counts, Iteration(2, free)).tolist() == [2, 1]


def test_cost_drafts_nothing_before_times_are_known() -> None:
    reach, counts = table([[0.9]])
    rule = make_rule("cost", max_sequences=2, max_draft=16)
    assert rule.cut(reach, counts, Iteration(1, None)).tolist() == [0]


def test_weight_moves_drafts_to_who_is_waited_for() -> None:
    reach, counts = table([[0.6, 0.4], [0.6, 0.4]])
    rule = make_rule("cost", max_sequences=2, max_draft=16)
    time = curve([2, 4, 4.01, 9], [1.0, 1.0, 9.0, 9.0])
    even = rule.cut(reach, counts, Iteration(2, time))
    assert even.tolist() == [1, 1]
    uneven = rule.cut(reach, counts, Iteration(2, time, np.array([1.0, 2.0])))
    assert uneven.tolist() == [0, 2]


def hurried_draft(weight: float, chance: float, hurried: int) -> tuple[int, float]:
    """Where a row costs as much as a token: tokens drafted for those in a hurry, of 32; the share
    of the tokens a second that is kept."""
    reach, counts = table([[chance] * 3] * 32)
    weights = np.ones(32)
    weights[:hurried] = weight
    rule = make_rule("cost", max_sequences=32, max_draft=16)
    lengths = rule.cut(reach, counts, Iteration(32, curve([1, 200], [1, 200]), weights))
    assert not lengths[hurried:].any()
    drafted = int(lengths.sum())
    return drafted, (1 + chance * drafted / 32) / (1 + drafted / 32)


def test_a_draft_may_cost_others_time_if_it_is_worth_it() -> None:
    assert hurried_draft(1.0, 0.5, 1) == (0, 1.0)
    assert hurried_draft(1.5, 0.5, 1) == (0, 1.0)
    drafted, kept = hurried_draft(4.0, 0.5, 1)
    assert drafted == 3
    assert 0.95 < kept < 1


def test_however_much_they_weigh_only_so_much_is_lost_for_them() -> None:
    drafted, kept = hurried_draft(1000.0, 0.6, 16)
    assert 0 < drafted < 48
    assert 1 - MOST_LOSS <= kept < 1 - MOST_LOSS + 0.03


def test_weights_that_are_all_the_same_are_none() -> None:
    reach, counts = table([[0.6, 0.4], [0.5, 0.1]])
    rule = make_rule("cost", max_sequences=2, max_draft=16)
    for seconds in ([1.0, 1.0, 1.3, 9.0], [1.0, 1.2, 1.4, 1.6], [1.0, 2.0, 3.0, 4.0]):
        plain = Iteration(2, curve([2, 3, 4, 9], seconds))
        same = plain._replace(weights=np.full(2, 5.0))
        assert rule.cut(reach, counts, same).tolist() == rule.cut(reach, counts, plain).tolist()


def test_prompts_that_are_taken_in_make_no_draft_cheaper() -> None:
    """Their time is spent whatever is drafted, so it is no reason for more rows."""
    reach, counts = table([[0.9, 0.8], [0.9, 0.3]])
    rule = make_rule("cost", max_sequences=2, max_draft=16)
    alone = curve([2, 100], [2.0, 100.0])
    mixed = Iteration(52, curve([52, 150], [52.0, 150.0]), None, alone, 2)
    assert rule.cut(reach, counts, mixed).tolist() == [0, 0]
    assert rule.cut(reach, counts, mixed._replace(alone=None)).any()
    cheap = Iteration(52, curve([52, 90], [9.0, 9.4]), None, curve([2, 90], [2.0, 2.4]), 2)
    assert rule.cut(reach, counts, cheap).tolist() == [2, 2]


def test_no_more_is_drafted_than_may_be_lost() -> None:
    reach, counts = table([[0.9, 0.8, 0.7, 0.6]])
    rule = make_rule("cost", max_sequences=2, max_draft=16)
    time = curve([1, 5], [1.0, 1.4])
    iteration = Iteration(1, time)
    assert rule.cut(reach, counts, iteration).tolist() == [4]
    assert rule.cut(reach, counts, iteration._replace(risk=0.21)).tolist() == [2]
    assert rule.cut(reach, counts, iteration._replace(risk=0.41, doubt=0.1)).tolist() == [2]
    # One token is always tried: of one sequence nothing could be learned otherwise.
    assert rule.cut(reach, counts, iteration._replace(risk=0.0)).tolist() == [1]


def test_only_part_of_what_is_expected_is_reckoned_with() -> None:
    reach, counts = table([[0.9]])
    rule = make_rule("cost", max_sequences=2, max_draft=16)
    time = curve([1, 2], [1.0, 1.8])
    assert rule.cut(reach, counts, Iteration(1, time)).tolist() == [1]
    assert rule.cut(reach, counts, Iteration(1, time, credit=0.85)).tolist() == [0]
