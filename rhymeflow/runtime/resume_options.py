"""Which options can be changed when a run is resumed, what is said of them, and why the others
cannot."""

from __future__ import annotations

import json
import os
import re
from collections.abc import Iterator, Mapping
from operator import attrgetter
from pathlib import Path
from typing import Any, get_args

from rhymeflow.config import Config
from rhymeflow.config.environment import interpreter
from rhymeflow.config.fields import brief
from rhymeflow.config.learner import OF_SERVER, LearnerConfig
from rhymeflow.config.load import build_config, dump_config, parse_config
from rhymeflow.core.types import Version
from rhymeflow.errors import UserError
from rhymeflow.store.checkpoint_dirs import is_url
from rhymeflow.suites.suite import check_best_metric
from rhymeflow.utils.code_digest import DIGESTS, digest_of_file, file_of_module
from rhymeflow.utils.user_modules import names_pickle
from rhymeflow.utils.user_values import described

_OFF = frozenset(
    f"learner.{name}"
    for name, field in LearnerConfig.model_fields.items()
    if name not in ("epsilon_high", "num_threads") and type(None) in get_args(field.annotation)
) | {"run.keep_tokens", "run.backup"}
"""Fields whose null turns something off, and never stands for a value that is decided later."""
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
    "rollout.stop": _STORED,
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
    """Return the configuration with the values of `changes`, except `auto`s, and nulls of fields
    that have a value in force then and an effect now."""
    values = {
        name: v
        for name, v in _fields(changes).items()
        if v != "auto" and (v is not None or name in _OFF)
    }
    found = build_config(values, config, where="the run's configuration")
    turned_off = {path: attrgetter(path)(changes) for path, _ in found.effectless}
    return build_config(turned_off, found, where="the run's configuration")


def whole_paths(config: Config) -> Config:
    """Return `config` with whole paths in the place of relative ones, as it is recorded."""
    template, history_run = config.data.chat_template, config.drafting.history_run
    if isinstance(template, str) and not template.startswith("recipe:"):
        template = os.path.abspath(os.path.expanduser(template))
    where = config.run.checkpoint_dir
    where = where if where is None or is_url(where) else os.path.abspath(where)
    programs = config.environment.agent_python, config.rollout.python
    agent_python, python = (each and interpreter(each) for each in programs)
    return config.changed(
        data={"chat_template": template},
        drafting={"history_run": history_run and os.path.abspath(history_run)},
        environment={"agent_python": agent_python},
        rollout={"python": python},
        run={"checkpoint_dir": where},
    )


def changes(before: Config, after: Config, published: Version) -> tuple[str, ...]:
    """Return a line that says what differs from step `published` + 1 on; none if nothing does."""
    known, new = (_values(each.model_dump(mode="json")) for each in (before, after))
    parts = [
        f"{name} = {brief(new.get(name))}, before {brief(known.get(name))}"
        for name in {**known, **new}
        if new.get(name) != known.get(name)
    ]
    return (holding_from(published, "; ".join(parts)),) if parts else ()


def holding_from(published: Version | None, note: str) -> str:
    """Return a line that says what holds from the step after version `published` on."""
    return f"from step {(published or 0) + 1} on: {note}"


def _values(value: Any, path: str = "", depth: int = 99) -> dict[str, Any]:
    """Return {path: value} of what is in a configuration, `depth` levels down, in lists too."""
    if not depth or not isinstance(value, dict | list):
        return {path: value}
    items = value.items() if isinstance(value, dict) else enumerate(value)
    found: dict[str, Any] = {}
    for name, each in items:
        found |= _values(each, f"{path}.{name}" if path else str(name), depth - 1)
    return found


def changed_code(config: Config, digests: dict[str, str]) -> list[str]:
    """Return a line for each file or object with functions or classes of the user that is not as in
    `digests`, and put it there as it is. What such a file imports is not looked at."""
    found = []
    for value in _values(config.model_dump(mode="json")).values():
        for name, current in _code(value) if isinstance(value, str) else ():
            if digests.get(f"code {name}", current) != current:
                found.append(f"{name} has changed since the run was started last")
            digests[f"code {name}"] = current
    return found


def _code(value: str) -> Iterator[tuple[str, str]]:
    """Yield what code of the user a value of the configuration names, if any, and its digest."""
    if names_pickle(value):
        file, _, name = value.rpartition(":")
        path = os.path.join(os.path.dirname(file), DIGESTS)
        try:
            yield f"{name} in {os.path.basename(file)}", json.loads(Path(path).read_bytes())[name]
        except (OSError, ValueError, LookupError) as error:
            raise UserError(f"{path}: has no digest of {name!r}: {described(error)}") from None
    elif match := re.fullmatch(r"(.+\.py)(:\w+)?", value):
        if os.path.isfile(given := os.path.expanduser(match[1])):
            yield given, digest_of_file(given)
    elif re.fullmatch(r"[A-Za-z_]\w*(\.[A-Za-z_]\w*)+", value) and not os.path.exists(value):
        module = file_of_module(value.rpartition(".")[0])
        if module is not None and module.endswith(".py"):
            yield module, digest_of_file(module)


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
            field, old, given = _first_difference(name, old, new[name])
            raise UserError(
                f"{field}: cannot be changed from {brief(old)} to {brief(given)} when a run is "
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


def _first_difference(name: str, old: Any, new: Any) -> tuple[str, Any, Any]:
    """Return the first field in which two values differ, below `name`, and what it has in each."""
    if not isinstance(old, dict) or not isinstance(new, dict) or old.keys() != new.keys():
        return name, old, new
    part = next(each for each in old if old[each] != new[each])
    return _first_difference(f"{name}.{part}", old[part], new[part])


def _fields(config: Config) -> dict[str, Any]:
    values = _values(config.model_dump(mode="json"), depth=2)
    return {name: value for name, value in values.items() if "." in name}
