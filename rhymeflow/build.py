"""From a configuration to what the coordinator gets: the size of the run, and its rules.

Holds true: names and functions of the user's are resolved here and nowhere else; what cannot be is
a `UserError` that names the field.
"""

from __future__ import annotations

import inspect
import math
from collections.abc import Callable, Mapping
from functools import partial
from typing import Any, TypeVar

from rhymeflow import profiles
from rhymeflow.config import Config, ScheduleConfig
from rhymeflow.config.fields import brief
from rhymeflow.core.plan import Admission, Plan, Schedule
from rhymeflow.core.strategies.base import Layout, NoLayout, Settings
from rhymeflow.core.strategies.schedules import MIGRATION, ROUTING, SCHEDULES, SYNC
from rhymeflow.errors import UserError, suggestion
from rhymeflow.utils.imported import imported

Rule = TypeVar("Rule", bound=Callable[..., Any])


def plan(config: Config) -> Plan:
    """The size of the run, and the parameters of the protocol."""
    rules, groups_per_batch = config.schedule, config.learner.groups_per_batch
    return Plan(
        num_batches=config.learner.max_steps,
        groups_per_batch=groups_per_batch,
        num_generations=config.rollout.num_generations,
        max_length=config.rollout.max_completion_length,
        max_staleness=rules.bound,
        eval_steps=None if config.data.eval_size == 0 else config.run.eval_steps,
        extra_groups=rules.extra_groups,
        extra_generations=rules.extra_generations,
        filter_zero_variance=rules.filter_zero_variance,
        max_filtered=rules.max_filtered_batches * groups_per_batch,
        on_stuck=rules.on_stuck,
        stuck_threshold=rules.stuck_threshold,
        max_retries=rules.max_retries,
    )


def schedule(config: Config) -> Schedule:
    """The rules of the run: the bundle of this name, with the pieces that were replaced.

    Raises:
        UserError: a piece or the cost model is not there, or cannot be called as such a piece.
    """
    chosen = config.schedule
    bundle = SCHEDULES[chosen.name]
    return Schedule(
        name=chosen.name,
        admission=_admission(chosen),
        routing=_piece("routing", chosen.routing, ROUTING, bundle.routing, "view"),
        sync=_piece("sync", chosen.sync, SYNC, bundle.sync, "instance, view"),
        on_pull=chosen.on_pull or bundle.on_pull,
        migration=_piece("migration", chosen.migration, MIGRATION, bundle.migration, "view"),
        max_inflight_groups=_max_inflight_groups(config),
        settings=_settings(config),
        layout=_layout(chosen),
    )


def _layout(chosen: ScheduleConfig) -> Callable[[], Layout]:
    layout = SCHEDULES[chosen.name].layout
    if layout is None:
        return NoLayout
    return partial(
        layout, alternate_order=chosen.alternate_order, balance_instances=chosen.balance_instances
    )


def _admission(chosen: ScheduleConfig) -> Admission:
    """A step that is laid out in the same order as the one before waits for it."""
    bundle = SCHEDULES[chosen.name]
    waits = bundle.layout is not None and not chosen.alternate_order
    return "lockstep" if waits else bundle.admission


def _max_inflight_groups(config: Config) -> int:
    """Groups in flight at a time: so many batches' worth, or as many as there are entries."""
    chosen = config.schedule
    batch = config.learner.groups_per_batch + chosen.extra_groups
    own = SCHEDULES[chosen.name].max_inflight_batches
    batches = chosen.max_inflight_batches or own or chosen.bound + 1
    return max(1, math.ceil(batches * batch))


def _settings(config: Config) -> Settings:
    chosen = config.schedule
    return Settings(
        # Strategies weigh decoding only, which is the same however many devices train.
        cost=profiles.load(chosen.cost_model).cost(train_devices=1),
        routing_gain=chosen.routing_gain,
        kv_headroom=chosen.kv_headroom,
        max_waiting=chosen.max_waiting,
        throughput_ratio=chosen.throughput_ratio or SCHEDULES[chosen.name].throughput_ratio,
        max_slowdown=chosen.max_slowdown or 1 + (chosen.bound + 1) / 8,
        outlier_ratio=chosen.outlier_ratio,
        group_size=config.rollout.num_generations + chosen.extra_generations,
    )


def _piece(
    field: str, given: str | None, known: Mapping[str, Rule], own: Rule, arguments: str
) -> Rule:
    """The rule of this name, or the user's function, or (None) the schedule's own."""
    if given is None:
        return own
    if given in known:
        return known[given]
    where = f"schedule.{field}"
    if "." not in given.strip("."):
        raise UserError(
            f"{where}: given {brief(given)}, allowed: {', '.join(known)}, or a function of your "
            f"own, path/to/file.py:function or dotted{suggestion(given, known)}"
        )
    where = f"{where}: {given}"
    function = imported(given, where)
    try:
        inspect.signature(function).bind(*arguments.split(", "))
    except TypeError as error:
        raise UserError(f"{where}: cannot be called as f({arguments}): {error}") from None
    except ValueError:  # some built-ins do not tell what they take
        raise UserError(f"{where}: does not say that it takes ({arguments})") from None
    return function  # type: ignore[return-value]
