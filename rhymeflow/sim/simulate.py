"""`rhymeflow simulate`: run a configuration on a simulated cluster.

The coordinator gets the events that it would get in a real run of this configuration, except those
of evaluation. Two calls with equal arguments have equal results.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Iterable
from contextlib import closing
from functools import partial
from pathlib import Path

from rhymeflow import build, emulation, placement
from rhymeflow.config import Config
from rhymeflow.core.cost import CostModel
from rhymeflow.core.plan import Plan
from rhymeflow.errors import UserError, counted
from rhymeflow.profiles import Profile
from rhymeflow.sim.cluster import Cluster
from rhymeflow.sim.continuous_batching import Hardware
from rhymeflow.sim.drafts import Drafts
from rhymeflow.sim.faults import Death, Devices, Recovery, failures
from rhymeflow.sim.record import Record
from rhymeflow.sim.result import SimulationResult, result
from rhymeflow.sim.timeline import Timeline, draw
from rhymeflow.sim.workload import Workload
from rhymeflow.sim.workload import workload as workload_of

_WATERMARK = 0.01
"""Share of the KV cache that an admission leaves free, so that running responses can grow."""
_FAILURE_SEED = 0
"""Separate from the run's seed, so that failures are the same for all lengths."""


def simulate(
    config: Config,
    *,
    output: Path,
    workload: Path | None = None,
    on_step: Callable[[int], object] = lambda step: None,
) -> SimulationResult:
    """Simulate a run, and plot its timeline.

    Args:
        config: of the run; its section `simulation` describes the cluster.
        output: directory for `timeline.png`, `result.json` and the files of a run directory,
            without tokens.
        workload: run directory whose lengths are taken; None: `simulation.workload`.
        on_step: called with the number of each step that has ended.

    Raises:
        UserError: the configuration cannot be simulated, or `output` holds a real run.
    """
    timeline = Timeline()
    lengths = workload_of(config, workload)
    try:
        with closing(Record(output, config, on_step)) as record:
            figures = run(config, lengths, timeline=timeline, log=record)
        (output / "result.json").write_text(figures.json() + "\n")
        draw(output / "timeline.png", timeline, figures)
    except OSError as error:
        raise UserError(f"{output}: cannot be written to: {error.strerror}") from None
    return figures


def run(
    config: Config,
    workload: Workload,
    *,
    timeline: Timeline | None = None,
    profile: Profile | None = None,
    deaths: Iterable[Death] | None = None,
    uncounted: int = 0,
    log: Record | None = None,
) -> SimulationResult:
    """Simulate a run on these prompts and responses. Writes only through `log`.

    Rates and idle shares leave out the last `uncounted` steps: no later batch is generated during
    them, so a schedule that works ahead would look faster than it is. `profile` and `deaths`
    default to the configuration's. `log` is called with events and commands.

    Raises `UserError` if the configuration cannot be simulated or failures are too frequent for it;
    `InvariantViolation`, a defect, if the run broke the staleness bound or lost a group.
    """
    config = emulation.resolved(config)
    simulation = config.simulation
    if simulation.skip_steps + uncounted >= config.learner.max_steps:
        also = f" and {uncounted} at the end" if uncounted else ""
        raise UserError(
            f"simulation.skip_steps: {simulation.skip_steps}{also} leaves nothing to measure of "
            f"learner.max_steps = {config.learner.max_steps}"
        )
    config = build.with_cost_model(config)
    profile = profile or with_adapter(build.profile_of(config), config)
    if config.cluster.nodes is not None and not config.is_colocated:
        placement.place(config)  # or refuse it
    num_instances, per_instance = config.rollout.num_instances, profile.devices_per_instance
    train_devices = config.emulation.train_devices or config.learner.num_ranks
    if config.is_colocated:
        train_devices = num_instances * per_instance
    plan = build.plan(config)
    faults = simulation.faults
    if deaths is None and (faults.device_mtbf_hours or faults.controller_mtbf_hours):
        deaths = failures(
            _FAILURE_SEED,
            Devices(num_instances, per_instance, train_devices, config.is_colocated),
            device_mtbf_hours=faults.device_mtbf_hours,
            controller_mtbf_hours=faults.controller_mtbf_hours,
        )
    cluster = Cluster(
        dataclasses.replace(plan, eval_steps={}),
        build.schedule(config),
        _hardware(config, profile, train_devices, workload),
        workload,
        simulation,
        num_instances=num_instances,
        recovery=None if deaths is None else _recovery(config, plan),
        failures=deaths or (),
        timeline=timeline,
        log=log,
    )
    cluster.run()
    instances, devices = counted(num_instances, "instance"), counted(train_devices, "device")
    described = f"{instances} of {profile.description}; trained on {devices}"
    return result(cluster, config, described, uncounted)


def with_adapter(profile: Profile, config: Config) -> Profile:
    """Return the profile with the costs of the configuration's adapter, if it has one."""
    if config.model.lora.is_used:
        from rhymeflow.cluster import adapted  # loads torch

        profile = adapted(profile, config)
    return profile


def _recovery(config: Config, plan: Plan) -> Recovery:
    faults = config.simulation.faults
    return Recovery(
        instance=faults.instance_seconds,
        learner=faults.learner_seconds,
        run=config.run,
        evaluates=partial(plan.evaluates, config.run.best_suite),
        checkpoint_copy=faults.checkpoint_copy_seconds,
        checkpoint_write=faults.checkpoint_write_seconds,
    )


def _hardware(config: Config, profile: Profile, train_devices: int, workload: Workload) -> Hardware:
    rollout = config.rollout
    kv_capacity = rollout.max_kv_tokens or profile.kv_capacity
    prompt, observed = workload.longest_prompt, workload.most_observed  # in tokens
    if prompt + rollout.max_completion_length + observed > kv_capacity:
        also = f", {observed} tokens of environments" if observed else ""
        raise UserError(
            f"rollout.max_completion_length: {rollout.max_completion_length}{also} and a prompt "
            f"of {prompt} tokens do not fit the KV cache of an instance, {kv_capacity} tokens"
        )
    # An emulated learner is charged with responses in full, as are those of the real model, whose
    # responses have no long beginnings in common.
    share = 1.0 if config.emulation.is_used else workload.computed_share

    def cost_of(*, is_warmup: bool) -> CostModel:
        cost = profile.cost(train_devices)
        cost = emulation.learner_cost(cost, config.learner, is_warmup=is_warmup)
        per_token = {name: share * getattr(cost, name) for name in ("train_token", "measure_token")}
        return dataclasses.replace(cost, **per_token)

    cost, warmup = cost_of(is_warmup=False), config.learner.critic_warmup_steps
    return Hardware(
        cost=cost,
        capacity=rollout.max_num_seqs,
        kv_capacity=kv_capacity,
        watermark=int(_WATERMARK * kv_capacity),
        max_prefill_tokens=rollout.max_prefill_tokens,
        max_length=rollout.max_completion_length,
        keep_cache=rollout.kv_cache_on_pull == "keep",
        drafts=Drafts(
            cost,
            max_draft=0 if config.drafting.window == "off" else config.drafting.max_draft,
            kv_capacity=kv_capacity,
            search_seconds=emulation.draft_seconds(config),
        ),
        warmup=(warmup, cost_of(is_warmup=True)) if warmup else None,
    )
