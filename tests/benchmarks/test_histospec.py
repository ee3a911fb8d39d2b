"""`bench histospec`: the same requests on all sides, history without a future, figures of runs."""

from __future__ import annotations

import argparse
import json
import os
from pathlib import Path

import pytest
import torch

from benchmarks import histospec
from benchmarks.charts import drafting_by_epoch
from benchmarks.histospec import Case, Comparison
from benchmarks.peers import vllm_suffix
from benchmarks.peers.vllm_driver import Made
from benchmarks.rollouts import real_runs, record
from benchmarks.rollouts.policy import Policy, drain, one_core
from benchmarks.rollouts.recorded import Rollout, save
from rhymeflow.core.types import TrajectoryId
from rhymeflow.errors import UserError
from rhymeflow.store.writer import SqliteTrajectoryStore


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
    case = Case("demo", 8, epoch=1, windows=("cost", "aimd"))
    rows, targets = Comparison(case, policy, runs).measure(repeats=2)
    assert [row["window"] for row in rows] == ["off", "cost", "aimd"]
    assert [row["identical"] for row in rows] == [1.0, 1.0, 1.0]
    assert rows[0]["tokens/step"] == 1.0
    assert rows[2]["tokens/step"] > 1.5, "the same weights said much the same an epoch ago"
    assert [target.name for target in targets] == ["histospec/demo/T1.0/epoch-1/batch-8"]


def test_history_ends_before_the_epoch(policy: Policy, runs: Path) -> None:
    history, rows = histospec._material(Case("demo", 8, epoch=2), runs)
    assert {rollout.epoch for rollout in history} == {0, 1}
    assert sorted(rows) == list(range(12))
    history, _ = histospec._material(Case("demo", 8, epoch=0), runs)
    assert history == []


def test_slices_are_new_requests_and_cover_each_response_once(policy: Policy) -> None:
    case = Case("demo", 1, epoch=1)
    slices = list(histospec._slices([5, 3], case, policy))
    made = [request.id for make in slices for request in make()]
    assert made == [(row, sample) for row in (5, 3) for sample in range(8)]
    assert slices[0]()[0] is not slices[0]()[0]
    assert {request.noise_key.epoch for request in slices[0]()} == {1}
    rhyming = next(iter(histospec._slices([5, 3], Case("demo", 1, rhymes=True), policy)))
    assert {request.noise_key.epoch for request in rhyming()} == {0}


def test_every_part_has_cases_and_the_issues_targets_are_among_them() -> None:
    parts = [part for part in histospec.PARTS if part not in ("runs", "vllm")]
    cases = [case for part in parts for case in histospec.cases(part) if case.least is not None]
    found = {case.name: case.least for case in cases}
    assert len(found) == len(cases), "a target's name stands for one case"
    assert found["demo/T1.0/epoch-2/batch-128"] == 2.5
    assert found["smollm2/T1.0/epoch-2/batch-8"] == 0.98
    assert found["smollm2-rhyming/T1.0/epoch-2/batch-8"] == 1.5


def test_unknown_part_is_said() -> None:
    with pytest.raises(UserError, match="no part 'dmo'; there are demo"):
        histospec.run(argparse.Namespace(parts="dmo"))


def test_facts_of_a_run(tmp_path: Path) -> None:
    rows = [
        {
            "step": step,
            "time": 10.0 + (step if step <= 16 else 16 + (step - 16) / 2),
            "reward": step / 20,
            "completions/mean_length": 5.0,
            "step_time": 1.0 if step <= 16 else 0.5,
            "rollout/tokens_per_s": 100.0,
            "idle/rollout": 0.5,
            "idle/learner": 0.25,
            "draft/time_saved": 1.0,
            "draft/mean_acceptance_length": 3.0,
            "draft/acceptance_rate": 0.5,
        }
        for step in range(1, 21)
    ]
    lines = [{"step": 0, "eval/reward": 0.5}, *rows, {"step": 20, "eval/reward": 0.75}]
    (tmp_path / "metrics.jsonl").write_text("".join(json.dumps(line) + "\n" for line in lines))
    found = real_runs.facts(tmp_path, 20)
    assert found["steps/s, later epochs"] == 2.0
    assert found["steps/s"] == 17 / 16
    assert found["rollout tokens/s, later epochs"] == 200.0
    assert found["held out"] == [0.5, 0.75]
    assert found["reward by epoch"] == pytest.approx([0.425, 0.925])
    assert found["draft/mean_acceptance_length"] == 3.0


def test_drafting_is_read_by_epoch_and_drawn_from_the_rows(tmp_path: Path) -> None:
    """Two epochs of steps: 2 tokens an iteration in the second; half of what was drafted kept."""
    store = SqliteTrajectoryStore(tmp_path / "events.db")
    for group, (epoch, steps, drafted) in enumerate(((0, 6, 0), (1, 3, 6), (1, 3, 6), (2, 1, 5))):
        store.put_group(group, row=0, epoch=epoch, prompt="?", prompt_tokens=[1], columns={})
        store.put_segment(
            TrajectoryId(group, 0), start=0, version=0, instance="rollout-0", steps=steps,
            drafted=drafted, tokens=[7] * 6, logprobs=[-0.5] * 6,
        )  # fmt: skip
    store.commit()
    store.close()
    row = {"completions/mean_length": 3.0, "step_time": 2.0, "idle/rollout": 0.5}
    lines = [{**row, "rollout/tokens_per_s": 100.0 * (1 + step // 16)} for step in range(32)]
    (tmp_path / "metrics.jsonl").write_text("".join(json.dumps(line) + "\n" for line in lines))
    found = real_runs.drafting(tmp_path, 32)
    assert found == {
        "tokens/step by epoch": [1.0, 2.0],
        "accepted by epoch": [0.5],
        "rollout tokens/s by epoch": [200.0, 400.0],
    }
    run = {"steps/s": 1.0, **found}
    rows = [{"part": "demo"}, {"part": "runs", **real_runs._row("cost", [run, run], [1.0, 1.0])}]
    (curve,) = real_runs.curves(rows)
    assert (curve.label, curve.tokens_per_step, curve.accepted) == (
        "with drafts",
        [1.0, 2.0],
        [0.5],
    )
    assert curve.tokens_per_s == [200.0, 400.0]
    drafting_by_epoch([curve], tmp_path / "a.png")
    assert (tmp_path / "a.png").stat().st_size > 1000


class Fake:
    """A side that says the same in every pass, at a speed of its own."""

    def __init__(self, seconds: float, last: int) -> None:
        self.seconds, self.last = seconds, last

    def generate(self, prompts: list[list[int]], lengths: list[int], temperature: float) -> Made:
        texts = [[7] * (length - 1) + [self.last] for length in lengths]
        return Made(texts, self.seconds)


def test_greedy_responses_are_compared_before_speeds() -> None:
    sides = {
        "rhymeflow": Fake(2.0, 1),
        "rhymeflow, drafts": Fake(0.5, 1),
        "vllm": Fake(2.0, 2),
        "vllm, suffix": Fake(1.0, 3),
    }
    rows, (target,) = vllm_suffix._passes(sides, [[1], [2]], 0.0)
    assert [row["identical"] for row in rows] == [1.0, 1.0, 1.0, 0.0]
    assert [row["ratio"] for row in rows] == [1.0, 4.0, 1.0, 2.0]
    assert (target.name, target.value) == ("histospec/vllm-suffix/greedy", 2.0)
    rows, (target,) = vllm_suffix._passes(sides, [[1], [2]], 1.0)
    assert "identical" not in rows[0]
    assert target.name == "histospec/vllm-suffix/T1.0"


def test_all_cores_are_there_again_for_what_is_started_later() -> None:
    before, threads = os.sched_getaffinity(0), torch.get_num_threads()
    with one_core():
        assert os.sched_getaffinity(0) == {min(before)}
        assert torch.get_num_threads() == 1
    assert os.sched_getaffinity(0) == before
    torch.set_num_threads(threads)
