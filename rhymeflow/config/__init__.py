"""The configuration of a run, in sections, with a docstring below each field.

Importing this package loads neither torch nor YAML: `load` reads files, `fields` validates values.
"""

from __future__ import annotations

import itertools
from collections.abc import Iterator, Mapping
from operator import attrgetter
from typing import Literal

from pydantic import model_validator

from rhymeflow.config.data import DataConfig
from rhymeflow.config.emulation import EmulationConfig
from rhymeflow.config.environment import (
    EnvironmentClass,
    EnvironmentConfig,
    RewardConfig,
    RewardFunction,
    interpreter,
)
from rhymeflow.config.eval import EvalConfig, EvalSuite
from rhymeflow.config.learner import COMPARES, DistillationConfig, LearnerConfig, SftConfig
from rhymeflow.config.rollout import (
    OF_VLLM,
    DraftingConfig,
    LoraConfig,
    ModelConfig,
    RolloutConfig,
)
from rhymeflow.config.run import ClusterConfig, RayConfig, RunConfig, WeightsConfig
from rhymeflow.config.schedule import ScheduleConfig
from rhymeflow.config.section import Section
from rhymeflow.config.simulation import FaultsConfig, SimulationConfig, WorkloadConfig

__all__ = [
    "ClusterConfig", "Config", "DataConfig", "DistillationConfig", "DraftingConfig",
    "EmulationConfig", "EnvironmentClass", "EnvironmentConfig", "EvalConfig", "EvalSuite",
    "FaultsConfig", "LearnerConfig", "LoraConfig", "ModelConfig", "RayConfig", "RewardConfig",
    "RewardFunction", "RolloutConfig", "RunConfig", "ScheduleConfig", "Section", "SftConfig",
    "SimulationConfig", "WeightsConfig", "WorkloadConfig",
]  # fmt: skip


class Config(Section):
    """Configuration of a run."""

    name: str = "run"
    """Used in the run directory's name."""
    runtime: Literal["local", "ray"] = "local"
    """Where workers run: as processes of this machine, or as actors of a Ray cluster."""
    model: ModelConfig = ModelConfig()
    data: DataConfig = DataConfig()
    rollout: RolloutConfig = RolloutConfig()
    drafting: DraftingConfig = DraftingConfig()
    environment: EnvironmentConfig = EnvironmentConfig()
    reward: RewardConfig = RewardConfig()
    learner: LearnerConfig = LearnerConfig()
    weights: WeightsConfig = WeightsConfig()
    schedule: ScheduleConfig = ScheduleConfig()
    emulation: EmulationConfig = EmulationConfig()
    simulation: SimulationConfig = SimulationConfig()
    cluster: ClusterConfig = ClusterConfig()
    run: RunConfig = RunConfig()
    ray: RayConfig = RayConfig()
    sft: SftConfig = SftConfig()
    eval: EvalConfig = EvalConfig()

    def changed(self, **sections: Mapping[str, object]) -> Config:
        """Return a copy with these fields of these sections replaced, without validation."""
        parts = {name: getattr(self, name).model_copy(update=sections[name]) for name in sections}
        return self.model_copy(update=parts)

    @property
    def is_colocated(self) -> bool:
        """Whether simulated or emulated devices generate and train in turn."""
        return self.simulation.colocated or (self.emulation.is_used and self.schedule.bound == 0)

    @property
    def teacher_model(self) -> ModelConfig | None:
        """The model that ranks load as the teacher; None: they load none."""
        chosen = self.learner.distillation
        if chosen.is_served or chosen.teacher in (None, "policy", "start"):
            return None
        return ModelConfig(name=chosen.teacher)

    @property
    def has_rewards(self) -> bool:
        """Whether responses are judged, if only to be measured."""
        return bool(self.reward.functions or self.environment.judges)

    @property
    def trains_on_rewards(self) -> bool:
        """Whether rewards have a part in what is learnt."""
        return self.has_rewards and self.learner.distillation.reward_weight > 0.0

    @property
    def effectless(self) -> Iterator[tuple[str, str]]:
        """Fields of what is off unless it is turned on, and what they need. Of what is turned off,
        such as drafts, they may stay, to compare."""
        environment, rewards, engine = self.environment, self.reward, self.rollout.engine
        turns = environment.is_used or any(s.environments is not None for s in self.eval.suites)
        of_agent = {"agent_python", "agent_timeout", "idle_timeout"}
        workload, faults = self.simulation.workload, self.simulation.faults
        dies = faults.device_mtbf_hours or faults.controller_mtbf_hours
        of_deaths = {
            "instance_seconds", "learner_seconds", "checkpoint_copy_seconds",
            "checkpoint_write_seconds",
        }  # fmt: skip
        of_turns = {"observation_tokens", "environment_seconds"}
        of_nodes, of_drop = {"gpus_per_node", "memory_gb"}, {"max_consecutive_failures"}
        for needs, is_on, section, names in (
            ("environment.agent", environment.agent is not None, "environment", of_agent),
            ("environment.classes, tools or agent", turns, "environment", None),
            ("on_failure: drop", environment.on_failure == "drop", "environment", of_drop),
            ("on_failure: drop", rewards.on_failure == "drop", "reward", of_drop),
            ("rollout.engine: vllm", engine == "vllm", "rollout", {*OF_VLLM}),
            ("drafts", self.drafting.window != "off", "drafting", {"history_run"}),
            ("emulation.profile", self.emulation.is_used, "emulation", None),
            ("cluster.nodes", self.cluster.nodes is not None, "cluster", of_nodes),
            ("runtime: ray", self.runtime == "ray", "ray", None),
            ("mean_turns above 1", workload.mean_turns > 1, "simulation.workload", of_turns),
            ("device_mtbf_hours", dies, "simulation.faults", of_deaths),
        ):
            given = attrgetter(section)(self).model_dump(include=names, exclude_defaults=True)
            yield from ((f"{section}.{name}", needs) for name in given if not is_on)

    @model_validator(mode="after")
    def _divide_gpus(self) -> Config:
        """With `cluster.nodes`, give instances or ranks, whichever is not given, what the others
        leave. Ranks come first (`placement.py`)."""
        gpus, each = self.cluster.gpus_per_node, self.rollout.vllm_tensor_parallel_size
        has_instances = "num_instances" in self.rollout.model_fields_set
        has_ranks = "num_ranks" in self.learner.model_fields_set
        if not self.cluster.nodes or not gpus or self.is_colocated or has_instances == has_ranks:
            return self
        full, rest = divmod(self.learner.num_ranks, gpus)
        instances = (self.cluster.nodes - full) * (gpus // each)
        instances -= gpus // each - (gpus - rest) // each  # of the node that ranks take a part of
        ranks = self.cluster.nodes * gpus - self.rollout.num_instances * each
        # A section is frozen once it is part of a configuration.
        if has_ranks and instances > 0:
            sizes = {"num_instances": instances}
            self.__dict__["rollout"] = self.rollout.model_copy(update=sizes)
        elif has_instances and ranks > 0:
            self.__dict__["learner"] = self.learner.model_copy(update={"num_ranks": ranks})
        return self

    def draft_shape(self, device: str) -> Literal["linear", "tree"]:
        """Return `drafting.shape` in force on a device, by torch's name."""
        costs_little = device.startswith("cuda") or self.emulation.is_used
        takes_trees = self.rollout.engine == "native"
        return self.drafting.shape or ("tree" if costs_little and takes_trees else "linear")

    @model_validator(mode="after")
    def _fits_together(self) -> Config:
        checks = [self._process_mistakes(), self._reward_mistakes(), self._training_mistakes()]
        checks += [self._distillation_mistakes(), self._agent_mistakes()]
        checks.append(self._emulation_mistakes())
        if (first := next(itertools.chain(*checks), None)) is not None:
            raise ValueError(first)
        return self

    def _process_mistakes(self) -> Iterator[str]:
        rollout, most = self.rollout, self.rollout.max_instances
        if self.runtime == "ray" and (rollout.cpus or self.learner.cpus):
            yield (
                "rollout.cpus, learner.cpus: with runtime = 'ray' a worker is not pinned to "
                "cores, because Ray chooses its machine"
            )
        if most is not None and (most < rollout.num_instances or self.runtime != "ray"):
            yield (
                f"rollout.max_instances = {most}: needs runtime = 'ray', and must be at least "
                f"rollout.num_instances = {rollout.num_instances}"
            )
        schedule = self.schedule
        takes_turns = schedule.name == "synchronous" and not schedule.accumulate_early
        if rollout.vllm_sleeps and not (takes_turns and self.runtime == "local"):
            yield (
                "rollout.vllm_sleeps: needs schedule.name = 'synchronous', without "
                "accumulate_early, under which a batch is trained on when all of it is there, and "
                "runtime = 'local'"
            )
        has_turns = any(suite.environments is not None for suite in self.eval.suites)
        if rollout.stop and (has_turns or self.environment.is_used):
            yield (
                "rollout.stop: not with an environment, whose turns end as the chat template says, "
                "or an agent, whose programs say it with each call"
            )

    def _reward_mistakes(self) -> Iterator[str]:
        classes = self.environment.classes
        judges, distillation = self.environment.judges, self.learner.distillation
        if not self.reward.functions and not judges and not distillation.is_used:
            yield (
                "reward.functions: given [], should name at least one function, unless there are "
                "environment.classes or a learner.distillation.teacher"
            )
        if 0 < sum(each.share is not None for each in classes) < len(classes):
            yield "environment.classes: some have a `share` and others do not"
        names = [each.reward_name for each in classes]
        if len(names) > len(set(names)):
            yield (
                f"environment.classes: two are named {max(names, key=names.count)!r}; give them a "
                "`name` each"
            )

    def _agent_mistakes(self) -> Iterator[str]:
        environment = self.environment
        if environment.agent is None:
            return
        effectless = {"timeout", "retries", "num_workers"}
        if not environment.plays_classes:
            effectless |= {"on_tool_error", "max_observation_chars"}
        why = "with this environment.agent (agent_timeout and idle_timeout limit it)"
        kept = environment.model_dump(include=effectless, exclude_defaults=True)
        yield from (f"environment.{name}: has no effect {why}" for name in kept)
        if not environment.agent:
            yield "environment.agent: names no program"
        yield from self._played_mistakes()
        for suite in self.eval.suites:
            if suite.environments is not None:
                yield f"eval.suites: {suite.name}: environments: not in a run of environment.agent"
        for name in ("system_prompt", "few_shot", "assistant_prefix"):
            if getattr(self.data, name):
                yield (
                    f"data.{name}: has no effect with environment.agent, whose program writes the "
                    "messages"
                )
        if not (self.rollout.skip_special_tokens or self.reward.functions):
            yield (
                "rollout.skip_special_tokens: has no effect with environment.agent and without "
                "reward.functions: its programs get text without special tokens"
            )
        yield from self._verifiers_mistakes()
        not_yet = {
            "schedule.on_stuck = 'truncate'": self.schedule.on_stuck == "truncate",
            "run.token_details": self.run.token_details,
            "learner.overlong_buffer": self.learner.overlong_buffer,
            "learner.distillation.prompt": self.learner.distillation.prompt is not None,
        }
        for name, is_used in not_yet.items():
            if is_used:
                yield f"{name}: not with environment.agent yet"

    def _played_mistakes(self) -> Iterator[str]:
        environment = self.environment
        has_any = environment.classes or environment.tools
        if not environment.plays_classes:
            if has_any:
                yield (
                    "environment.agent: takes the place of environment.classes and "
                    "environment.tools; agent = 'classes' plays them"
                )
            return
        if not has_any:
            yield "environment.agent = 'classes': there are no environment.classes"
        if environment.agent_python is not None:
            yield "environment.agent_python: runs a function; the run's own Python plays classes"
        for spec in environment.tools:
            if spec.startswith("mcp:"):
                yield f"environment.tools: {spec}: not with environment.agent = 'classes' yet"

    def _verifiers_mistakes(self) -> Iterator[str]:
        """Tasks are played by the Python that has made them."""
        sections: dict[str, DataConfig | EvalSuite] = {"data": self.data}
        sections |= {f"eval.suites: {each.name}": each for each in self.eval.suites}
        for where, section in sections.items():
            if self.environment.agent != "verifiers" or section.source is None:
                continue
            made, plays = section.options.get("python"), self.environment.agent_python
            paths = {each and interpreter(str(each)) for each in (made, plays)}
            if section.source.startswith("verifiers:") and len(paths) > 1:
                yield (
                    f"{where}: options: python is {made!r} and environment.agent_python is "
                    f"{plays!r}; name one Python that has verifiers in both, or in neither"
                )

    def _training_mistakes(self) -> Iterator[str]:
        rollout, learner, schedule = self.rollout, self.learner, self.schedule
        if rollout.cpus is not None and len(rollout.cpus) != rollout.num_instances:
            yield (
                f"rollout.cpus names {len(rollout.cpus)} sets of cores for "
                f"rollout.num_instances = {rollout.num_instances}"
            )
        if learner.groups_per_batch % learner.num_minibatches:
            yield (
                f"learner.num_minibatches = {learner.num_minibatches} does not divide "
                f"learner.groups_per_batch = {learner.groups_per_batch}"
            )
        if (step := max(self.run.profile_steps, default=0)) > learner.max_steps:
            yield (
                f"run.profile_steps: there is no step {step}: learner.max_steps = "
                f"{learner.max_steps}"
            )
        yield from self._lora_mistakes()
        if rollout.engine == "vllm" and self.drafting.shape == "tree":
            yield "drafting.shape = 'tree': vLLM verifies linear drafts only"
        if self.simulation.colocated and schedule.bound > 0:
            yield (
                f"simulation.colocated: with schedule.max_staleness = {schedule.bound} "
                "rollout and training run at the same time, and each needs its own devices"
            )
        is_compared = learner.scale_rewards == "group" or learner.advantage in COMPARES
        if rollout.num_generations == 1 and is_compared and self.trains_on_rewards:
            yield (
                "rollout.num_generations = 1 leaves no group to compare with: "
                "every advantage would be 0"
            )
        if schedule.accumulate_early and learner.needs_whole_batch:
            yield (
                f"schedule.accumulate_early = true: with {learner.needs_whole_batch} the "
                "learner needs the whole batch before it computes any gradient; turn off one "
                "of them"
            )
        if schedule.accumulate_early and self.is_colocated:
            yield (
                "schedule.accumulate_early = true: with simulation.colocated, or a bound of 0 and "
                "emulation.profile, the devices train after they have generated, not meanwhile"
            )

    def _lora_mistakes(self) -> Iterator[str]:
        lora, learner = self.model.lora, self.learner
        if not lora.is_used:
            return
        if learner.has_critic:
            yield "model.lora: not with learner.advantage = 'gae' yet: a critic is trained whole"
        if self.model.quantization and learner.num_ranks > 1:
            yield f"model.quantization: not with learner.num_ranks = {learner.num_ranks} yet"

    def _distillation_mistakes(self) -> Iterator[str]:
        distillation, rollout = self.learner.distillation, self.rollout
        if not distillation.is_used:
            return
        if rollout.top_k or rollout.top_p < 1.0:
            yield "learner.distillation: rollout.top_k and top_p leave out tokens of the teacher's"
        if distillation.is_served and rollout.temperature != 1.0:
            yield (
                f"rollout.temperature = {rollout.temperature:g}: the log-probabilities of a server "
                "(learner.distillation.teacher) are those of temperature 1"
            )
        if distillation.prompt is not None and self.environment.is_used:
            yield "learner.distillation.prompt: not with environments or tools yet"
        if self.learner.has_critic and not self.trains_on_rewards:
            yield (
                "learner.advantage = 'gae': a critic judges rewards, and with a teacher alone "
                "(learner.distillation) none has a part in what is learnt; give "
                "learner.distillation.reward_weight above 0 and a reward, or another algorithm"
            )
        if self.schedule.filter_zero_variance and not self.trains_on_rewards:
            yield "schedule.filter_zero_variance: with a teacher alone, no group's rewards differ"

    def _emulation_mistakes(self) -> Iterator[str]:
        emulation, schedule = self.emulation, self.schedule
        if not emulation.is_used:
            return
        if self.model.lora.is_used:
            yield "model.lora: not with emulation.profile, whose times are of training all weights"
        if emulation.devices is None:
            yield "emulation.devices: needed with emulation.profile, the devices of the cluster"
        if self.runtime != "local" or self.rollout.engine != "native":
            yield (
                f"emulation.profile: with runtime = {self.runtime!r} and rollout.engine = "
                f"{self.rollout.engine!r} times are real; only the native engine on one machine "
                "emulates"
            )
        if self.learner.num_ranks > 1:
            yield (
                f"learner.num_ranks = {self.learner.num_ranks}: with emulation.profile one process "
                "trains for all emulation.train_devices"
            )
        if schedule.cost_model != ScheduleConfig().cost_model or self.simulation.profile:
            yield (
                "schedule.cost_model, simulation.profile: emulation.profile is the cost model of "
                "workers, routing and simulations; leave the others out"
            )
