"""What is said where Ray is missing, of another version, or not there. Needs no Ray."""

import re
from contextlib import closing, nullcontext
from importlib import metadata
from unittest.mock import MagicMock

import pytest
import torch

from rhymeflow import check, cli
from rhymeflow.config.load import read_config
from rhymeflow.engine.vllm import installed
from rhymeflow.errors import UserError
from rhymeflow.runtime.ray import library
from rhymeflow.runtime.start import runtime_of, write_config
from rhymeflow.runtime.train import resume
from rhymeflow.store.writer import SqliteTrajectoryStore
from rhymeflow.utils import gpus

RAY = {"runtime": "ray"}


def test_one_line_says_how_to_install_it(monkeypatch):
    def version(name):
        raise metadata.PackageNotFoundError(name)

    monkeypatch.setattr(library.metadata, "version", version)
    with pytest.raises(UserError, match=r"pip install -e '.*\[ray\]'"):
        runtime_of(read_config("demo", RAY))


def test_another_version_is_refused(monkeypatch):
    monkeypatch.setattr(library.metadata, "version", lambda name: "2.99.0")
    with pytest.raises(UserError, match=r"needs ray 2\.60, and 2\.99\.0 is installed"):
        library.load(None)


@pytest.mark.parametrize(
    ("given", "message"),
    [
        ({"rollout.cpus": "[[0]]"}, "is not pinned to cores"),
        ({"rollout.num_instances": "3", "rollout.max_instances": "2"}, "at least"),
        ({"runtime": "local", "rollout.max_instances": "2"}, "needs runtime = 'ray'"),
    ],
)
def test_what_ray_cannot_do_is_refused(given, message):
    with pytest.raises(UserError, match=message):
        read_config("demo", {**RAY, **given})


def test_what_it_cannot_do_yet_is_refused_before_a_run():
    config = read_config("demo", {**RAY, "rollout.python": "python3"})
    with pytest.raises(UserError, match="under the Python of its node"):
        check.before_start(config)


# -- a driver that is not like the nodes ----------------------------------------------------------


CUDA = {**RAY, "ray.address": "10.0.0.1:6379", "model.device": "cuda"}


def test_a_driver_without_gpus_and_vllm_is_not_asked():
    config = read_config("demo", {**CUDA, "rollout.engine": "vllm", "learner.attention": "flex"})
    check.before_start(config)
    here = check.as_here(config)
    assert (here.model.device, here.learner.attention) == ("auto", "auto")
    assert check.is_elsewhere(config)
    alone = read_config("demo", {"model.device": "cuda"})
    assert not check.is_elsewhere(alone)
    assert check.as_here(alone) is alone


def test_a_ray_of_this_machine_alone_has_its_gpus(monkeypatch):
    monkeypatch.setattr(gpus, "installed", lambda: 1)
    config = read_config("demo", {**RAY, "model.device": "cuda"})
    with pytest.raises(UserError, match=r"take 2 GPUs, and this machine has 1; ray\.address names"):
        check.before_start(config)


def test_a_dry_run_says_what_no_node_was_asked(monkeypatch, capsys):
    def unreachable(config):
        raise library.NotReachable("ray.address = '10.0.0.1:6379': nobody answers")

    monkeypatch.setattr(library, "check_version", lambda: None)
    monkeypatch.setattr(library, "num_gpus_of_nodes", unreachable)
    given = {**CUDA, "rollout.num_threads": "null"}
    options = [word for name, value in given.items() for word in (f"--{name}", value)]
    assert cli.main(["train", "demo", "--dry-run", *options]) == 0
    out = capsys.readouterr().out
    says = "# not checked, for no cluster.*nobody answers.*on cuda.*threads by the cores for a GPU"
    assert re.search(says, out, re.DOTALL), out


HEAD, H100S = {"CPU": 4.0}, {"CPU": 96.0, "GPU": 8.0}


@pytest.fixture
def asked(monkeypatch):
    """Ray with these nodes, whose tasks end as given; the nodes that were asked, and about GPUs."""

    def of(nodes, ends):
        ray, found = MagicMock(), []
        ray.exceptions.RayError = LookupError
        ray.nodes.return_value = [
            {"Alive": True, "NodeID": n, "NodeManagerHostname": f"host-{n}", "Resources": each}
            for n, each in enumerate(nodes)
        ]
        ray.util.scheduling_strategies.NodeAffinitySchedulingStrategy = lambda node, soft: node
        task = ray.remote.return_value.return_value
        task.options.side_effect = lambda scheduling_strategy: (
            found.append(scheduling_strategy) or task
        )
        task.remote.side_effect = lambda config, has_gpus: found.append(has_gpus)
        ray.get.side_effect = ends
        monkeypatch.setattr(library, "connected", lambda address, num_cpus: nullcontext(ray))
        return found

    return of


@pytest.mark.parametrize(
    ("nodes", "device", "who", "num_gpus"),
    [
        ((HEAD, H100S, H100S), "cuda", [1, 2, True, True], 16),
        ((HEAD, H100S), "auto", [1, True], 8),
        ((HEAD, H100S), "cpu", [0, 1, False, False], 8),
        ((HEAD,), "cuda", [], 0),  # an autoscaler may bring them
        ((HEAD,), "auto", [0, False], 0),
    ],
)
def test_the_nodes_that_workers_will_be_on_are_asked(asked, nodes, device, who, num_gpus):
    found = asked(nodes, lambda answer, timeout: "")
    assert (
        library.num_gpus_of_nodes(read_config("demo", {**CUDA, "model.device": device})) == num_gpus
    )
    assert found == who


def test_a_resumed_run_asks_them_too(monkeypatch, tmp_path):
    def lacks_vllm(config):
        raise UserError("node a: has no vLLM")

    monkeypatch.setattr(library, "num_gpus_of_nodes", lacks_vllm)
    config = read_config("demo", CUDA)
    write_config(config, tmp_path)
    with closing(SqliteTrajectoryStore(tmp_path / "events.db", is_new=True)) as store:
        started = "2026-01-01T00:00:00Z"
        store.begin_attempt(config.model_dump_json(), now=0.0, started=started)
    with pytest.raises(UserError, match="node a: has no vLLM"):
        resume(tmp_path)


def test_a_node_that_is_lost_while_it_is_asked_stops_nothing(asked):
    asked((HEAD, H100S, H100S), ["", LookupError("The node died."), ""])
    with library.connected("", num_cpus=0) as ray:
        every = ray.nodes()
        ray.nodes.side_effect = [every, [every[0], every[2]]]
    library.num_gpus_of_nodes(read_config("demo", {**CUDA, "model.device": "cpu"}))
    assert ray.nodes.call_count == 3, "looked again after the error"


def test_a_node_that_cannot_run_workers_is_named(asked, monkeypatch):
    asked((HEAD, H100S), LookupError("ray::lacks()\nModuleNotFoundError: No module named 'a'"))
    with pytest.raises(UserError, match="node host-1: Rhymeflow does not run there: ModuleNotF"):
        library.num_gpus_of_nodes(read_config("demo", CUDA))
    there = dict.fromkeys(installed._NEEDED, "1") | dict.fromkeys(installed._VLLM)
    monkeypatch.setattr(installed, "_versions", lambda *_: there)
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    native, vllm = (
        read_config("demo", {**CUDA, "rollout.engine": engine}).model_dump_json()
        for engine in ("native", "vllm")
    )
    assert "has no vLLM" in library.lacks(vllm, has_gpus=False)
    assert library.lacks(native, has_gpus=False) == ""
    assert "the installed torch" in library.lacks(native, has_gpus=True)
