"""A whole configuration, and what its sections must agree on."""

from __future__ import annotations

from typing import Literal

from pydantic import model_validator

from rhymeflow.config.cluster import ClusterConfig
from rhymeflow.config.data import DataConfig
from rhymeflow.config.drafting import DraftingConfig
from rhymeflow.config.environment import EnvironmentConfig
from rhymeflow.config.eval import EvalConfig
from rhymeflow.config.learner import LearnerConfig
from rhymeflow.config.model import ModelConfig
from rhymeflow.config.ray import RayConfig
from rhymeflow.config.reward import RewardConfig
from rhymeflow.config.rollout import RolloutConfig
from rhymeflow.config.run import RunConfig
from rhymeflow.config.schedule import ScheduleConfig
from rhymeflow.config.section import Section
from rhymeflow.config.sft import SftConfig
from rhymeflow.config.simulation import SimulationConfig
from rhymeflow.config.weights import WeightsConfig


class Config(Section):
    """A run."""

    name: str = "run"
    """Used in the run directory's name."""
    runtime: Literal["local", "ray"] = "local"
    """What carries the run: processes of this machine, or actors of a Ray cluster."""
    model: ModelConfig = ModelConfig()
    data: DataConfig = DataConfig()
    rollout: RolloutConfig = RolloutConfig()
    drafting: DraftingConfig = DraftingConfig()
    environment: EnvironmentConfig = EnvironmentConfig()
    reward: RewardConfig = RewardConfig()
    learner: LearnerConfig = LearnerConfig()
    weights: WeightsConfig = WeightsConfig()
    schedule: ScheduleConfig = ScheduleConfig()
    simulation: SimulationConfig = SimulationConfig()
    cluster: ClusterConfig = ClusterConfig()
    run: RunConfig = RunConfig()
    ray: RayConfig = RayConfig()
    sft: SftConfig = SftConfig()
    eval: EvalConfig = EvalConfig()

    @model_validator(mode="after")
    def _ray_can(self) -> Config:
        if self.runtime == "ray" and (self.rollout.cpus or self.learner.cpus):
            raise ValueError(
                "rollout.cpus, learner.cpus: with runtime = 'ray' a worker is not pinned to "
                "cores, as it is not known on which machine it will be"
            )
        most = self.rollout.max_instances
        if most is not None and (most < self.rollout.num_instances or self.runtime != "ray"):
            raise ValueError(
                f"rollout.max_instances = {most}: is for runtime = 'ray', and at least "
                f"rollout.num_instances = {self.rollout.num_instances}"
            )
        return self

    @model_validator(mode="after")
    def _something_rewards(self) -> Config:
        """A batch is trained on when it is rewarded, so without a reward none ever would be."""
        classes = self.environment.classes
        if not self.reward.functions and not classes:
            raise ValueError(
                "reward.functions: given [], should name at least one function, where there are no "
                "environment.classes"
            )
        shared = [each.share is not None for each in classes]
        if any(shared) and not all(shared):
            raise ValueError("environment.classes: some have a `share`, and others have none")
        names = [each.reward_name for each in classes]
        if len(names) > len(set(names)):
            raise ValueError(
                f"environment.classes: two are named {max(names, key=names.count)!r}; give them a "
                "`name` each"
            )
        return self

    @model_validator(mode="after")
    def _parts_fit_together(self) -> Config:
        rollout, learner = self.rollout, self.learner
        if rollout.cpus is not None and len(rollout.cpus) != rollout.num_instances:
            raise ValueError(
                f"rollout.cpus names {len(rollout.cpus)} sets of cores for "
                f"rollout.num_instances = {rollout.num_instances}"
            )
        if learner.groups_per_batch % learner.num_minibatches:
            raise ValueError(
                f"learner.num_minibatches = {learner.num_minibatches} does not divide "
                f"learner.groups_per_batch = {learner.groups_per_batch}"
            )
        if rollout.engine == "vllm" and self.drafting.shape == "tree":
            raise ValueError("drafting.shape = 'tree': vLLM verifies linear drafts only")
        if rollout.engine == "native" and rollout.vllm_tensor_parallel_size > 1:
            raise ValueError(
                f"rollout.vllm_tensor_parallel_size = {rollout.vllm_tensor_parallel_size}: the "
                "native engine's model is on one device; rollout.engine = 'vllm' spreads it"
            )
        if self.simulation.colocated and self.schedule.bound > 0:
            raise ValueError(
                f"simulation.colocated: with schedule.max_staleness = {self.schedule.bound} "
                "rollout and training go on at the same time, and need devices of their own"
            )
        if rollout.num_generations == 1 and learner.scale_rewards == "group":
            raise ValueError(
                "rollout.num_generations = 1 leaves no group to compare with: "
                "every advantage would be 0"
            )
        return self

    @model_validator(mode="after")
    def _can_accumulate_early(self) -> Config:
        if self.schedule.accumulate_early and self.learner.needs_whole_batch:
            raise ValueError(
                f"schedule.accumulate_early = true: with {self.learner.needs_whole_batch} the "
                "learner needs the whole batch before it computes any gradient; the one or the "
                "other has to be off"
            )
        if self.schedule.accumulate_early and self.simulation.colocated:
            raise ValueError(
                "schedule.accumulate_early = true: with simulation.colocated nothing is trained on "
                "while there is something to generate"
            )
        return self
