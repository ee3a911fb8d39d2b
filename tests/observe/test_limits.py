"""What limits a run: the rule, and that it does not flicker."""

from __future__ import annotations

from itertools import pairwise

import pytest
from hypothesis import given
from hypothesis import strategies as st

from rhymeflow.observe.limits import WINDOW, Limits, of_rows, verdict

SHARES = st.floats(0, 1)


def add(limits: Limits, seconds: float, rollout: float, learner: float, staleness: float) -> None:
    row = {"step_time": seconds, "idle/rollout": rollout, "idle/learner": learner}
    limits.add(row | {"staleness/max": staleness})


def fed(*steps: tuple[float, float], bound: int = 1, staleness: float = 1.0) -> Limits:
    """After steps of a second each, of these idle shares of rollout and learner."""
    limits = Limits(bound)
    for rollout, learner in steps:
        add(limits, 1.0, rollout, learner, staleness)
    return limits


@pytest.mark.parametrize(
    ("rollout", "learner", "expected"),
    [
        (0.1, 0.14, "balanced"),
        (0.5, 0.1, "learner"),
        (0.02, 0.5, "rollout"),
        (0.2, 0.8, "rollout"),
        (0.5, 0.45, "bound"),
    ],
)
def test_the_rule(rollout: float, learner: float, expected: str) -> None:
    assert verdict(rollout, learner, is_at_bound=True) == expected


def test_both_wait_for_something_else_where_no_response_is_as_old_as_allowed() -> None:
    for staleness, expected in ((3.0, "bound"), (2.0, "elsewhere")):
        assert fed((0.5, 0.5), bound=3, staleness=staleness).now.verdict == expected


def test_the_line_says_first_what_matters() -> None:
    assert fed((0.34, 0.03)).now.line == "limited by the learner: instances idle 34%, learner 3%"
    assert fed((0.02, 0.5)).now.line == "limited by rollout: learner idle 50%, instances 2%"
    assert fed().now is None


def test_the_first_step_has_the_time_of_the_start_and_counts_only_by_itself() -> None:
    assert fed((0.9, 0.1)).now.verdict == "learner"
    after = fed((0.9, 0.1), (0.0, 0.5)).now
    assert (after.verdict, after.idle_rollout, after.steps) == ("rollout", 0.0, 1)


def test_long_steps_count_for_more() -> None:
    limits = fed((0.0, 0.0))
    add(limits, 9.0, 0.0, 1.0, 0)
    add(limits, 1.0, 1.0, 0.0, 0)
    assert limits.now.idle_learner == pytest.approx(0.9)


def test_only_the_latest_steps_count() -> None:
    limits = fed((0, 0), *[(0.9, 0.0)] * 50, *[(0.0, 0.9)] * WINDOW)
    assert limits.now.idle_rollout == 0
    assert limits.now.steps == WINDOW


def test_steps_that_come_in_turns_do_not_flicker() -> None:
    """At a bound of 1 the batch after a long one is there already."""
    limits, found = fed((0, 0)), set()
    for _ in range(20):
        for seconds, rollout, learner in ((6.0, 0.1, 0.8), (0.8, 0.3, 0.02)):
            add(limits, seconds, rollout, learner, 1)
            found.add(limits.now.verdict)
    assert found == {"rollout"}


def test_near_a_line_what_was_found_stays() -> None:
    limits, found = fed((0, 0)), []
    for learner in (*[0.1] * WINDOW, *[0.17] * WINDOW, *[0.21] * WINDOW, *[0.13] * WINDOW):
        add(limits, 1.0, 0.0, learner, 0)
        found.append(limits.now.verdict)
    at = [found[WINDOW * (part + 1) - 1] for part in range(4)]
    assert at == ["balanced", "balanced", "rollout", "rollout"]
    assert sum(a != b for a, b in pairwise(found)) == 1


@given(st.lists(st.tuples(SHARES, SHARES), min_size=1, max_size=30), st.integers(0, 3))
def test_a_line_is_short(steps: list[tuple[float, float]], bound: int) -> None:
    assert len(fed(*steps, bound=bound).now.line) <= 65


def test_of_metrics_by_step() -> None:
    row = {"step_time": 2.0, "idle/rollout": 0.0, "idle/learner": 0.5, "staleness/max": 1.0}
    assert of_rows([{"eval/reward": 1.0}, row, row], 1).verdict == "rollout"
    assert of_rows([{"eval/reward": 1.0}, {**row, "idle/rollout": None}], 1) is None
