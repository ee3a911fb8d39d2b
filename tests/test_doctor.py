"""What `rhymeflow doctor` says of GPUs, their driver and a cluster; `test_cli.py` has the rest."""

import resource
from types import SimpleNamespace

import pytest
import torch

from rhymeflow import cli, doctor
from rhymeflow.config.load import read_config
from rhymeflow.sandbox import programs


@pytest.fixture
def gpus(monkeypatch):
    """Make this a machine with GPUs of this kind, for all that doctor asks of torch."""

    def machine(count=2, major=9, driver=(13, 0), build="13.0", peers=True, link="NV18"):
        properties = SimpleNamespace(name="NVIDIA H100", total_memory=80e9, major=major)
        rows = [
            [f"GPU{a}", *("X" if a == str(b) else link for b in range(count)), "0-15"] for a in "01"
        ]
        topology = "\tGPU0\tGPU1\tCPU\n" + "".join("\t".join(row) + "\n" for row in rows)
        monkeypatch.setattr(torch.version, "cuda", build)
        monkeypatch.setattr(torch.cuda, "device_count", lambda: count)
        monkeypatch.setattr(torch.cuda, "get_device_properties", lambda index: properties)
        monkeypatch.setattr(torch.cuda, "can_device_access_peer", lambda a, b: peers)
        monkeypatch.setattr(doctor, "_driver_cuda", lambda: driver)
        programs.standing()  # asks in a process of its own, and remembers the answer
        ran = SimpleNamespace(stdout=topology)
        monkeypatch.setattr(doctor.subprocess, "run", lambda *_, **__: ran)

    return machine


def found(word, config=None):
    return [line for line in doctor.examine(config).splitlines() if word in line]


def test_gpus_that_fit_the_driver_are_ok(gpus):
    gpus()
    assert [line[:2] for line in found("NVIDIA H100, 80 GB")] == ["ok", "ok"]
    (peers,) = found("NVLink")
    assert peers == "ok  2 GPUs copy to each other, 2 of 2 pairs by NVLink"
    gpus(link="PHB")
    assert "0 of 2 pairs by NVLink" in found("NVLink")[0]
    assert not found("!!")


@pytest.mark.parametrize(
    ("machine", "said"),
    [
        ({"driver": None, "count": 0}, "none is loaded: install one"),
        (
            {"driver": (12, 4), "count": 0},
            "the driver is for CUDA 12.4: update it, or take an older torch",
        ),
        ({"count": 0}, "finds no GPU, the CPU is used: compare `nvidia-smi`; CUDA_VISIBLE"),
        ({"major": 7}, "without bfloat16: use --model.dtype float32"),
        ({"peers": False}, "GPUs 0 and 1 copy through main memory, so NCCL is slow"),
    ],
)
def test_what_is_wrong_is_one_line_with_what_to_do(gpus, machine, said):
    gpus(**machine)
    wrong = [line for line in doctor.examine().splitlines() if line.startswith("!!")]
    assert len(wrong) == (2 if machine.get("major") else 1)
    assert said in wrong[0]


def test_a_driver_of_the_same_major_version_will_do(gpus):
    gpus(driver=(13, 0), build="13.2")
    assert not found("update it")


@pytest.mark.parametrize(("ranks", "instances", "sign"), [(1, 1, "ok"), (1, 2, "!!"), (2, 1, "!!")])
def test_a_run_is_compared_with_the_gpus(gpus, ranks, instances, sign):
    gpus(count=2)
    fields = {"learner.num_ranks": str(ranks), "rollout.num_instances": str(instances)}
    config = read_config("demo", fields | {"model.device": "cuda"})
    said = f"take {ranks + instances} GPUs, and this machine has 2" if sign == "!!" else "enough"
    assert found(said, config)[0].startswith(sign)
    assert not found(said, read_config("demo", {"model.device": "cpu"}))


def test_limits_and_versions(monkeypatch, tmp_path):
    (tmp_path / "file").write_text("")
    monkeypatch.setenv("NUMBA_CACHE_DIR", str(tmp_path / "file"))
    monkeypatch.setattr(resource, "getrlimit", lambda _: (8_388_608, 8_388_608))
    monkeypatch.setattr(doctor, "_version", lambda name: "0.33.0" if name == "vllm" else "1")
    wrong = [line for line in doctor.examine().splitlines() if line.startswith("!!")]
    assert "NUMBA_CACHE_DIR" in wrong[0]
    assert wrong[1] == "!!  vLLM 0.33.0 is not supported: pip install 'vllm==0.32.*'"
    assert found("locked")[0].startswith("--  8 MB of a process's memory can be locked")


def test_a_cluster_that_is_gone_is_a_finding(monkeypatch, tmp_path):
    ray = SimpleNamespace(init=lambda *_, **__: (_ for _ in ()).throw(ConnectionError("gone")))
    monkeypatch.setitem(__import__("sys").modules, "ray", ray)
    monkeypatch.setattr(doctor, "RAY_CLUSTER", tmp_path)
    assert found("Ray's cluster")[0].startswith("!!  Ray's cluster in ")
    nodes = [{"Alive": alive, "Resources": {"GPU": 8.0, "object_store_memory": size * 1e9}}
             for alive, size in ((True, 200), (True, 90), (False, 1))]  # fmt: skip
    ray.init, ray.nodes, ray.shutdown = lambda *_, **__: None, lambda: nodes, lambda: None
    assert "2 nodes with 16 GPUs; the least object store has 90.0 GB" in found("Ray: ")[0]
    config = read_config("demo", {"runtime": "ray", "learner.num_ranks": "17"})
    assert "take 18 GPUs, and Ray's cluster has 16" in found("!!  rollout.num_instances", config)[0]


def test_a_recipe_can_be_named(capsys):
    assert cli.main(["doctor", "nonesuch"]) == 2
    assert "nonesuch" in capsys.readouterr().err
