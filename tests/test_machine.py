"""What a machine cannot carry out is said before a run begins, in one line."""

from __future__ import annotations

import os
from typing import Any

import pytest

from rhymeflow import cli, machine
from rhymeflow.config.load import parse_config
from rhymeflow.errors import UserError

TOO_MUCH = {
    # override, what the message must hold
    "learner.cpus": ("[99999]", "learner.cpus: there is no core 99999; cores are 0 to "),
    "learner.num_ranks": ("1000000", "learner.num_ranks = 1,000,000: so many processes take"),
    "rollout.cpus": ("[[99999]]", "rollout.cpus.0: there is no core 99999"),
    "rollout.num_instances": ("100000", "rollout.num_instances = 100,000: so many processes take"),
    "rollout.max_num_seqs": ("1000000000000", "rollout.max_num_seqs = 1,000,000,000,000: "),
    "drafting.history_tokens": ("1000000000000000", "their index takes at least 58,000,000 GB"),
}


@pytest.mark.parametrize("field", TOO_MUCH)
def test_more_than_there_is(field: str, capsys: pytest.CaptureFixture[str]) -> None:
    value, said = TOO_MUCH[field]
    assert cli.main(["train", "demo", "--dry-run", f"--{field}", value]) == 2
    out, err = capsys.readouterr()
    assert said in err
    assert (err.count("\n"), out) == (1, "")


@pytest.mark.parametrize("field", ["rollout.max_num_seqs", "drafting.history_tokens"])
@pytest.mark.parametrize("value", [10**15, 2**62])
def test_a_plan_may_be_for_another_machine_but_not_for_none(
    field: str, value: int, capsys: pytest.CaptureFixture[str]
) -> None:
    arguments = ["train", "demo", "--dry-run=plan"]
    assert cli.main([*arguments, "--learner.cpus", "[99999]"]) == 0
    capsys.readouterr()
    assert cli.main([*arguments, f"--{field}", str(value)]) == 2
    out, err = capsys.readouterr()
    assert f"{field} = {value:,}" in err
    assert (err.count("\n"), out) == (1, "")


def test_what_there_is_passes() -> None:
    cores = sorted(os.sched_getaffinity(0))
    machine.check_machine(parse_config("", {"learner.cpus": str(cores)}))
    history = {"drafting.history_tokens": "1000000000000000", "drafting.window": "off"}
    machine.check_machine(parse_config("", history))


def test_no_core_is_none_to_stay_on() -> None:
    with pytest.raises(UserError, match=r"learner\.cpus: names no core; null pins nothing"):
        machine.check_machine(parse_config("", {"learner.cpus": "[]"}))


def test_a_system_without_pinning(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delattr(os, "sched_setaffinity")
    with pytest.raises(UserError, match=r"rollout\.cpus\.0: this system cannot keep"):
        machine.check_machine(parse_config("", {"rollout.cpus": "[[0]]"}))
    given: dict[str, Any] = {}
    machine.check_machine(parse_config("", given))
