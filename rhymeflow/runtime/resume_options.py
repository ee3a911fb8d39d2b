"""Which options can be changed when a run is resumed, and why the others cannot."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from rhymeflow.config import Config
from rhymeflow.config.fields import brief
from rhymeflow.config.learner import OF_SERVER
from rhymeflow.config.load import build_config, dump_config, parse_config
from rhymeflow.core.types import Version
from rhymeflow.errors import UserError
from rhymeflow.suites.suite import check_best_metric

_STORED = "responses that are stored or in flight were made under it"
_REPLAYED = "episodes in flight are replayed under it"
FIXED: Mapping[str, str] = {
    "model": "the checkpoints and the policy in flight are of this model",
    "data": "groups name its rows, and their order continues where it stopped",
    "schedule": "what is in flight was admitted and routed under it",
    "run.seed": "the order of the data and the noise of sampling follow from it",
    "run.output_dir": "it is where the run is",
    "learner.groups_per_batch": "batches in flight have this size",
    "learner.beta": "the reference policy is made when a run begins",
    "learner.distillation": "the teacher is made when a run begins",
    "learner.frozen_parameters": "the optimizer has the state of all others",
    "learner.optimizer": "checkpoints have the state of this one",
    "rollout.num_generations": "groups in flight have this size",
    "rollout.max_completion_length": _STORED,
    "rollout.temperature": _STORED,
    "rollout.top_p": _STORED,
    "rollout.top_k": _STORED,
    "rollout.rhyming_noise": _STORED,
    "environment.classes": _REPLAYED,
    "environment.tools": _REPLAYED,
    "environment.agent": "what is in flight belongs to it",
    "environment.max_observation_chars": _REPLAYED,
    "emulation": "the times so far are those of the emulated cluster",
    "simulation": "nothing is simulated",
    "sft": "it belongs to `rhymeflow sft`",
}
"""Sections and fields that cannot change, with the reason."""


def with_options(config: Config, overrides: Mapping[str, str]) -> Config:
    """Return the configuration with the command line's overrides."""
    return parse_config(dump_config(config), overrides, where="the run's configuration")


def with_values(config: Config, changes: Config) -> Config:
    """Return the configuration with the values of `changes`, except its nulls and `auto`s."""
    values = {name: v for name, v in _fields(changes).items() if v is not None and v != "auto"}
    return build_config(values, config, where="the run's configuration")


def check_change(before: Config, after: Config, published: Version) -> None:
    """Raise `UserError` unless a run that reached version `published` can continue with `after`."""
    known, new = _fields(before), _fields(after)
    was, now = before.learner.distillation, after.learner.distillation
    moved = was.model_copy(update={name: getattr(now, name) for name in ("teacher", *OF_SERVER)})
    if was.is_served and moved == now and now.is_served:
        del known["learner.distillation"]
    for name, old in known.items():
        reason = FIXED.get(name, FIXED.get(name.partition(".")[0]))
        if reason is not None and new[name] != old:
            raise UserError(
                f"{name}: cannot be changed from {brief(old)} to {brief(new[name])} when a run is "
                f"resumed: {reason}"
            )
    if before.learner.has_critic != after.learner.has_critic:
        raise UserError(
            f"learner.advantage: cannot be changed from {brief(before.learner.advantage)} to "
            f"{brief(after.learner.advantage)} when a run is resumed: a critic is made when a run "
            "begins"
        )
    _check_suites(before, after)
    check_best_metric(after)
    for step in {*after.run.profile_steps} - {*before.run.profile_steps}:
        if step <= published:
            raise UserError(f"run.profile_steps: the run has done step {step} already")
    if after.learner.max_steps < published:
        raise UserError(
            f"learner.max_steps: the run has reached step {published} and cannot end at "
            f"{after.learner.max_steps}"
        )


def _check_suites(before: Config, after: Config) -> None:
    """Suites may be added and removed and their steps changed, and nothing else."""
    old_suites = {suite.name: suite for suite in before.eval.suites if suite.steps}
    for suite in after.eval.suites:
        old = old_suites.get(suite.name, suite)
        if suite != old.model_copy(update={"steps": suite.steps}):
            raise UserError(
                f"eval.suites: {suite.name}: only `steps` can be changed when a run is resumed: "
                "answers to it are stored; give the changed suite another name"
            )


def _fields(config: Config) -> dict[str, Any]:
    return {
        f"{section}.{name}": value
        for section, values in config.model_dump(mode="json").items()
        if isinstance(values, dict)
        for name, value in values.items()
    }
