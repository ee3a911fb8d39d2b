"""What a death costs: against sums done by hand, and rates against what was drawn."""

import dataclasses
import statistics
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from itertools import islice
from pathlib import Path
from typing import Any

import pytest

from rhymeflow.errors import UserError
from rhymeflow.sim import simulate
from rhymeflow.sim.faults import HOUR, Death, Devices, Recovery, failures
from rhymeflow.sim.result import SimulationResult
from rhymeflow.sim.simulate import run
from rhymeflow.sim.timeline import Timeline
from tests.sim.test_simulate import (
    GROUPS,
    MEMBERS,
    PROFILE,
    Constant,
    a_config,
    rollout_seconds,
    train_seconds,
)  # fmt: skip

RESPONSES = GROUPS * MEMBERS
STEP = rollout_seconds() + train_seconds() + PROFILE.push + PROFILE.pull
"""Seconds, from the second step on."""
FIRST = STEP - PROFILE.pull
SECOND, THIRD = (FIRST + n * STEP + PROFILE.pull + rollout_seconds() + 0.1 for n in (0, 1))
"""While the second and the third batch are trained on."""
FAULTS = {
    "simulation__faults__instance_seconds": 1.0,
    "simulation__faults__learner_seconds": 2.0,
    "run__save_seconds": 0.0,
}
QUICK = {"detection": 0.25, "checkpoint_copy": 0.0, "checkpoint_write": 0.0}


@contextmanager
def recovering(**seconds: float | None) -> Iterator[None]:
    """Assumed times are these."""
    with pytest.MonkeyPatch.context() as patch:
        assumed = {**QUICK, **seconds}
        patch.setattr(simulate, "Recovery", lambda **given: Recovery(**{**given, **assumed}))
        yield


def died(
    path: Path, dying: Iterable[Death], seconds: dict[str, Any] | None = None, **changes: object
) -> SimulationResult:
    """Responses are all equally long; two instances, a learner, `synchronous`."""
    with recovering(**(seconds or {})):
        return run(a_config(path, **{**FAULTS, **changes}), Constant(), deaths=dying)


@pytest.fixture(scope="module")
def quiet(tmp_path_factory):
    return run(a_config(tmp_path_factory.mktemp("quiet")), Constant())


AGAIN = FIRST + PROFILE.pull + 0.01
AWAY = 0.25 + 2.0  # until it is noticed, and until there is another learner
COSTS = {
    # who dies, assumed times, changes: the seconds that it costs, batches trained again
    "no checkpoint": ([Death(THIRD, "learner")], {}, {}, 0.1 + AWAY + 2 * train_seconds(), 2),
    # The copy is made while rollout goes on, which is longer.
    "a checkpoint": (
        [Death(THIRD, "learner")], {"checkpoint_copy": 0.1}, {"run__save_steps": 2}, 0.1 + AWAY, 0
    ),
    "one that is being written": (
        [Death(THIRD, "learner")], {"checkpoint_write": 1000.0}, {"run__save_steps": 2},
        0.1 + AWAY + 2 * train_seconds(), 2,
    ),
    # What is to be trained again is counted at each death.
    "again while it begins again": (
        [Death(AGAIN, "learner"), Death(AGAIN + 1, "learner")], {}, {},
        0.01 + 1 + AWAY + train_seconds() - rollout_seconds(), 2,
    ),
    # Instances that join hold the newest version, and don't pull it before it is there.
    "everything": ([Death(SECOND, "controller")], {}, {}, 0.1 + AWAY + train_seconds(), 1),
}  # fmt: skip


@pytest.mark.parametrize(
    ("dying", "seconds", "changes", "cost", "retrained"), COSTS.values(), ids=COSTS
)
def test_what_no_checkpoint_has_is_trained_again(
    dying, seconds, changes, cost, retrained, tmp_path, quiet
):
    found = died(tmp_path, dying, seconds, **changes)
    assert found.seconds == pytest.approx(quiet.seconds + cost)
    assert (found.deaths, found.batches_retrained) == ({dying[0].victim: len(dying)}, retrained)
    assert (found.tokens_lost, found.tokens_wasted) == (0, 0)
    assert f"{dying[0].victim} {len(dying)}; 0 tokens lost, {retrained} batch" in found.text()


def test_checkpoints_are_due_as_in_real_runs(tmp_path):
    """After `save_seconds` of training; a version that is evaluated, after two thirds of it."""
    at = FIRST + STEP + 0.1
    for share, evaluated, retrained in ((0.9, 0, 0), (1.1, 0, 2), (1.1, 1, 0), (1.6, 1, 2)):
        changes = {"run__save_seconds": share * train_seconds(), "run__eval_steps": evaluated}
        found = died(tmp_path, [Death(at, "learner")], **changes)
        assert found.batches_retrained == retrained, (share, evaluated)


def test_rollout_goes_on_without_a_learner_as_far_as_the_bound_allows(tmp_path):
    changes = {"schedule__name": "one_step", "learner__max_steps": 8}
    at = FIRST + 2 * (train_seconds() + PROFILE.push) + 0.1
    lost = []
    for dying in ([], [Death(at, "learner")]):
        found = died(tmp_path, dying, **changes)
        lost.append(found.seconds)
        assert max(found.staleness) == 1
    assert lost[1] - lost[0] == pytest.approx(0.1 + 0.25 + 2.0 + 3 * train_seconds())


def test_what_was_stored_of_a_lost_instance_goes_on_elsewhere(tmp_path):
    at = rollout_seconds() / 2
    found = died(tmp_path, [Death(at, 1)])
    assert found.deaths == {"instance": 1}
    assert found.tokens_lost == found.tokens_wasted
    often = died(tmp_path, [Death(at, 1)], {"store": 0.005})
    assert 0 <= often.tokens_lost <= 2 * RESPONSES // 2, "of each response two iterations at most"
    never = died(tmp_path, [Death(at, 1)], {"store": 1e6})
    assert never.tokens_lost > 5 * max(1, often.tokens_lost)
    assert often.step_seconds[0] < never.step_seconds[0]
    assert often.tokens_recomputed > never.tokens_recomputed == 0


@pytest.mark.parametrize(("seconds", "retrained"), [(0.0, 0), (1000.0, 2)])
def test_how_long_a_checkpoint_is_written_is_configured(tmp_path, seconds, retrained):
    fields = {"run__save_steps": 2, "simulation__faults__checkpoint_write_seconds": seconds}
    fields |= {"simulation__faults__checkpoint_copy_seconds": 0.0}
    config = a_config(tmp_path, **FAULTS | fields)
    found = run(config, Constant(), deaths=[Death(THIRD, "learner")])
    assert found.batches_retrained == retrained


def test_another_joins_only_when_there_is_a_learner(tmp_path):
    timeline = Timeline()
    config = a_config(tmp_path, **FAULTS)
    with recovering():
        run(config, Constant(), timeline=timeline, deaths=[Death(0.1, "learner"), Death(0.2, 0)])
    rows = {row.name: row for row in timeline.instances}
    assert rows["rollout-0"].left == 0.2
    assert rows["rollout-0.1"].joined == pytest.approx(0.1 + 0.25 + 2.0)
    assert timeline.learner.spans[0].kind == "restore"


def test_colocated_devices_die_together(tmp_path):
    changes = {"simulation__colocated": True, "rollout__num_instances": 4}
    without = run(a_config(tmp_path, **changes), Constant())
    at = 0.1
    found = died(tmp_path, [Death(at, "devices")], {"store": 0.001}, **changes)
    assert found.seconds == pytest.approx(without.seconds + 0.25 + 2.0, abs=0.05)
    assert found.tokens_recomputed > 0


def test_a_run_that_never_gets_on_says_so(tmp_path):
    with pytest.raises(UserError, match=r"simulation\.faults: step 1 is never done: 10,000"):
        died(tmp_path, (Death(k * 0.1, "devices") for k in range(10**6)))


SPLIT = Devices(num_instances=20, per_instance=2, learner=24, colocated=False)


def test_failures_come_as_often_as_their_rates_say():
    drawn = list(islice(failures(7, SPLIT, device_mtbf_hours=640, controller_mtbf_hours=40), 4000))
    mean = drawn[-1].at / len(drawn) / HOUR
    assert mean == pytest.approx(1 / (64 / 640 + 1 / 40), rel=0.05)
    victims = [failure.victim for failure in drawn]
    assert victims.count("controller") / 4000 == pytest.approx(0.2, abs=0.02)
    assert victims.count("learner") / 4000 == pytest.approx(0.8 * 24 / 64, abs=0.02)
    places = [victim for victim in victims if isinstance(victim, int)]
    assert set(places) == set(range(20))
    assert statistics.pstdev([places.count(place) for place in range(20)]) < 25


def test_failures_are_those_of_the_seed():
    def first(seed: int, devices: Devices = SPLIT) -> list[Death]:
        return list(islice(failures(seed, devices, device_mtbf_hours=100), 50))

    assert first(1) == first(1) != first(2)
    other = dataclasses.replace(SPLIT, num_instances=10, learner=44)
    alternating = Devices(num_instances=32, per_instance=2, learner=64, colocated=True)
    for same_size in (other, alternating):
        assert [f.at for f in first(1, same_size)] == [f.at for f in first(1)]
    assert {f.victim for f in first(1, alternating)} == {"devices"}
    assert list(failures(1, SPLIT, device_mtbf_hours=None)) == []


def test_rates_of_a_configuration(tmp_path):
    def with_rate(hours: float | None) -> SimulationResult:
        fields = {**FAULTS, "simulation__faults__device_mtbf_hours": hours}
        fields |= {"schedule__name": "staleflow", "learner__max_steps": 12}
        return run(a_config(tmp_path, **fields), Constant())

    with recovering():
        found, again = (with_rate(12 / HOUR) for _ in range(2))  # of 8 devices one every 1.5 s
    assert sum(found.deaths.values()) >= 3
    assert found == again, "the same twice"
    rare = with_rate(1e12)
    assert rare == with_rate(None), "as without faults"
    assert found.seconds > rare.seconds
