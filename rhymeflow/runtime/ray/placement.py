"""What each kind of worker takes of the cluster, and where it goes.

An instance and a learner's rank take as many CPUs as they have threads, and GPUs of their own: an
instance's actor has all of them, so Ray gives it those of one node. A learner's ranks, which talk
all the time, are packed. Other workers compute little, and take nothing. Reward functions may be
files of the controller's machine, so they run there; instances spread.
"""

from __future__ import annotations

from types import ModuleType
from typing import Any, NamedTuple

from rhymeflow.config import Config
from rhymeflow.runtime.base import Resources, Role


class Need(NamedTuple):
    """Logical resources of one worker."""

    cpus: int
    gpus: int = 0

    def bundle(self) -> dict[str, float]:
        """As Ray writes it."""
        return {"CPU": self.cpus} | ({"GPU": self.gpus} if self.gpus else {})


def need(role: Role, num_threads: int, config: Config, *, has_gpus: bool) -> Need:
    """What a worker of this role takes. `has_gpus`: whether the run computes on GPUs."""
    match role:
        case "rollout":
            parts = config.rollout.vllm_tensor_parallel_size
            return Need(parts * num_threads, has_gpus * parts)
        case "learner" | "learner_rank":
            return Need(num_threads, int(has_gpus))
        case _:
            return Need(0)


def least(config: Config, *, has_gpus: bool) -> Need:
    """What a run takes at least: its learner, and all of its first instances."""
    rollout, learner = config.rollout, config.learner
    one = need("rollout", rollout.num_threads or 1, config, has_gpus=has_gpus)
    rank = need("learner", learner.num_threads or 1, config, has_gpus=has_gpus)
    instances, ranks = rollout.num_instances, learner.num_ranks
    return Need(one.cpus * instances + rank.cpus * ranks, one.gpus * instances + rank.gpus * ranks)


class Places:
    """Where the next worker goes; `ray` is connected."""

    def __init__(self, ray: ModuleType, config: Config, *, has_gpus: bool) -> None:
        self._ray, self._config, self._has_gpus = ray, config, has_gpus
        self._ranks: Any = None
        """The placement group of the learner that there is, if it has many ranks."""
        self._num_placed = 0

    def own_node(self) -> Any:
        """The strategy of what has to be on the controller's node."""
        return self._on(self._ray.get_runtime_context().get_node_id())

    def strategy(self, role: Role, resources: Resources) -> Any:
        """What Ray calls the scheduling strategy."""
        if role in ("reward", "environment"):
            return self.own_node()
        if role in ("learner", "learner_rank") and self._config.learner.num_ranks > 1:
            return self._of_rank(role, resources)
        if resources.node is not None:
            return self._on(resources.node)
        return "SPREAD" if role == "rollout" else "DEFAULT"

    def _on(self, node: str) -> Any:
        strategies = self._ray.util.scheduling_strategies
        return strategies.NodeAffinitySchedulingStrategy(node, soft=False)

    def _of_rank(self, role: Role, resources: Resources) -> Any:
        """A bundle of the group of all ranks; rank 0, which is started first, makes a new group."""
        if role == "learner":
            self.close()
            each = need(role, resources.num_threads, self._config, has_gpus=self._has_gpus)
            bundles = [each.bundle()] * self._config.learner.num_ranks
            self._ranks = self._ray.util.placement_group(bundles, strategy="PACK")
            self._num_placed = 0
        self._num_placed += 1
        return self._ray.util.scheduling_strategies.PlacementGroupSchedulingStrategy(
            self._ranks, placement_group_bundle_index=self._num_placed - 1
        )

    def close(self) -> None:
        """Give back what is set aside for the learner's ranks; they are gone."""
        if self._ranks is not None:
            self._ray.util.remove_placement_group(self._ranks)
            self._ranks = None
