"""When a checkpoint is due, and which stay."""

import pytest

from rhymeflow.config.run import RunConfig
from rhymeflow.runtime.checkpoints import Checkpoints


def of(every_eval: int = 5, num_steps: int = 100, there=(), **fields) -> Checkpoints:
    run = {"save_seconds": 0.0, **fields}
    return Checkpoints(
        RunConfig(**run), lambda v: v % every_eval == 0, num_steps=num_steps, existing=there
    )


def save(checkpoints: Checkpoints, version: int) -> tuple[int, ...]:
    kept = checkpoints.begin(version)
    checkpoints.saved(version)
    return kept


def test_every_so_many_steps():
    checkpoints = of(num_steps=7, save_steps=3)
    assert [v for v in range(1, 8) if checkpoints.is_due(v)] == [3, 6, 7]


@pytest.mark.parametrize(
    ("every_eval", "expected"),
    [
        (4, [8, 16, 24, 32]),  # versions that are evaluated, from two thirds of the time on
        (50, [11, 21, 31]),  # evaluations are rare
    ],
)
def test_after_so_many_seconds_of_training(every_eval, expected):
    checkpoints, due = of(every_eval, save_seconds=10.0), []
    for version in range(1, 34):
        if checkpoints.is_due(version):
            save(checkpoints, version)
            due.append(version)
        checkpoints.trained(1.0)
    assert due == expected


def test_none_is_begun_for_its_age_while_one_is_written():
    checkpoints = of(save_seconds=10.0)
    checkpoints.begin(5)
    checkpoints.trained(100.0)
    assert not checkpoints.is_due(10)
    checkpoints.failed(5)
    assert checkpoints.is_due(10)
    assert 5 not in checkpoints


def test_what_a_backup_names_or_may_name_next_stays():
    checkpoints = of(save_total_limit=1)
    for version in (1, 2):
        save(checkpoints, version)
    assert checkpoints.begin(3, {-1, 2}) == (2,)
    assert checkpoints.begin(4, {-1, 2}) == (2, 3), "3 is named when it is complete"
    assert checkpoints.begin(5) == (), "copies need none"


def test_what_is_trained_again_counts_as_unsaved():
    """Or a run whose learner dies while a checkpoint is written would never have one."""
    checkpoints = of(1, save_seconds=10.0)
    checkpoints.trained(12.0)
    assert checkpoints.is_due(5)
    checkpoints.begin(5)
    assert checkpoints.lose_pending() == (5,)
    assert not checkpoints.is_due(6)
    checkpoints.restored(12.0)
    assert checkpoints.is_due(6)


def test_the_newest_and_the_best_stay():
    checkpoints = of(save_total_limit=2)
    for version, reward, kept in [
        (5, 0.1, ()),
        (10, 0.9, (5,)),
        (15, 0.3, (10,)),
        (20, 0.2, (10, 15)),
        (25, 0.95, (10, 20)),
        (30, 0.1, (25,)),
    ]:
        assert save(checkpoints, version) == kept
        checkpoints.evaluated(version, {"eval/reward": reward, "eval/a/pass@4": -reward})
    assert (checkpoints.newest, checkpoints.best) == (30, 25)


def test_the_best_is_by_the_figure_that_was_chosen_and_known_of_earlier_attempts():
    known = {1: {"eval/a/pass@4": 0.5}, 2: {"eval/a/pass@4": 0.4}, 3: {"eval/reward": 9.0}}
    checkpoints = Checkpoints(
        RunConfig(best_metric="eval/a/pass@4"), lambda v: True, num_steps=9, existing=[1, 2, 3],
        metrics=known,
    )  # fmt: skip
    assert checkpoints.best == 1
    save(checkpoints, 4)
    checkpoints.evaluated(4, {"eval/reward": 10.0})
    checkpoints.evaluated(4, {"eval/a/pass@4": 0.5})
    assert checkpoints.best == 4, "of equals the newest"
