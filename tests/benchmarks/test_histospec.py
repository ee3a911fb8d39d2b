"""`bench histospec`: the same requests on both sides, history without a future, the cases."""

from __future__ import annotations

import argparse
import os
from pathlib import Path

import pytest
import torch

from benchmarks import histospec
from benchmarks.histospec import Case, Comparison
from benchmarks.rollouts import record
from benchmarks.rollouts.policy import Policy, drain, one_core
from benchmarks.rollouts.recorded import Rollout, save
from rhymeflow.errors import UserError


@pytest.fixture(scope="module")
def policy() -> Policy:
    return Policy(record.configuration("demo"))


@pytest.fixture
def runs(policy: Policy, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A recording of the demo: three epochs over twelve prompts, all with the recipe's weights."""
    rollouts = []
    for epoch in range(3):
        requests = policy.requests(range(12), epoch, 1.0)
        drain(policy.engine(96), requests)
        for request, reward in zip(requests, policy.rewards(requests), strict=True):
            row, _, sample = request.noise_key
            rollouts.append(
                Rollout(row, epoch, 0, sample, epoch, 100 * epoch + row,
                        request.prompt_ids, request.tokens, reward)
            )  # fmt: skip
    save(tmp_path / "demo.npz", rollouts)
    monkeypatch.setattr(record, "checkpoint", lambda name, folder, step: None)
    return tmp_path


def test_the_demos_policy_is_judged(policy: Policy) -> None:
    requests = policy.requests(range(4), 0, 0.0)
    drain(policy.engine(32), requests)
    rewards = policy.rewards(requests)
    assert set(rewards) <= {0.0, 1.0}
    assert rewards[:8] == [rewards[0]] * 8, "greedy members are one response"


def test_drafts_change_speed_only(
    policy: Policy, runs: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(histospec, "REQUESTS", {8: 16})
    rows, target = Comparison(Case("demo", 8), policy, runs).measure(repeats=2)
    assert [row["window"] for row in rows] == ["off", "cost"]
    assert [row["identical"] for row in rows] == [1.0, 1.0]
    assert (rows[0]["mean acceptance length"], rows[0]["ratio"]) == (1.0, 1.0)
    assert rows[1]["mean acceptance length"] > 1.5, "the same weights, two epochs ago"
    assert target.name == "histospec/demo/T1.0/epoch-2/batch-8"
    assert target.value == pytest.approx(rows[1]["ratio"], abs=1e-3)


def test_history_ends_before_the_epoch(policy: Policy, runs: Path) -> None:
    history, rows = histospec.material(Case("demo", 8), runs)
    assert {rollout.epoch for rollout in history} == {0, 1}
    assert sorted(rows) == list(range(12))


def test_slices_are_new_requests_and_cover_each_response_once(policy: Policy) -> None:
    slices = list(histospec.slices([5, 3], Case("demo", 1), policy))
    ids = [request.id for make in slices for request in make()]
    assert ids == [(row, sample) for row in (5, 3) for sample in range(8)]
    assert slices[0]()[0] is not slices[0]()[0]
    assert {request.noise_key.epoch for request in slices[0]()} == {2}
    rhyming = next(iter(histospec.slices([5, 3], Case("demo", 1, rhymes=True), policy)))
    assert {request.noise_key.epoch for request in rhyming()} == {0}


def test_every_part_has_cases_and_the_published_targets_are_among_them() -> None:
    cases = [case for part in histospec.PARTS if part != "runs" for case in histospec.cases(part)]
    found = {case.name: case.target for case in cases}
    assert len(found) == len(cases) == 21, "a target's name stands for one case"
    assert found["demo/T1.0/epoch-2/batch-128"] == 2.5
    assert found["smollm2/T1.0/epoch-2/batch-8"] == 0.98
    assert found["smollm2-rhyming/T1.0/epoch-2/batch-8"] == 1.5
    assert Case("smollm2", 8, rhymes=True).history == "smollm2-rhyming"
    assert Case("demo", 8, 0.6).history == "demo-0.6"
    assert Case("demo", 8).history == "demo"


def test_unknown_part_is_said() -> None:
    with pytest.raises(UserError, match="no part 'dmo'; there are demo"):
        histospec.run(argparse.Namespace(parts="dmo"))


def test_all_cores_are_there_again_for_what_is_started_later() -> None:
    before, threads = os.sched_getaffinity(0), torch.get_num_threads()
    with one_core():
        assert os.sched_getaffinity(0) == {min(before)}
        assert torch.get_num_threads() == 1
    assert os.sched_getaffinity(0) == before
    torch.set_num_threads(threads)
