"""Launch files: shells and Kubernetes accept their form, this command line their commands, and
they ask for the GPUs that the recipe is planned for."""

import re
import shlex
import subprocess
import tomllib
from pathlib import Path
from typing import Any

import pytest

from rhymeflow import cli
from rhymeflow.cli import training
from rhymeflow.config import yaml
from rhymeflow.config.load import read_config

LAUNCH = Path(__file__).parents[2] / "examples" / "cluster"
SHELLS = ["ray_job.sh", "slurm.sbatch"]


def text(name: str) -> str:
    return (LAUNCH / name).read_text()


@pytest.mark.parametrize("name", SHELLS)
def test_a_shell_can_read_it(name):
    subprocess.run(["bash", "-n", LAUNCH / name], check=True, timeout=20)
    assert "set -euo pipefail" in text(name)


def commands(name: str) -> list[list[str]]:
    """The commands of rhymeflow, with what a shell would put in for its variables."""
    if name.endswith(".yaml"):
        return [shlex.split(yaml.read(text(name), "job")[1]["spec"]["entrypoint"])[1:]]
    whole = re.sub(r"\\\n\s*", " ", text(name))
    default = re.search(r"recipe=\$\{1:-(\w+)\}", whole)
    given = {"recipe": default[1] if default else "", "run_dir": "runs/a", "shared": "s3://b/a"}
    found = []
    for line in whole.splitlines():
        if line.startswith("#") or "rhymeflow " not in line.partition("#")[0]:
            continue
        command = re.search(r"rhymeflow (train|resume) [^|&]*", line)
        assert command is not None, line
        words = shlex.split(re.sub(r"\$(\w+)", lambda m: given[m[1]], command[0]))
        found.append(words[1:])
    return found


@pytest.mark.parametrize("name", [*SHELLS, "kuberay_rayjob.yaml"])
def test_its_commands_are_commands(name, monkeypatch):
    seen: list[Any] = []

    def train(args: Any) -> int:
        config = read_config(args.recipe, args.overrides)
        assert config.runtime == "ray"
        if not args.dry_run:
            assert (config.ray.address, bool(config.run.output_dir)) == ("auto", True)
            assert config.run.checkpoint_dir.endswith("/checkpoints"), "all nodes see them"
            assert config.run.backup.endswith("/backup"), "a requeued job begins with it"
        seen.append("train")
        return 0

    monkeypatch.setattr(training, "train", train)
    monkeypatch.setattr(training, "resume", lambda args: seen.append("resume") or 0)
    for command in commands(name):
        assert cli.main(command) == 0, command
    assert "train" in seen
    assert ("resume" in seen) == (name == "slurm.sbatch")


def test_the_image_has_the_versions_that_pyproject_allows():
    root = LAUNCH.parents[1]
    project = tomllib.loads((root / "pyproject.toml").read_text())["project"]
    extras = project["optional-dependencies"]
    allowed = [*project["dependencies"], *extras["ray"], *extras["vllm"]]
    dockerfile = (root / "Dockerfile").read_text()
    pins = [re.sub(r"\[.*\]", "", pin) for pin in re.findall(r'"([a-z]+[^"]*>=[^"]+)"', dockerfile)]
    assert {re.match("[a-z]+", pin)[0] for pin in pins} == {"torch", "transformers", "vllm", "ray"}
    assert set(pins) <= set(allowed)
    assert "transformers>=5.19,<5.20" in pins, "the narrower range, which vLLM has"
    (own,) = re.findall(r'"/src\[([a-z,]+)\]"', dockerfile)
    assert {"ray", "vllm"} <= set(own.split(",")) <= set(extras)
    copied = {
        name for line in re.findall("^COPY (.*) /src", dockerfile, re.M) for name in line.split()
    }
    ignored = (root / ".dockerignore").read_text().split()
    assert {name.removeprefix("!") for name in ignored if name.startswith("!")} == copied
    assert all((root / name).exists() for name in copied)
    assert re.findall("^USER (.*)", dockerfile, re.MULTILINE)[-1] != "root"


def test_slurm_gives_the_gpus_of_its_recipe():
    cluster = read_config("qwen3_8b_16x8").cluster
    options = dict(re.findall(r"^#SBATCH --([\w-]+)=(\S+)", text("slurm.sbatch"), re.MULTILINE))
    assert int(options["nodes"]) == cluster.nodes
    assert int(options["gpus-per-node"]) == cluster.gpus_per_node
    assert options["ntasks-per-node"] == "1", "srun starts one Ray on each node"
    assert all(
        line.startswith("#") for line in text("slurm.sbatch").partition("\nset ")[0].splitlines()
    )


def test_kubernetes_gives_the_gpus_of_its_recipe():
    _, job = yaml.read(text("kuberay_rayjob.yaml"), "job")
    assert (job["apiVersion"], job["kind"]) == ("ray.io/v1", "RayJob")
    spec = job["spec"]["rayClusterSpec"]
    cluster = read_config(shlex.split(job["spec"]["entrypoint"])[2]).cluster
    assert spec["rayVersion"].startswith("2.60")
    groups = [(1, spec["headGroupSpec"])] + [(g["replicas"], g) for g in spec["workerGroupSpecs"]]
    assert sum(count for count, _ in groups) == cluster.nodes
    for _, group in groups:
        assert "rayStartParams" in group
        pod = group["template"]["spec"]
        (container,) = pod["containers"]
        wanted = container["resources"]
        assert wanted["limits"] == wanted["requests"]
        assert int(wanted["limits"]["nvidia.com/gpu"]) == cluster.gpus_per_node
        assert int(wanted["limits"]["memory"].removesuffix("Gi")) * 2**30 <= cluster.memory_gb * 1e9
        mounted = {mount["name"] for mount in container["volumeMounts"]}
        assert mounted == {volume["name"] for volume in pod["volumes"]} == {"runs", "shm"}
