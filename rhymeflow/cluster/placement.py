"""Which worker is on which GPU of which node.

A rank has a GPU of its own, an instance as many as its model is spread over, all of one node, as
with `runtime: ray`. Ranks come first, from node 0 on; instances fill what is left, in order. With
`runtime: local` one rank and one instance share the first GPU (docs/cluster.md).
"""

from __future__ import annotations

from dataclasses import dataclass, field

from rhymeflow.config import Config
from rhymeflow.errors import UserError


@dataclass(slots=True)
class Node:
    """A machine of the cluster, and what is on its GPUs."""

    number: int
    num_gpus: int
    ranks: dict[int, int] = field(default_factory=dict)
    """Rank: its GPU."""
    instances: dict[int, tuple[int, ...]] = field(default_factory=dict)
    """Instance: its GPUs."""

    @property
    def num_free(self) -> int:
        """GPUs that nothing is on. They are the last ones."""
        return self.num_gpus - len(self.ranks) - sum(map(len, self.instances.values()))

    def next_gpus(self, count: int) -> tuple[int, ...]:
        """The first so many free GPUs."""
        first = self.num_gpus - self.num_free
        return tuple(range(first, first + count))


def shares_gpu(config: Config) -> bool:
    """Whether learner and engine are on one GPU."""
    return config.runtime == "local"


def place(config: Config) -> list[Node]:
    """The nodes of `config.cluster`, with their workers.

    Raises:
        UserError: there are not so many GPUs, or not so many in one node.
    """
    cluster, rollout, learner = config.cluster, config.rollout, config.learner
    assert cluster.nodes is not None
    each, instances = rollout.vllm_tensor_parallel_size, rollout.num_instances
    ranks = learner.num_ranks
    if shares_gpu(config):
        return _on_one_gpu(config)
    needed, there = instances * each + ranks, cluster.nodes * cluster.gpus_per_node
    if needed > there:
        raise UserError(
            f"rollout.num_instances = {instances} x rollout.vllm_tensor_parallel_size = {each} and "
            f"learner.num_ranks = {ranks} take {needed} GPUs, and cluster.nodes = {cluster.nodes} "
            f"x cluster.gpus_per_node = {cluster.gpus_per_node} are {there}"
        )
    nodes = [Node(number, cluster.gpus_per_node) for number in range(cluster.nodes)]
    for rank in range(ranks):
        node = nodes[rank // cluster.gpus_per_node]
        (node.ranks[rank],) = node.next_gpus(1)
    rest = iter(range(instances))
    instance = next(rest, None)
    for node in nodes:
        while instance is not None and node.num_free >= each:
            node.instances[instance] = node.next_gpus(each)
            instance = next(rest, None)
    if instance is not None:
        raise UserError(
            f"rollout.num_instances = {instances}: only {instance} of them find "
            f"rollout.vllm_tensor_parallel_size = {each} free GPUs in one node of "
            f"cluster.gpus_per_node = {cluster.gpus_per_node}, beside learner.num_ranks = {ranks}"
        )
    return nodes


def _on_one_gpu(config: Config) -> list[Node]:
    cluster, rollout, learner = config.cluster, config.rollout, config.learner
    wanted = (cluster.nodes, rollout.num_instances, rollout.vllm_tensor_parallel_size)
    if (*wanted, learner.num_ranks) != (1, 1, 1, 1) or not cluster.gpus_per_node:
        raise UserError(
            "runtime = 'local' computes on the first GPU of one machine, with one instance and one "
            "rank; more GPUs than one need runtime = 'ray'"
        )
    return [Node(0, cluster.gpus_per_node, {0: 0}, {0: (0,)})]
