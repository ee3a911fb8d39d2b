"""What limits a run: the rule, and that it does not flicker."""

from itertools import pairwise

import pytest

from rhymeflow.observe.limits import WINDOW, Limits, of_rows


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
    ("rollout", "learner", "staleness", "line"),
    [
        (0.1, 0.14, 3, "balanced: instances idle 10%, learner 14%"),
        (0.34, 0.03, 3, "limited by the learner: instances idle 34%, learner 3%"),
        (0.02, 0.5, 3, "limited by rollout: learner idle 50%, instances 2%"),
        (0.2, 0.8, 3, "limited by rollout: learner idle 80%, instances 20%"),
        (0.5, 0.45, 3, "limited by the staleness bound: instances idle 50%, learner 45%"),
        # Of a bound of 3 no response is as old as it allows.
        (0.5, 0.45, 2, "limited by what both wait for: instances idle 50%, learner 45%"),
    ],
)
def test_the_rule(rollout, learner, staleness, line):
    assert fed((rollout, learner), bound=3, staleness=staleness).now.line == line


def test_the_first_step_has_the_time_of_the_start_and_counts_only_by_itself():
    assert fed((0.9, 0.1)).now.verdict == "learner"
    after = fed((0.9, 0.1), (0.0, 0.5)).now
    assert (after.verdict, after.idle_rollout, after.steps) == ("rollout", 0.0, 1)


def test_the_latest_steps_count_by_their_time():
    limits = fed((0, 0), *[(0.9, 0.0)] * 50, *[(0.0, 0.9)] * WINDOW)
    assert (limits.now.idle_rollout, limits.now.steps) == (0, WINDOW)
    limits = fed((0, 0))
    add(limits, 9.0, 0.0, 1.0, 0)
    add(limits, 1.0, 1.0, 0.0, 0)
    assert limits.now.idle_learner == pytest.approx(0.9)


def test_steps_that_come_in_turns_do_not_flicker():
    """At a bound of 1 the batch after a long one is there already."""
    limits, found = fed((0, 0)), set()
    for _ in range(20):
        for seconds, rollout, learner in ((6.0, 0.1, 0.8), (0.8, 0.3, 0.02)):
            add(limits, seconds, rollout, learner, 1)
            found.add(limits.now.verdict)
    assert found == {"rollout"}


def test_near_a_line_what_was_found_stays():
    limits, found = fed((0, 0)), []
    for learner in (*[0.1] * WINDOW, *[0.17] * WINDOW, *[0.21] * WINDOW, *[0.13] * WINDOW):
        add(limits, 1.0, 0.0, learner, 0)
        found.append(limits.now.verdict)
    at = [found[WINDOW * (part + 1) - 1] for part in range(4)]
    assert at == ["balanced", "balanced", "rollout", "rollout"]
    assert sum(a != b for a, b in pairwise(found)) == 1


def test_of_metrics_by_step():
    row = {"step_time": 2.0, "idle/rollout": 0.0, "idle/learner": 0.5, "staleness/max": 1.0}
    assert of_rows([{"eval/reward": 1.0}, row, row], 1).verdict == "rollout"
    assert of_rows([{"eval/reward": 1.0}, {**row, "idle/rollout": None}], 1) is None
