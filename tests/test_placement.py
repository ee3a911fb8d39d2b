"""GPUs of this machine: which worker gets which, and what is refused. The driver's answer is made
up."""

import os
import re
import subprocess
import sys
from typing import Any

import pytest
import torch

from rhymeflow import emulation, placement
from rhymeflow.config import Config
from rhymeflow.config.load import read_config
from rhymeflow.learner.ranks import own_gpu
from rhymeflow.runtime import train
from rhymeflow.runtime.local import LocalRuntime
from rhymeflow.utils import gpus
from tests.refused import refusal


@pytest.fixture
def machine(monkeypatch):
    """Make this a machine with so many GPUs."""

    def of(num_gpus: int, visible: str | None = None) -> None:
        monkeypatch.setattr(gpus, "installed", lambda: num_gpus)
        monkeypatch.setattr(placement, "usable_cores", lambda: 16)
        monkeypatch.delenv(gpus.VISIBLE, raising=False)
        if visible is not None:
            monkeypatch.setenv(gpus.VISIBLE, visible)

    return of


def configured(ranks: int = 1, instances: int = 1, each: int = 1, **sections: Any) -> Config:
    rollout = {"engine": "vllm", "num_instances": instances, "vllm_tensor_parallel_size": each}
    sections["rollout"] = rollout | sections.get("rollout", {})
    sections["learner"] = {"num_ranks": ranks} | sections.get("learner", {})
    return Config.model_validate(sections)


def all_of(config: Config) -> list[tuple[str, ...]]:
    found = placement.gpus_here(config)
    ranks = range(placement.num_ranks(config))
    instances = range(config.rollout.num_instances)
    return [
        *(tuple(placement.gpus_of(config, "learner_rank", rank, found)) for rank in ranks),
        *(tuple(placement.gpus_of(config, "rollout", each, found)) for each in instances),
    ]


def test_a_variable_limits_what_there_is(machine):
    for visible, found in {
        None: "0 1 2 3", "2, 3": "2 3", "GPU-5f1,MIG-3": "GPU-5f1 MIG-3", "1,-1,2": "1",
        "1,4,2": "1", "": "",
    }.items():  # fmt: skip
        machine(4, visible=visible)
        assert gpus.visible() == tuple(found.split()), visible


def test_without_a_driver_there_are_none(monkeypatch):
    monkeypatch.setattr(gpus, "_LIBRARY", "libno-such-driver.so.1")
    monkeypatch.setenv(gpus.VISIBLE, "0,1")
    gpus.installed.cache_clear()
    assert gpus.visible() == ()
    gpus.installed.cache_clear()


def test_ranks_come_first_and_split_instances_have_several(machine):
    machine(8)
    pairs = [("2", "3"), ("4", "5"), ("6", "7")]
    assert all_of(configured(2, 3, 2)) == [("0",), ("1",), *pairs]
    machine(8, visible="4,5,7")
    assert all_of(configured(1, 2)) == [("4",), ("5",), ("7",)]
    machine(2)
    assert all_of(configured(1, 2, learner={"max_steps": 0})) == [("0",), ("1",)]


@pytest.mark.parametrize("own", [("0",), ("1",), ()])
def test_the_only_gpu_is_everybodys_and_none_is_nobodys(machine, own):
    machine(4, visible=",".join(own))
    assert all_of(configured(1, 2)) == [own] * 3
    assert all_of(configured(1, 2, model={"device": "cpu"})) == [()] * 3
    assert placement.gpus_here(emulation.resolved(read_config("emulated"))) == ()


TOO_MANY = {
    "more than there are": (4, None, (2, 3, 1), "3 x .* = 1 and learner.num_ranks = 2 take 5 GPUs"),
    "split ones": (4, None, (1, 2, 2), "2 x rollout.vllm_tensor_parallel_size = 2 and .* take 5"),
    "two ranks on one": (1, None, (2, 1, 1), "this machine has 1; a single one is shared by one"),
    "two of many": (8, "0,1", (1, 2, 1), "CUDA_VISIBLE_DEVICES names 2; model.device = 'cpu'"),
}


@pytest.mark.parametrize("case", TOO_MANY)
def test_what_does_not_fit_is_refused(machine, case):
    num_gpus, visible, sizes, said = TOO_MANY[case]
    machine(num_gpus, visible=visible)
    assert re.fullmatch(f".*{said}.*", refusal(placement.gpus_here, configured(*sizes)))


def test_who_sleeps_shares_a_gpu(machine):
    config = configured(rollout={"vllm_sleeps": True}, schedule={"name": "synchronous"})
    machine(1)
    assert placement.gpus_here(config) == ("0",)
    machine(2)
    assert refusal(placement.gpus_here, config) == (
        "rollout.vllm_sleeps: this machine has 2, so learner and engines share none"
    )


@pytest.mark.parametrize(
    ("num_gpus", "config", "share", "threads"),
    [
        (0, configured(), 0.9, 8),
        (2, configured(), 0.9, 8),
        (8, configured(), 0.9, 2),
        (32, configured(), 0.9, 1),
        (1, configured(), 0.4, 8),
        (1, configured(1, 2), 0.2, 5),
        (1, configured(1, 2, learner={"max_steps": 0}), 0.45, 8),
        (1, configured(rollout={"vllm_gpu_memory_utilization": 0.7}), 0.7, 8),
    ],
)
def test_memory_and_threads_follow_from_who_else_is_on_a_gpu(
    machine, tmp_path, num_gpus, config, share, threads
):
    machine(num_gpus)
    found = train.in_force(config, tmp_path)
    with LocalRuntime(found, tmp_path, tmp_path / "logs") as runtime:
        given = runtime._config.rollout.vllm_gpu_memory_utilization
    assert given == pytest.approx(share)
    assert found.rollout.vllm_gpu_memory_utilization == config.rollout.vllm_gpu_memory_utilization
    assert (found.rollout.num_threads, found.learner.num_threads) == (threads, threads)


def test_the_gpu_of_a_rank_is_the_first_that_it_sees(monkeypatch):
    """FSDP2 and NCCL want it by its number, and as the current one."""
    current: list[int] = []
    monkeypatch.setattr(torch.cuda, "set_device", current.append)
    assert own_gpu(torch.device("cpu")) == torch.device("cpu")
    assert own_gpu(torch.device("cuda")) == torch.device("cuda", 0)
    assert current == [0]


def test_what_workers_are_forked_from_has_not_touched_cuda():
    """Else CUDA would refuse to start in each of them, or keep the server's devices."""
    code = (
        "import torch\n"
        "def fail(*_, **__): raise AssertionError('CUDA was asked')\n"
        "for name in ('is_available', 'device_count', 'is_bf16_supported', '_lazy_init'):\n"
        "    setattr(torch.cuda, name, fail)\n"
        "import rhymeflow.workers.preload"
    )
    subprocess.run([sys.executable, "-c", code], check=True, env=dict(os.environ), timeout=100)
