"""Costs of deaths from simulated runs, ratios from costs, and the baseline by hand."""

from __future__ import annotations

import itertools
from types import SimpleNamespace

import pytest

from benchmarks import faults_simulated as subject
from benchmarks.faults_simulated import Cell
from benchmarks.simulated.restarts import seconds_with_restarts
from rhymeflow.sim.faults import HOUR
from tests.benchmarks.test_simulated import arguments

NEVER = itertools.repeat(1e18)


def restarts(*times: float, away: float = 5.0, save_steps: int = 1) -> float:
    failures = itertools.chain(times, NEVER)
    return seconds_with_restarts([10.0] * 4, failures, away=away, save_steps=save_steps)


def test_a_job_that_restarts_does_its_steps_again() -> None:
    assert restarts() == 40
    assert restarts(23.0) == 40 + 3 + 5
    assert restarts(23.0, save_steps=2) == 40 + 3 + 5
    assert restarts(33.0, save_steps=2) == 40 + 13 + 5
    assert restarts(33.0, save_steps=20) == 40 + 33 + 5
    assert restarts(23.0, 26.0) == 40 + 3 + 3 + 5, "it restarts anew"
    assert restarts(23.0, 26.0, 30.9) == 40 + 3 + 3 + 4.9 + 5
    assert restarts(23.0, 30.0) == 40 + 3 + 5 + 2 + 5


@pytest.fixture
def simulated(monkeypatch: pytest.MonkeyPatch) -> None:
    """An instance's death costs 1 s, any other 100 s; ten in a run."""

    def one(cell, dying):
        victims = [] if dying is None else [f.victim for f in itertools.islice(dying, 10)]
        lost = sum(1.0 if isinstance(victim, int) else 100.0 for victim in victims)
        seconds = 100.0 * subject.STEPS + lost
        return SimpleNamespace(
            seconds=seconds, step_seconds=(100.0,) * subject.STEPS, steps_per_second=0.01,
            throughput=1000.0 / seconds, deaths={"any": len(victims)} if victims else {},
        )  # fmt: skip

    monkeypatch.setattr(subject, "one", one)


def test_the_report(simulated, capsys: pytest.CaptureFixture[str]) -> None:
    given = arguments(subject, "--devices", "64", "--devices", "128")
    report = subject.run(given)
    assert len(report["rows"]) == 2 * (3 + 2)
    rows = {(r["devices"], r["bound"], r["recovery"]): r for r in report["rows"]}
    ours = rows[64, 3, "resume"]
    assert (ours["s lost/instance"], ours["s lost/learner"]) == (1, 100)
    assert (ours["deaths/instance"], ours["deaths/learner"]) == (30, 30)
    lost = (16 * 1 + 48 * 100) / (subject.MTBF_HOURS * HOUR)
    assert ours["100x"] == round(1 / (1 + 100 * lost), 4)
    assert rows[64, 0, "resume"]["100x"] < ours["100x"] < ours["10x"] < ours["1x"] <= 1
    assert subject.SIMULATED not in ours
    assert subject.SIMULATED in rows[128, 3, "resume"]
    assert len(report["targets"]) == 3
    every = rows[128, 0, "restart, checkpoint every 1"]
    seldom = rows[128, 0, "restart, checkpoint every 20"]
    assert seldom["100x"] < every["100x"] < 1


def test_deaths_of_one_kind_are_never_close_together() -> None:
    cell = Cell(64, "rhymeflow", 3)
    for kind, victims in (("instance", set(range(16))), ("learner", {"learner"})):
        drawn = list(itertools.islice(subject.apart(cell, kind, seed=3), 500))
        assert {failure.victim for failure in drawn} == victims
        assert drawn[-1].at / 500 == pytest.approx(subject.APART, rel=0.05)
        assert min(b.at - a.at for a, b in itertools.pairwise(drawn)) > subject.APART / 2


def test_the_setting_is_one_that_can_be_simulated() -> None:
    for schedule, bound in subject.SCHEDULES:
        config = subject.configure(Cell(64, schedule, bound))
        assert config.schedule.bound == bound
        assert config.learner.groups_per_batch == 32
        assert config.simulation.colocated == (bound == 0)
