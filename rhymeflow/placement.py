"""Which GPUs each worker of a run gets: ranks first, then instances, each on GPUs of one machine.

A machine with one GPU may share it among one rank and instances that are not split. Where there
are no GPUs, `model.device` is `cpu`, or times are emulated, nobody gets any of its own."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

from rhymeflow.config import Config
from rhymeflow.config.rollout import OWN_GPU, SHARED_GPU
from rhymeflow.errors import UserError
from rhymeflow.utils import gpus
from rhymeflow.utils.cores import usable_cores


@dataclass(slots=True)
class Node:
    """A machine of the cluster, and the workers on its GPUs."""

    number: int
    num_free: int  # GPUs without a worker
    ranks: list[int] = field(default_factory=list)
    instances: list[int] = field(default_factory=list)


def num_ranks(config: Config) -> int:
    """Return how many ranks the run has; 0: it does not train."""
    return config.learner.num_ranks if config.learner.is_used else 0


def shares_gpu(config: Config, num_gpus: int) -> bool:
    """Whether learner and engines of a machine with `num_gpus` compute on one GPU."""
    is_whole = num_ranks(config) <= 1 and config.rollout.vllm_tensor_parallel_size == 1
    return config.runtime == "local" and num_gpus == 1 and is_whole


def check_gpus(config: Config, num_gpus: int, what: str) -> None:
    """Raise `UserError` if the run needs more than `num_gpus`, which the message calls `what`."""
    instances, each = config.rollout.num_instances, config.rollout.vllm_tensor_parallel_size
    needed = instances * each + num_ranks(config)
    if needed > num_gpus and not shares_gpu(config, num_gpus):
        raise UserError(
            f"rollout.num_instances = {instances} x rollout.vllm_tensor_parallel_size = {each} and "
            f"learner.num_ranks = {num_ranks(config)} take {needed} GPUs, and {what}"
        )


# -- this machine ----------------------------------------------------------------------------------


def gpus_here(config: Config) -> tuple[str, ...]:
    """Return the GPUs of this machine that the run may use, as `CUDA_VISIBLE_DEVICES` names them;
    this machine is all that the run has. Raises `UserError` if they are too few for its workers."""
    if config.model.device == "cpu" or config.emulation.is_used:
        return ()  # emulated instances, of a small policy, take what all of them take by default
    found = gpus.visible()
    # Without Ray, torch says why it finds none.
    if found or (config.runtime == "ray" and config.model.device == "cuda"):
        where = "this machine has" if len(found) == gpus.installed() else f"{gpus.VISIBLE} names"
        advice = "model.device = 'cpu' uses none"
        if config.runtime == "ray":
            advice = "ray.address names a cluster of several machines"
        elif len(found) == 1:
            advice = "a single one is shared by one rank and instances of one GPU"
        check_gpus(config, len(found), f"{where} {len(found)}; {advice}")
        if config.rollout.vllm_sleeps and not shares_gpu(config, len(found)):
            raise UserError(
                f"rollout.vllm_sleeps: {where} {len(found)}, so learner and engines share none"
            )
    return found


def gpus_of(config: Config, role: str, number: int, found: Sequence[str]) -> Sequence[str]:
    """Return the GPUs, among those that were `found` here, of a rank or of the instance in a place;
    none if there are none, or for a worker of another role."""
    if role not in ("learner", "learner_rank", "rollout"):
        return ()
    if shares_gpu(config, len(found)):
        return found
    if role != "rollout":
        return found[number : number + 1]
    each = config.rollout.vllm_tensor_parallel_size
    first = num_ranks(config) + number * each
    return found[first : first + each]


def share_of_cores(config: Config) -> int:
    """Return the threads of each rank and instance here, where `num_threads` does not say it: they
    divide the cores of this machine, or have those of their GPUs if there are more GPUs."""
    workers = num_ranks(config) + config.rollout.num_instances
    return max(1, usable_cores() // max(workers, len(gpus_here(config))))


def with_memory_share(config: Config, num_gpus: int) -> Config:
    """Return `config` with the share of a GPU's memory that a vLLM instance takes on a machine with
    `num_gpus`, if it is not given."""
    rollout = config.rollout
    share = rollout.memory_share
    if rollout.vllm_gpu_memory_utilization is None and shares_gpu(config, num_gpus):
        share = (SHARED_GPU if config.learner.is_used else OWN_GPU) / rollout.num_instances
    return config.changed(rollout={"vllm_gpu_memory_utilization": share})


# -- a cluster -------------------------------------------------------------------------------------


def place(config: Config) -> list[Node]:
    """Place the ranks, from node 0 on, and then each instance on the first node with room for it.
    Raises `UserError` if there are too few GPUs, or too few free in one node for an instance."""
    cluster, ranks = config.cluster, num_ranks(config)
    instances, each = config.rollout.num_instances, config.rollout.vllm_tensor_parallel_size
    assert cluster.nodes is not None
    if config.runtime == "local" and cluster.nodes > 1:
        raise UserError(
            f"runtime = 'local' is one machine, and cluster.nodes = {cluster.nodes}: a run on "
            "several needs runtime = 'ray'"
        )
    check_gpus(
        config,
        cluster.nodes * cluster.gpus_per_node,
        f"cluster.nodes = {cluster.nodes} x cluster.gpus_per_node = {cluster.gpus_per_node} are "
        f"{cluster.nodes * cluster.gpus_per_node}",
    )
    if shares_gpu(config, cluster.gpus_per_node):
        return [Node(0, 0, list(range(ranks)), list(range(instances)))]
    nodes = [Node(number, cluster.gpus_per_node) for number in range(cluster.nodes)]
    for rank in range(ranks):
        node = nodes[rank // cluster.gpus_per_node]
        node.ranks.append(rank)
        node.num_free -= 1
    for instance in range(instances):
        free = next((node for node in nodes if node.num_free >= each), None)
        if free is None:
            raise UserError(
                f"rollout.num_instances = {instances}: only {instance} of them find "
                f"rollout.vllm_tensor_parallel_size = {each} free GPUs in one node of "
                f"cluster.gpus_per_node = {cluster.gpus_per_node}, beside learner.num_ranks = "
                f"{ranks}"
            )
        free.instances.append(instance)
        free.num_free -= each
    return nodes
