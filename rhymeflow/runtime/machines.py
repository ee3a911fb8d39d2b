"""Which machine a configuration's run is carried out on. Imports a runtime when it is asked for."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import AbstractContextManager
from pathlib import Path

from rhymeflow.config import Config
from rhymeflow.runtime.base import Runtime


def runtime_of(config: Config) -> Callable[[Config, Path, Path], AbstractContextManager[Runtime]]:
    """The runtime: made of the configuration, the run directory and the directory for logs.

    Raises:
        UserError: what it needs is not installed.
    """
    if config.runtime == "ray":
        from rhymeflow.runtime.ray.library import load

        load(config.ray.address)  # says what is missing
        from rhymeflow.runtime.ray.runtime import RayRuntime

        return RayRuntime
    from rhymeflow.runtime.local import LocalRuntime

    return LocalRuntime


__all__ = ["runtime_of"]
