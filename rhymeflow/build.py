"""From a configuration to what the coordinator is told: the size of the run, and its rules.

Holds true: names and functions of the user's are resolved here and nowhere else; what cannot be is
a `UserError` that names the field.
"""

from __future__ import annotations

import inspect
import math
from collections.abc import Callable, Mapping
from typing import Any, TypeVar

from rhymeflow import profiles
from rhymeflow.config import Config, ScheduleConfig
from rhymeflow.config.fields import brief
from rhymeflow.core.plan import Admission, Plan, Schedule, Tiers
from rhymeflow.core.strategies.schedules import MIGRATION, ROUTING, SCHEDULES, SYNC
from rhymeflow.core.strategies.view import Weights
from rhymeflow.errors import UserError, suggestion
from rhymeflow.utils.imported import imported

Rule = TypeVar("Rule", bound=Callable[..., Any])


def plan(config: Config) -> Plan:
    """The size of the run, and what the protocol is told."""
    rules, groups_per_batch = config.schedule, config.learner.groups_per_batch
    return Plan(
        num_batches=config.learner.max_steps,
        groups_per_batch=groups_per_batch,
        num_generations=config.rollout.num_generations,
        max_length=config.rollout.max_completion_length,
        max_staleness=rules.bound,
        eval_steps=config.run.eval_steps if config.data.eval_size else None,
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
        max_under_way=_max_under_way(config),
        weights=_weights(config),
        hurrying=bundle.hurrying,
        tiers=Tiers(chosen.tier_1, chosen.tier_2) if bundle.lays_out else None,
    )


def _admission(chosen: ScheduleConfig) -> Admission:
    """Without tier 1 a step that is laid out waits for the one before."""
    bundle = SCHEDULES[chosen.name]
    return "lockstep" if bundle.lays_out and not chosen.tier_1 else bundle.admission


def _max_under_way(config: Config) -> int:
    """Groups produced at a time: `pace` batches' worth of them, or as many as there are entries."""
    chosen = config.schedule
    batch = config.learner.groups_per_batch + chosen.extra_groups
    pace = chosen.pace or SCHEDULES[chosen.name].pace or chosen.bound + 1
    return max(1, math.ceil(pace * batch))


def _weights(config: Config) -> Weights:
    chosen = config.schedule
    return Weights(
        # Strategies weigh decoding only, which is the same however many devices train.
        cost=profiles.load(chosen.cost_model).cost(train_devices=1),
        routing_gain=chosen.routing_gain,
        kv_headroom=chosen.kv_headroom,
        max_waiting=chosen.max_waiting,
        throughput_ratio=chosen.throughput_ratio or SCHEDULES[chosen.name].throughput_ratio,
        crowding=chosen.crowding or 1 + (chosen.bound + 1) / 8,
        growth=chosen.growth,
        urgency=chosen.urgency,
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
