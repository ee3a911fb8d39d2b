"""What `rhymeflow eval` is given, as a configuration: a checkpoint that lies in a run directory is
evaluated as that run evaluates, and a recipe's as the recipe does, unless something else is named.
"""

from __future__ import annotations

import sys
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from rhymeflow.config import Config, EvalConfig, EvalSuite
from rhymeflow.config.load import list_recipes, parse_config, read_config
from rhymeflow.core.types import HELD_OUT
from rhymeflow.errors import UserError, nearest
from rhymeflow.store.checkpoint_dirs import CHECKPOINTS, checkpoints_up_to
from rhymeflow.store.schema import EVENTS


def model_in(given: str) -> str:
    """The model that is meant: in a run directory its newest checkpoint, else what was given.
    Raises `UserError` if the run has none yet; or it is a recipe's name."""
    path = Path(given).expanduser()
    is_run = (path / CHECKPOINTS).is_dir() or (path / EVENTS).is_file()
    if is_run and not (path / "config.json").exists():  # else a model was saved there, too
        there = checkpoints_up_to(path / CHECKPOINTS, sys.maxsize)
        if not there:
            raise UserError(f"{given}: the run has no checkpoint yet")
        return str(there[max(there)])
    if not path.exists() and given in list_recipes():
        raise UserError(f"{given}: is a recipe, and a model is due; its model is recipe:{given}")
    return given


def configuration(
    model: str,
    recipe_or_file: str | None,
    overrides: Mapping[str, str],
    changes: Mapping[str, Any] | None = None,
) -> Config:
    """Return the configuration to evaluate `model` by; `changes` are made to every suite. Raises
    `UserError` if there is none, or something in it is wrong."""
    if "model.name" in overrides:
        raise UserError(f"--model: the model is {model!r} already")
    overrides = {**overrides, "model.name": model}
    source = recipe_or_file or _its_own(model)
    if source is None and "eval.suites" in overrides:
        config = parse_config("", overrides, where="the command line")
    else:
        config = read_config(source, overrides, needed=("data", "reward"))
    # None is configured: the run's held-out prompts, or all that `data` names.
    data, suites = config.data, config.eval.suites
    if not suites and source:
        suites = (EvalSuite(name=HELD_OUT),)
    elif not suites:
        own = EvalSuite(name="data", source=data.source, options=data.options, size=data.size)
        suites = (own,)
    changed = tuple(each.model_copy(update=dict(changes or {})) for each in suites)
    return config.model_copy(update={"eval": EvalConfig(suites=changed)})


def _its_own(model: str) -> str | None:
    """The configuration that a model comes with, if it does."""
    kind, _, name = model.partition(":")
    if kind == "recipe":
        if name not in list_recipes():
            raise UserError(f"{model}: there is no such recipe{nearest(name, list_recipes())}")
        return name
    path = Path(model).expanduser()
    written = path.parent.parent / "config.yaml"
    if path.parent.name == "checkpoints" and written.is_file():
        return str(written)
    return None
