"""What the runtime asks of Ray: CPUs, GPUs and order. Ray itself is made up."""

from pathlib import Path
from unittest.mock import MagicMock

import pytest

from rhymeflow.config import Config
from rhymeflow.runtime.base import Resources

pytestmark = pytest.mark.ray
H100S = {"CPU": 100.0, "GPU": 8.0}


@pytest.fixture(autouse=True)
def after_the_cluster(cluster):
    """Ray reads settings of the other tests' cluster when it is imported."""


def started(*nodes: dict[str, float], has_gpus: bool = True) -> tuple[MagicMock, list, list]:
    """Start two ranks and an instance of two GPUs: Ray, and for each actor its options and what it
    is given."""
    from rhymeflow.runtime.ray import runtime

    ray = MagicMock()
    ray.nodes.return_value = [{"Alive": True, "Resources": node} for node in nodes]
    sizes = {"rollout": {"engine": "vllm", "vllm_tensor_parallel_size": 2}}
    config = Config.model_validate({"runtime": "ray", "learner": {"num_ranks": 2}, **sizes})
    found = runtime.RayRuntime(config, Path("run"), Path("logs"))
    found._ray, found._has_gpus = ray, has_gpus
    if has_gpus:
        found._num_threads = runtime.library.cores_of_gpu(ray)
    found.start("learner", "learner", Resources(None))
    found.start("learner_rank", "learner-rank-1", Resources(None, number=1))
    found.start("rollout", "rollout-0", Resources(None))
    given = ray.remote.return_value.return_value.remote.call_args_list
    return ray, [call.kwargs for call in ray.remote.call_args_list], [call.args for call in given]


def test_instances_wait_until_the_ranks_have_their_places():
    ray, (*_, options), given = started(H100S, H100S)
    ray.util.placement_group.assert_called_once_with([{"CPU": 12, "GPU": 1}] * 2, strategy="PACK")
    group = ray.util.placement_group.return_value
    in_bundle = ray.util.scheduling_strategies.PlacementGroupSchedulingStrategy
    placed = [(call.args, call.kwargs) for call in in_bundle.call_args_list]
    assert placed == [((group,), {"placement_group_bundle_index": rank}) for rank in (0, 1)]
    assert [first for *_, first in given] == [None, None, group.ready.return_value]
    assert options["scheduling_strategy"] == "SPREAD"


@pytest.mark.parametrize(
    ("nodes", "has_gpus", "threads"),
    [
        ([{"CPU": 4.0}, H100S, {"CPU": 64.0, "GPU": 8.0}], True, 8),  # the node with fewest counts
        ([{"CPU": 64.0}], False, 1),
    ],
)
def test_a_worker_has_the_cores_of_its_gpu(nodes, has_gpus, threads):
    _, (rank, _, instance), given = started(*nodes, has_gpus=has_gpus)
    assert {setup.num_threads for setup, *_ in given} == {threads}
    assert (rank["num_cpus"], rank["num_gpus"]) == (threads, has_gpus)
    assert (instance["num_cpus"], instance["num_gpus"]) == (2 * threads, 2 * has_gpus)
