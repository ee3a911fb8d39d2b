"""What `rhymeflow eval` is given, as a configuration.

Holds true: a checkpoint that lies in a run directory is evaluated as that run evaluates, and a
recipe's as the recipe does, unless something else is named. Loads no torch.
"""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from rhymeflow.config import Config, EvalConfig, EvalSuite
from rhymeflow.config.load import list_recipes, parse_config, read_config
from rhymeflow.errors import UserError


def configuration(
    model: str,
    recipe_or_file: str | None,
    overrides: Mapping[str, str],
    changes: Mapping[str, Any] | None = None,
) -> Config:
    """Return the configuration to evaluate `model` by; `changes` are made to every suite.

    Raises:
        UserError: there is none, or something in it is wrong.
    """
    if "model.name" in overrides:
        raise UserError(f"--model: the model is {model!r} already")
    overrides = {**overrides, "model.name": model}
    source = recipe_or_file or _its_own(model)
    if source is None and "eval.suites" in overrides:
        config = parse_config("", overrides, where="the command line")
    else:
        config = read_config(source, overrides, needed=("data", "reward"))
    suites = config.eval.suites or (_held_out() if source else _all_rows(config),)
    changed = tuple(each.model_copy(update=dict(changes or {})) for each in suites)
    return config.model_copy(update={"eval": EvalConfig(suites=changed)})


def _its_own(model: str) -> str | None:
    """The configuration that a model comes with, if it does."""
    kind, _, name = model.partition(":")
    if kind == "recipe":
        return name if name in list_recipes() else None
    path = Path(model).expanduser()
    written = path.parent.parent / "config.yaml"
    if path.parent.name == "checkpoints" and written.is_file():
        return str(written)
    return None


def _held_out() -> EvalSuite:
    """The suite where none is configured: the run's held-out prompts."""
    return EvalSuite(name="held_out")


def _all_rows(config: Config) -> EvalSuite:
    """The suite where nothing is trained: all that `data` names."""
    data = config.data
    return EvalSuite(name="data", source=data.source, options=data.options, size=data.size)
