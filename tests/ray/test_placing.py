"""What the runtime asks of Ray: CPUs, GPUs and order. Ray itself is made up."""

from __future__ import annotations

from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from rhymeflow.config import Config
from rhymeflow.runtime.base import Resources

runtime = pytest.importorskip("rhymeflow.runtime.ray.runtime", exc_type=ImportError)


class Nodes:
    """A connected Ray of these nodes, with what its actors were asked for."""

    def __init__(self, *nodes: dict[str, float]) -> None:
        self.asked: dict[str, dict[str, Any]] = {}
        self._nodes = [{"Alive": True, "Resources": node} for node in nodes]
        strategies = SimpleNamespace(PlacementGroupSchedulingStrategy=self._in_bundle)
        self.util = SimpleNamespace(placement_group=self._group, scheduling_strategies=strategies)
        self.groups: list[Any] = []

    def nodes(self) -> list[dict[str, Any]]:
        return self._nodes

    def _group(self, bundles, strategy):
        number = len(self.groups)
        self.groups.append((bundles, strategy))
        return SimpleNamespace(number=number, ready=lambda: f"group {number} has places")

    def _in_bundle(self, group, placement_group_bundle_index):
        return group.number, placement_group_bundle_index

    def remote(self, **options):
        def make(setup, namespace, first):
            self.asked[setup.name] = {**options, "first": first, "threads": setup.num_threads}
            answer = SimpleNamespace(future=lambda: SimpleNamespace(add_done_callback=id))
            method = SimpleNamespace(options=lambda **_: None, remote=lambda: answer)
            return SimpleNamespace(deliver=method, collect=method, placement=method)

        return lambda actor: SimpleNamespace(remote=make)


H100 = {"CPU": 100.0, "GPU": 8.0}


def started(nodes: Nodes, has_gpus: bool = True, **sections: Any) -> dict[str, dict[str, Any]]:
    """A learner of two ranks and an instance of two GPUs."""
    config = Config.model_validate(
        {
            "runtime": "ray",
            "learner": {"num_ranks": 2},
            "rollout": {"engine": "vllm", "vllm_tensor_parallel_size": 2},
            **sections,
        }
    )
    found = runtime.RayRuntime(config, Path("run"), Path("logs"))
    found._ray, found._has_gpus = nodes, has_gpus
    if has_gpus:
        found._num_threads = runtime.library.cores_of_gpu(nodes)
    found.start("learner", "learner", Resources(None))
    found.start("learner_rank", "rank-1", Resources(None, number=1))
    found.start("rollout", "rollout-0", Resources(None))
    return nodes.asked


def test_instances_wait_until_the_ranks_have_their_places() -> None:
    nodes = Nodes(H100, H100)
    asked = started(nodes)
    assert nodes.groups == [([{"CPU": 12, "GPU": 1}] * 2, "PACK")]
    assert asked["learner"]["scheduling_strategy"] == (0, 0)
    assert asked["rank-1"]["scheduling_strategy"] == (0, 1)
    assert [asked[name]["first"] for name in ("learner", "rank-1")] == [None, None]
    assert asked["rollout-0"]["first"] == "group 0 has places"
    assert asked["rollout-0"]["scheduling_strategy"] == "SPREAD"


def test_a_worker_with_a_gpu_has_the_cores_of_that_gpu() -> None:
    """On the node that has the fewest; a head without GPUs does not count."""
    asked = started(Nodes({"CPU": 4.0}, H100, {"CPU": 64.0, "GPU": 8.0}))
    assert asked["learner"]["threads"] == asked["rollout-0"]["threads"] == 8
    assert (asked["learner"]["num_cpus"], asked["learner"]["num_gpus"]) == (8, 1)
    assert (asked["rollout-0"]["num_cpus"], asked["rollout-0"]["num_gpus"]) == (16, 2)


def test_without_gpus_a_worker_has_one_core() -> None:
    asked = started(Nodes({"CPU": 64.0}), has_gpus=False)
    assert asked["learner"]["threads"] == 1
    assert (asked["rollout-0"]["num_cpus"], asked["rollout-0"]["num_gpus"]) == (2, 0)
