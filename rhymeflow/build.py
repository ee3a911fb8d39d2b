"""Builds the coordinator's plan and schedule from a configuration; resolves the names of rules."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

from rhymeflow import emulation, profiles
from rhymeflow.config import Config, ScheduleConfig
from rhymeflow.core.plan import Plan, Schedule
from rhymeflow.core.strategies.base import NoLayout, Settings
from rhymeflow.core.strategies.schedules import MIGRATION, ROUTING, SCHEDULES, SYNC
from rhymeflow.core.types import HELD_OUT
from rhymeflow.errors import UserError
from rhymeflow.suites.suite import of_run
from rhymeflow.utils.user_modules import named_or_own

FILTERED_BATCHES = 4
"""Most groups that are filtered between two steps, in batches; further ones are kept."""
STUCK_GROUPS = 1
"""A batch is stuck if at most this many of its groups are missing."""
RETRIES = 2
"""Most retries of a prompt with `schedule.on_stuck: retry`; then the learner waits for it."""


def plan(config: Config) -> Plan:
    """Return the size of the run and the parameters of the protocol."""
    rules, groups_per_batch = rules_in_force(config), config.learner.groups_per_batch
    assert rules.batch_order is not None
    assert rules.accumulate_early is not None
    eval_steps = {HELD_OUT: config.run.eval_steps} | {s.name: s.steps for s in config.eval.suites}
    return Plan(
        num_batches=config.learner.max_steps,
        groups_per_batch=groups_per_batch,
        num_generations=config.rollout.num_generations,
        max_length=config.rollout.max_completion_length,
        max_staleness=rules.bound,
        batch_order=rules.batch_order,
        accumulate_early=rules.accumulate_early,
        eval_steps={suite.name: eval_steps[suite.name] for suite in of_run(config)},
        extra_groups=rules.extra_groups,
        extra_generations=rules.extra_generations,
        filter_zero_variance=rules.filter_zero_variance,
        max_filtered=FILTERED_BATCHES * groups_per_batch,
        on_stuck=rules.on_stuck,
        stuck_threshold=STUCK_GROUPS,
        max_retries=RETRIES,
    )


def schedule(config: Config) -> Schedule:
    """Return the rules of the run: the named bundle's, except those that `schedule` replaces.
    Raises `UserError` if a rule or the cost model is not found, or all advantages would be 0."""
    if config.rollout.temperature == 0 and config.learner.is_used:
        raise UserError(
            "rollout.temperature = 0: the responses of a group would all be the same, and every "
            "advantage 0; greedy is for evaluation (run.eval_temperature, eval, generate)"
        )
    chosen, bundle = rules_in_force(config), SCHEDULES[config.schedule.name]
    assert chosen.on_pull is not None
    assert chosen.max_inflight_batches is not None
    groups = config.learner.groups_per_batch + chosen.extra_groups
    profile = emulation.profile_of(config) or profiles.load(chosen.cost_model)
    return Schedule(
        admission=bundle.admission,
        routing=named_or_own("schedule.routing", chosen.routing, ROUTING, "view"),
        sync=named_or_own("schedule.sync", chosen.sync, SYNC, "instance, view"),
        on_pull=chosen.on_pull,
        migration=named_or_own("schedule.migration", chosen.migration, MIGRATION, "view"),
        max_inflight_groups=max(1, math.ceil(chosen.max_inflight_batches * groups)),
        settings=Settings(
            # Strategies use only decoding costs, which do not depend on the training devices.
            cost=profile.cost(train_devices=1),
            group_size=config.rollout.num_generations + chosen.extra_generations,
            throughput_ratio=bundle.throughput_ratio,
            max_slowdown=1 + (chosen.bound + 1) / 8,  # the best in simulations (docs/lab)
        ),
        layout=bundle.layout or NoLayout,
    )


def with_cost_model(config: Config) -> Config:
    """Return the configuration with a cost model: the one it names, or else the shipped profile for
    its model, GPUs and instances (the default one is for recipes' demo models). Raises `UserError`
    if no shipped profile fits."""
    cost_model, name = config.schedule.cost_model, config.model.name
    is_chosen = (
        config.emulation.is_used
        or config.simulation.profile
        or cost_model != type(config.schedule)().cost_model
    )
    if is_chosen or name.startswith("recipe:"):
        return config
    memory = f"{config.cluster.gpu_memory_gb:g} GB"
    devices = config.rollout.vllm_tensor_parallel_size
    for profile in map(profiles.load, profiles.names()):
        model, _, _ = profile.name.rpartition("-")  # the name ends in that of the GPU
        is_model = f"{Path(name).name.lower()}-".startswith(f"{model}-")
        if is_model and memory in profile.description and profile.devices_per_instance == devices:
            return config.changed(schedule={"cost_model": profile.name})
    raise UserError(
        f"schedule.cost_model = {cost_model!r} is for the demo on a CPU; there is no profile for "
        f"{name} on GPUs of {memory}, {devices} to an instance: name one as simulation.profile "
        f"({', '.join(profiles.names())}), or fit one: `rhymeflow calibrate RUN_DIR`"
    )


def profile_of(config: Config) -> profiles.Profile:
    """Return the profile of the cluster's costs. Raises `UserError` if there is none, or it is of
    instances with another number of GPUs than vLLM's, or of an adapter, and the model has none."""
    if (emulated := emulation.profile_of(config)) is not None:
        return emulated
    profile = profiles.load(config.simulation.profile or config.schedule.cost_model)
    each, rollout = profile.devices_per_instance, config.rollout
    if rollout.engine == "vllm" and each != rollout.vllm_tensor_parallel_size:
        raise UserError(
            f"schedule.cost_model = {profile.name!r} is of instances of {each} GPUs, and "
            f"rollout.vllm_tensor_parallel_size = {rollout.vllm_tensor_parallel_size}"
        )
    if profile.of_adapter and not config.model.lora.is_used:
        raise UserError(
            f"schedule.cost_model = {profile.name!r} is of training an adapter, and without "
            "model.lora all weights are trained"
        )
    return profile


def rules_in_force(config: Config) -> ScheduleConfig:
    """Return section `schedule` with each `None` replaced by its schedule's value."""
    chosen, bundle = config.schedule, SCHEDULES[config.schedule.name]
    needs_whole_batch = bool(config.learner.needs_whole_batch) or config.is_colocated
    defaults = {
        "max_staleness": chosen.bound,
        "routing": _name(bundle.routing, ROUTING),
        "sync": _name(bundle.sync, SYNC),
        "migration": _name(bundle.migration, MIGRATION),
        "on_pull": bundle.on_pull,
        "max_inflight_batches": float(chosen.bound + 1),
        "batch_order": bundle.batch_order,
        "accumulate_early": bundle.accumulate_early and not needs_whole_batch,
    }
    missing = {name: value for name, value in defaults.items() if getattr(chosen, name) is None}
    return chosen.model_copy(update=missing)


def _name(rule: Callable[..., Any], known: Mapping[str, Callable[..., Any]]) -> str:
    return next(name for name, each in known.items() if each is rule)
