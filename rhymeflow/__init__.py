"""Rhymeflow: asynchronous reinforcement-learning post-training of language models.

    import rhymeflow
    summary = rhymeflow.train(rhymeflow.load("demo", {"learner.max_steps": "10"}))

Importing this package imports neither torch nor transformers; each name is fetched on first use."""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from rhymeflow.config import Config
    from rhymeflow.config.load import read_config as load
    from rhymeflow.errors import UserError
    from rhymeflow.runtime.train import train
    from rhymeflow.trainer import Trainer

    __version__: str

_HOMES = {
    "Config": "rhymeflow.config",
    "Trainer": "rhymeflow.trainer",
    "UserError": "rhymeflow.errors",
    "load": "rhymeflow.config.load:read_config",
    "train": "rhymeflow.runtime.train",
}

__all__ = ["Config", "Trainer", "UserError", "__version__", "load", "train"]


def __getattr__(name: str) -> Any:
    if name == "__version__":
        from importlib.metadata import version

        return version("rhymeflow")
    if name not in _HOMES:
        raise AttributeError(f"module 'rhymeflow' has no attribute {name!r}")
    module, _, attribute = _HOMES[name].partition(":")
    return getattr(import_module(module), attribute or name)
