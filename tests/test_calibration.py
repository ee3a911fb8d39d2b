"""Profiles from logs: coefficients of a cost model that made the log are found again, and a
simulation with them is as fast as what was logged."""

from __future__ import annotations

import random
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st

from rhymeflow import profiles
from rhymeflow.calibration import DecodeFit, Stretch, calibrate, errors, fit_decode, nonnegative
from rhymeflow.config.load import read_config
from rhymeflow.sim.simulate import run, simulate
from rhymeflow.sim.workload import workload

SIZES = (1, 2, 4, 8, 16, 24, 32, 48, 64, 96, 128)
LENGTHS = (30, 120, 300, 450)


def timings(truth: DecodeFit) -> list[Stretch]:
    """What the cost model makes of ten iterations."""
    exact = [Stretch(0, 10, n, n * length, True) for n in SIZES for length in LENGTHS]
    return [each._replace(seconds=truth.seconds(each)) for each in exact]


def off(fit: DecodeFit, found: list[Stretch]) -> float:
    return errors(map(fit.seconds, found), (each.seconds for each in found)).mean


@settings(max_examples=15, deadline=None)
@example(k1=1e-6, kink=4.5, k3=6.8445e-4, c=2**-7, k4=0.0)  # a kink between two coarse places
@given(
    k1=st.floats(1e-8, 1e-6),
    kink=st.floats(4, 100),
    k3=st.floats(1e-5, 1e-3),
    c=st.floats(1e-4, 1e-1),
    k4=st.floats(0, 1e-2),
)
def test_exact_timings_are_met(k1: float, kink: float, k3: float, c: float, k4: float) -> None:
    found = timings(DecodeFit(k1, k3 * kink + c, k3, c, k4))
    fit = fit_decode(found)
    assert off(fit, found) < 1e-3  # kinks are tried 1/64 of a trajectory apart
    assert fit.k1 == pytest.approx(k1, rel=0.05, abs=2e-3 * (k3 * kink + c + k4) / 450)


@settings(max_examples=20, deadline=None)
@given(
    st.lists(
        st.builds(
            Stretch, st.floats(1e-4, 1.0), st.integers(1, 9), st.integers(1, 64),
            st.integers(0, 10_000), st.just(True),
        ),
        min_size=1, max_size=12,
    )
)  # fmt: skip
def test_no_coefficient_is_negative_whatever_is_measured(found: list[Stretch]) -> None:
    fit = fit_decode(found)
    assert min(fit) >= 0
    assert off(fit, found) <= 1.0  # never worse than to say nothing takes time


def test_nonnegative_agrees_with_a_search() -> None:
    """Against every point of a grid around it, for two columns."""
    rng = random.Random(3)
    grid = np.stack(np.meshgrid(*[np.linspace(0, 3, 31)] * 2), axis=-1).reshape(-1, 2)
    for _ in range(20):
        columns = np.array([[rng.uniform(-1, 3), rng.uniform(0, 3)] for _ in range(5)])
        seconds = np.array([rng.uniform(0.5, 2) for _ in range(5)])
        found, loss = nonnegative(columns, seconds)
        assert min(found) >= 0
        others = ((grid @ columns.T / seconds - 1) ** 2).mean(axis=1)
        assert loss <= others.min() + 1e-12


SCHEDULES = {"synchronous": 0, "staleflow": 1, "partial": 2, "rhymeflow": 1}


@pytest.mark.parametrize("schedule", SCHEDULES)
def test_the_log_of_a_run_gives_the_machine_it_ran_on(schedule: str, tmp_path: Path) -> None:
    given = {
        "drafting.window": "off", "learner.max_steps": "20", "schedule.name": schedule,
        "schedule.max_staleness": f"{SCHEDULES[schedule]}", "simulation.tick_seconds": "0.02",
    }  # fmt: skip
    config = read_config("demo", given)
    real = simulate(config, output=tmp_path / "run")
    output = tmp_path / "deeper" / "mine.json"
    found = calibrate(tmp_path / "run", output=output)
    truth, profile = profiles.load("demo-cpu"), profiles.load(str(output))
    assert profile == found.profile
    assert (profile.name, profile.kv_capacity) == ("mine", truth.kv_capacity)
    assert profile.train_token == pytest.approx(truth.train_token)
    assert profile.measure_token == pytest.approx(truth.measure_token)
    assert profile.prefill_token == pytest.approx(truth.prefill_token, rel=0.5)
    assert profile.k1 == pytest.approx(truth.k1, rel=0.3)
    assert profile.k3 == pytest.approx(truth.k3, rel=0.3)
    again = read_config("demo", {**given, "simulation.profile": str(output)})
    predicted = run(again, workload(again, tmp_path / "run"))
    assert predicted.steps_per_second == pytest.approx(real.steps_per_second, rel=0.1)
    assert f"--schedule.cost_model {output}" in found.text(output)
    assert "was not saved: --output FILE.json" in found.text(None)


CLIPPED = {"learner.num_iterations": "2", "learner.off_policy_correction": "proximal"}
"""Around the policy before the step, which takes a pass."""


def test_what_cannot_be_fitted_is_said(tmp_path: Path, refused: Callable[..., str]) -> None:
    (tmp_path / "a.json").mkdir()
    (tmp_path / "b").write_text("")
    small = {"learner.max_steps": "2", "learner.groups_per_batch": "2"}
    simulate(read_config("demo", small), output=tmp_path / "drafted")
    small["drafting.window"] = "off"
    simulate(read_config("demo", small), output=tmp_path / "short")
    beside = {"judged": {"learner.algorithm": "ppo"}, "twice": CLIPPED}
    for name, changes in beside.items():
        simulate(read_config("demo", small | changes), output=tmp_path / name)
    table = [
        # run, output, what is said
        ("none", "x.json", "none: no such directory"),
        ("drafted", "x.json", "a run that is to be fitted has drafting.window = 'off'"),
        *((name, "x.json", "its steps have other passes, too") for name in beside),
        ("short", "x.json", "let it train for more steps"),
        ("short", "a.txt", "ends in .json"),
        ("short", "a.json", "is a directory"),
        ("short", "b/c.json", "cannot be written"),
    ]
    for run_dir, output, said in table:
        given = [str(tmp_path / run_dir), "--output", str(tmp_path / output)]
        assert said in refused("calibrate", *given)
